"""Time and memory of new values for some entries of a model that vLLM serves in this process, by three ways.

    $(tests/integrations/with_vllm/environment.sh) examples/benchmarks/vllm_updates.py --shape llama-1b

start      what a worker of the weight transfer backend "sparsify" asks vLLM's loader when it starts: where tensors are
new        a first snapshot: all entries are new, and looked up in memory and compared with the base
more       an update with new values of all entries, one in a hundred of which is new
values     an update with new values of entries that it knows
patches    vLLM's own sparse patches, ``load_checkpoint_weight_patches``
all        every weight through vLLM's loader, from the checkpoint's files in the system's cache

Times are from a message's file, or patches in memory, to written weights. The peak is memory beyond what the process
had before, of its own and of files that it has mapped, as Linux counts it. Rounds are interleaved.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR")

import torch
import typer
from common import MB, build, check_names, entries_of, report, run, write_json
from safetensors import safe_open
from stream import SHAPES
from torch import Tensor

from sparsify.delta.entries import TensorDelta
from sparsify.integrations.receiver import Request
from sparsify.stream.version import Changes, KnownValues, write_message

Entries = dict[str, TensorDelta]
WAYS, CHAIN = ("start", "new", "more", "values", "patches", "all"), "0" * 32
LATER = 100  # one entry in so many is in the first update, the others are in the snapshot


def main(
    shape: Annotated[str, typer.Option(help=f"Model shape: {', '.join(SHAPES)}.")] = "llama-1b",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    density: Annotated[float, typer.Option(help="Share of the weights that get new values.")] = 0.001,
    rounds: Annotated[int, typer.Option(help="Turns of each way.")] = 5,
    json: Annotated[Path | None, typer.Option(help="Write raw numbers here.")] = None,
) -> None:
    check_names([shape], SHAPES, "shape")
    check_names([dtype], ["bfloat16", "float32"], "dtype")
    with tempfile.TemporaryDirectory() as folder:
        model = build(SHAPES[shape], getattr(torch, dtype))
        model.save_pretrained(folder)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        torch.manual_seed(0)
        indices = {name: torch.randint(size, (max(1, int(size * density)),)).unique() for name, size in sizes.items()}
        later = {name: own[LATER - 1 :: LATER] for name, own in indices.items()}
        earlier = {name: own[~torch.isin(own, later[name])] for name, own in indices.items()}
        bases = [of_model(model, own) for own in (indices, earlier, later)]
        del model
        rows = measure(folder, dtype, *bases, rounds)
    count, total = sum(map(len, indices.values())), sum(sizes.values())
    columns = ("way", "bytes", "ms, median", "ms, least", "peak (MB)")
    report(f"{shape}, {dtype}: {count:,} of {total:,} weights; {rounds} rounds", columns, table(rows))
    write_json(json, rows, shape=shape, dtype=dtype, entries=count, weights=total)


def of_model(model: torch.nn.Module, indices: dict[str, Tensor]) -> Entries:
    parameters = sorted((name, own) for name, own in model.named_parameters() if len(indices[name]))
    return {name: entries_of(own, indices[name], lambda values: values) for name, own in parameters}


def measure(
    folder: str, dtype: str, base: Entries, earlier: Entries, later: Entries, rounds: int
) -> dict[str, list[dict[str, float]]]:
    from vllm import LLM
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    options = {"enforce_eager": True, "max_model_len": 64, "kv_cache_memory_bytes": 2**26, "skip_tokenizer_init": True}
    llm = LLM(folder, dtype=dtype, weight_transfer_config={"backend": "sparsify"}, **options)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    engine, served = worker.weight_transfer_engine, worker.get_model()
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}

    for number in range(1, rounds + 1):
        first, second, new = (train(part, number + turn) for turn, part in enumerate((earlier, later, base)))
        between = {name: part.values for name, part in train(earlier, number + 1).items()}
        patches = [CheckpointWeightPatch(n, p.shape, p.dtype, p.values, p.indices) for n, p in new.items()]
        version = partial(write_message, CHAIN)
        messages = {
            "new": version(3 * number, Changes(first, {}, None), {}),
            "more": version(3 * number + 1, Changes(second, {}, known(between)), {}),
            "values": version(3 * number + 2, Changes({}, {}, known({n: p.values for n, p in new.items()})), {}),
        }
        restore(served, folder)
        vars(engine).pop("_receiver")  # as a worker that was started anew
        rows["start"].append(timed(lambda: engine._receiver, 0))
        for way, message in messages.items():
            Path(folder, "update").write_bytes(message)
            request = Request(path=f"{folder}/update")
            rows[way].append(timed(partial(engine.receive_weights, request), len(message)))
        nbytes = sum(4 * len(p.indices) + p.values.nbytes for p in new.values())
        rows["patches"].append(timed(partial(load_checkpoint_weight_patches, served, patches), nbytes))
        check(served, new)
        rows["all"].append(timed(partial(restore, served, folder), os.path.getsize(f"{folder}/model.safetensors")))
    return rows


def train(base: Entries, seed: int) -> Entries:
    """The same entries with other values."""
    generator = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(part.count, generator=generator).to(part.dtype) for name, part in base.items()}
    return {name: replace(part, values=noise[name]) for name, part in base.items()}


def known(values: dict[str, Tensor]) -> dict[torch.dtype, KnownValues]:
    every = torch.cat(list(values.values()))
    return {every.dtype: KnownValues(every)}


def restore(served: Any, folder: str) -> None:
    served.load_weights(weights(folder))


def weights(folder: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(f"{folder}/model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def check(served: Any, new: dict[str, TensorDelta]) -> None:
    """Looks whether the token table, which is the same in vLLM, has the new values."""
    name = "model.embed_tokens.weight"
    held = served.get_parameter(name).flatten()[new[name].indices]
    assert held.equal(new[name].values), "the values are not there"


def timed(work: Callable[[], object], nbytes: int) -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before, start = resident("VmRSS"), time.perf_counter()
    work()
    return {"bytes": nbytes, "seconds": time.perf_counter() - start, "peak": resident("VmHWM") - before}


def resident(key: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) * 1024


def table(rows: dict[str, list[dict[str, float]]]) -> Iterator[tuple[str, ...]]:
    for way, own in rows.items():
        seconds = [row["seconds"] for row in own]
        peak = statistics.median(row["peak"] for row in own) / MB
        numbers = f"{own[-1]['bytes']:,}", f"{statistics.median(seconds) * 1000:,.1f}", f"{min(seconds) * 1000:,.1f}"
        yield way, *numbers, f"{peak:,.1f}"


if __name__ == "__main__":
    run(main)
