"""Delta files built to attack, by the thousand: each must end well or in a ``SparsifyError``, whatever is done with it.

    python tests/helpers/fuzz_format.py --number 10000 --seed 0

Deltas of a small BERT, changed by the attacks of ``fuzz_attacks.py``, are loaded; those that load go through the other
targets, within limits of memory and time. The exit status is 1 unless each ends well or in a ``SparsifyError``;
``--first NUMBER --number 1`` tries one file again.
"""

import contextlib
import io
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from deltas import bits
from fuzz_attacks import ATTACKS, attacked
from fuzzing import count, examine, main
from models import bert
from peft import LoraConfig, get_peft_model
from safetensors import safe_open

from sparsify import SparseDelta, load_model, sparsify
from sparsify.adapters import add_adapters
from sparsify.cli.commands import info, verify


def make_base():
    torch.manual_seed(0)
    return bert()[0].eval()


def make_world(folder):
    model = make_base()
    world = SimpleNamespace(folder=folder / "files", base=folder / "base", model=model, untouched=bits(model))
    world.folder.mkdir()
    model.save_pretrained(world.base)
    return world


# Targets: each takes a file, and ends well or raises


def try_load(path, world):
    delta = SparseDelta.load(path)
    delta.save(again := world.folder / "again.safetensors")
    if (found := SparseDelta.load(again)) != delta or found.config != delta.config:
        raise AssertionError("saved and loaded again, the delta is another")


def try_info(path, world):
    for as_json in (False, True):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            info(str(path), as_json)
        if not as_json and not all(char.isprintable() or char == "\n" for char in printed.getvalue()):
            raise AssertionError("info prints what may steer a terminal")


def try_apply(path, world):
    delta = SparseDelta.load(path)
    try:
        delta.apply(world.model)
        delta.revert(world.model)
    finally:
        if bits(world.model) != world.untouched:
            raise AssertionError("the model has changed")


def try_verify(path, world):
    with contextlib.redirect_stdout(io.StringIO()):
        verify(str(path), world.base)


def try_merge(path, world):
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
            raise AssertionError("a merge leaves something outside its folder")


def try_load_model(path, world):
    load_model(world.base, SparseDelta.load(path))


QUICK = {"load": try_load, "info": try_info, "apply": try_apply, "verify": try_verify}
SLOW = {"merge": try_merge, "load_model": try_load_model}  # these load the base each time, and take more memory
TARGETS = QUICK | SLOW


def valid_files(folder):
    base, tuned = make_base(), make_base()
    generator = torch.Generator().manual_seed(1)
    for parameter in tuned.bert.encoder.layer[0].parameters():
        parameter.data[torch.rand(parameter.shape, generator=generator) < 0.1] += 1
    entries = SparseDelta.diff(base, tuned, progress=False)
    config = {"architecture": "BertForSequenceClassification", "model_config": {"num_labels": 3}}
    config["base_dtypes"] = ["float32"]
    head = {"classifier.weight": torch.ones(3, 16), "classifier.bias": torch.full((3,), torch.nan)}
    deltas = [SparseDelta(entries.tensors, head, config), (2 * entries).on(base, "add")]
    deltas[1].config |= config
    deltas.append(SparseDelta.diff(base.bfloat16(), tuned.bfloat16(), progress=False))
    options = {"steps": 5, "modules_to_save": ["classifier"]}
    lora = get_peft_model(make_base(), LoraConfig(r=4, target_modules=["query"], task_type="SEQ_CLS"))
    deltas.append(SparseDelta.from_model(sparsify(lora, 10, "id3", **options)))
    deltas.append(SparseDelta.from_model(sparsify(add_adapters(make_base(), "pfeiffer", 4), 10, "id3", **options)))
    for number, delta in enumerate(deltas):
        delta.config.pop("base_model_name_or_path", None)
        delta.save(folder / f"valid-{number}.safetensors")
    return [file.read_bytes() for file in sorted(folder.glob("valid-*"))]


def try_file(path, number, world):
    """The names of the targets that end well; one file in five of each kind of attack goes through the slow ones."""
    outcome = examine(path, QUICK, world)
    if "load" not in outcome.split() or number // len(ATTACKS) % 5:
        return outcome
    slow = examine(path, SLOW, world, 400)
    return slow if slow.startswith("BROKEN") else f"{outcome} {slow}"


def fuzz(number, seed, first=0):
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # a thread's arena is address space, too
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder))
        valid, path = valid_files(world.folder), world.folder / "attack.safetensors"
        path.write_bytes(valid[0])
        for target in TARGETS.values():  # whatever is set up on first use is no part of a file's cost
            target(path, world)

        def attempt(number):
            kind, _, data = attacked(number, seed, valid)
            path.write_bytes(data)
            outcome = try_file(path, number, world)
            shutil.rmtree(world.folder / "merged", ignore_errors=True)  # of one that was killed
            return kind, outcome

        return count(attempt, range(first, first + number))


if __name__ == "__main__":
    main(fuzz, __doc__)
