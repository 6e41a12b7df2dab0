"""Delta files built to attack, by the thousand: each must end well or in a ``SparsifyError``, whatever is done with it.

    python tests/helpers/fuzz_targets.py --files 5000 --seed 0

Deltas of a small BERT (of entries and a head, LoRA, adapters, drawn tensors), changed by the attacks of
``fuzz_grammar.py``, go through every target below, each time with a limit of memory and of time. The promise: each ends
well or in a ``SparsifyError``, and a model or folder that it was not to change is as before. Exit status 1 and a list
of the files' numbers otherwise; `--first NUMBER --files 1` tries one of them again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from fuzz_format import ALLOWANCE, BATCH, address_space, bits, limit_address_space, run_batch
from fuzz_grammar import attacked
from models import bert
from peft import LoraConfig, get_peft_model
from safetensors import safe_open

from sparsify import SparseDelta, SparsifyError, load_model, sparsify
from sparsify.adapters import add_adapters
from sparsify.cli.commands import info, verify

MEGABYTE = 2**20


@dataclass
class World:
    """What the files are tried on: a folder for them, and a base as a checkpoint and as a model."""

    folder: Path
    base: Path
    model: torch.nn.Module
    untouched: dict[str, tuple]


# Targets: each takes a file, and ends well or raises


def try_load(path: Path, world: World) -> None:
    delta = SparseDelta.load(path)
    again = world.folder / "again.safetensors"
    delta.save(again)
    if (found := SparseDelta.load(again)) != delta or found.config != delta.config:
        raise AssertionError("saved and loaded again, the delta is another")


def try_info(path: Path, world: World) -> None:
    for as_json in (False, True):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            info(str(path), as_json)
        if not as_json and not all(char.isprintable() or char == "\n" for char in printed.getvalue()):
            raise AssertionError("info prints what may steer a terminal")


def try_apply(path: Path, world: World) -> None:
    delta = SparseDelta.load(path)
    try:
        delta.apply(world.model)
        delta.revert(world.model)
    finally:
        if bits(world.model) != world.untouched:
            raise AssertionError("the model has changed")


def try_verify(path: Path, world: World) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        verify(str(path), world.base)


def try_merge(path: Path, world: World) -> None:
    out, before = world.folder / "merged", sorted(os.listdir(world.folder))
    try:
        SparseDelta.load(path).merge(world.base, out)
        for shard in out.glob("*.safetensors"):
            with safe_open(shard, framework="pt") as file:
                assert all(file.get_slice(key).get_shape() is not None for key in file.keys()), shard  # noqa: SIM118
        transformers.AutoConfig.from_pretrained(out)
    finally:
        shutil.rmtree(out, ignore_errors=True)
        if sorted(os.listdir(world.folder)) != before:
            raise AssertionError("a merge leaves something beside its folder")


def try_load_model(path: Path, world: World) -> None:
    load_model(world.base, SparseDelta.load(path))


Target = Callable[[Path, World], None]
TARGETS: dict[str, tuple[Target, int]] = {  # and the address space that it may take beside 32 x the file
    "load": (try_load, ALLOWANCE),
    "info": (try_info, ALLOWANCE),
    "apply": (try_apply, ALLOWANCE),
    "verify": (try_verify, ALLOWANCE),
    "merge": (try_merge, 400 * MEGABYTE),
    "load_model": (try_load_model, 400 * MEGABYTE),
}


# Files


def make_base() -> torch.nn.Module:
    torch.manual_seed(0)
    return bert()[0].eval()


def valid_files(folder: Path) -> list[bytes]:
    """Deltas of the base: of entries and a head, of differences, of a LoRA, of one that is drawn, and of adapters."""
    base, tuned = make_base(), make_base()
    generator = torch.Generator().manual_seed(1)
    for parameter in tuned.bert.encoder.layer[0].parameters():
        chosen = torch.rand(parameter.shape, generator=generator) < 0.1
        parameter.data[chosen] += 1
    entries = SparseDelta.diff(base, tuned, progress=False)
    config = {
        "architecture": "BertForSequenceClassification",
        "model_config": {"num_labels": 3},
        "base_dtypes": ["float32"],
    }
    whole = {"classifier.weight": torch.ones(3, 16), "classifier.bias": torch.ones(3)}
    deltas = [SparseDelta(entries.tensors, whole, config), (2 * entries).on(base, "add")]
    deltas[1].config |= config
    for fresh in ("store", "seed"):
        lora = get_peft_model(
            make_base(), LoraConfig(r=2 if fresh == "store" else 16, target_modules=["query"], task_type="SEQ_CLS")
        )
        deltas.append(SparseDelta.from_model(sparsify(lora, 10, steps=5, modules_to_save=["classifier"], fresh=fresh)))
    adapted = add_adapters(make_base(), "pfeiffer", 4)
    deltas.append(SparseDelta.from_model(sparsify(adapted, 10, steps=5, modules_to_save=["classifier"])))
    files = []
    for delta in deltas:
        delta.config.pop("base_model_name_or_path", None)
        delta.save(folder / "valid.safetensors")
        files.append((folder / "valid.safetensors").read_bytes())
    return files


# Workers


def work(
    numbers: list[int], seed: int, folder: str, results: Connection, targets: Sequence[str] = tuple(TARGETS)
) -> None:
    """One worker: sends files through the targets, and says before each which one, should it not live to say more."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    world = World(Path(folder) / "files", Path(folder) / "base", make_base(), {})
    world.folder.mkdir()
    world.model.save_pretrained(world.base)
    world.untouched = bits(world.model)
    valid, path = valid_files(world.folder), world.folder / "attack.safetensors"
    for data in valid:  # whatever is set up on first use is no part of a file's cost
        path.write_bytes(data)
        for name in targets:
            with contextlib.suppress(SparsifyError):
                TARGETS[name][0](path, world)
    for number in numbers:
        kind, data = attacked(number, seed, valid)
        path.write_bytes(data)
        passed = []
        for name in targets:
            target, allowance = TARGETS[name]
            results.send((number, "started", f"{name} after {kind}"))
            limit_address_space(address_space() + allowance + 32 * len(data))
            try:
                target(path, world)
                passed.append(name)
            except SparsifyError as error:
                if len(str(error)) > 4000 or not str(error).isprintable():
                    error = str(error)[:100]
                    limit_address_space(resource.RLIM_INFINITY)
                    results.send((number, f"BROKEN: {name}: the message quotes the file unchecked: {error!a}", kind))
                    break
            except BaseException as error:
                limit_address_space(resource.RLIM_INFINITY)
                results.send((number, f"BROKEN: {name}: {type(error).__name__}: {str(error)[:300]!a}", kind))
                break
            finally:
                limit_address_space(resource.RLIM_INFINITY)
        else:
            results.send((number, " ".join(passed) or "refused", kind))


def fuzz(
    files: int, seed: int, first: int = 0, targets: Sequence[str] = tuple(TARGETS), step: int = 1
) -> tuple[dict[str, Counter], list[tuple[int, str]]]:
    """Tries that many files, one in ``step``: how often each target ended well, by kind of attack, and failures."""
    os.environ |= {"MALLOC_ARENA_MAX": "1", "HF_DEACTIVATE_ASYNC_LOAD": "1"}  # a thread's arena is address space, too
    counts: dict[str, Counter] = {}
    failures = []
    numbers = list(range(first, first + step * files, step))
    while numbers:
        failure = run_batch(numbers[:BATCH], seed, counts, partial(work, targets=targets))
        if failure:
            failures.append(failure)
        numbers = [number for number in numbers if number > (failure[0] if failure else numbers[:BATCH][-1])]
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first file, to try one again")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    arguments = parser.parse_args()
    start = time.monotonic()
    counts, failures = fuzz(arguments.files, arguments.seed, arguments.first, arguments.targets)
    print(f"{'attack':<20}" + "".join(f"{name:>12}" for name in [*TARGETS, "files"]))
    for kind, counter in sorted(counts.items()):
        passed = [sum(n for outcome, n in counter.items() if name in outcome.split()) for name in TARGETS]
        print(f"{kind:<20}" + "".join(f"{number:>12,}" for number in [*passed, counter.total()]))
    print(f"{arguments.files:,} files in {time.monotonic() - start:.0f} seconds")
    for number, reason in failures:
        print(f"file {number} of seed {arguments.seed}: {reason}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
