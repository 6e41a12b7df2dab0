"""Memory and time of merging a delta into a large sharded checkpoint.

    python examples/benchmarks/merge.py --gigabytes 2 --shards 4

A checkpoint of random weights and a delta for it are written to a temporary folder; a child process, this same file,
merges the two and reports its largest resident set. Mapped pages of files count as memory.
"""

from __future__ import annotations

import json as json_module
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import safetensors.torch
import torch
import typer
from common import MB, entries_of, report, run, write_json
from step_bench.worker import peak_bytes

from sparsify import SparseDelta, SparsifyError
from sparsify.delta.checkpoint.reader import INDEX_NAME, Checkpoint

CHILD = "--merge-and-report"
COLUMNS = 4096
TENSORS_PER_SHARD = 8


def main(
    gigabytes: Annotated[float, typer.Option(help="Size of the checkpoint, in bfloat16.")] = 2.0,
    shards: Annotated[int, typer.Option(help="Files of weights.")] = 4,
    density: Annotated[float, typer.Option(help="Share of the entries that the delta changes.")] = 0.001,
    folder: Annotated[Path | None, typer.Option(help="Where to write the temporary files: twice the size.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the raw measurements here.")] = None,
) -> None:
    """Measure the memory that merging a delta into a sharded checkpoint takes."""
    if not (gigabytes > 0 and shards > 0 and 0 < density <= 1):
        raise SparsifyError("expected --gigabytes above 0, --shards of at least 1 and --density in (0, 1].")
    with tempfile.TemporaryDirectory(dir=folder, prefix="sparsify-merge-") as temporary:
        result = measure(Path(temporary), round(gigabytes * 1e9), shards, density)
    peak, libraries = result["peak_bytes"], result["library_bytes"]
    report(
        f"{gigabytes:g} GB of bfloat16 in {shards} shards, density {density:.2%}",
        ["largest shard (MB)", "peak memory (MB)", "beyond the libraries (MB)", "seconds"],
        [(*(f"{b / MB:,.0f}" for b in (result["shard_bytes"], peak, peak - libraries)), f"{result['seconds']:.1f}")],
        left=(),
    )
    write_json(json, result, gigabytes=gigabytes, shards=shards, density=density)


def measure(folder: Path, num_bytes: int, shards: int, density: float) -> dict[str, float]:
    """Writes checkpoint and delta, and merges them in a child process."""
    make_checkpoint(folder / "base", num_bytes, shards)
    make_delta(folder / "base", density).save(folder / "delta")
    command = [sys.executable, __file__, CHILD, *(str(folder / name) for name in ("delta", "base", "merged"))]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    shard_bytes = max(file.stat().st_size for file in (folder / "base").glob("*.safetensors"))
    return {"shard_bytes": shard_bytes, **json_module.loads(child.stdout)}


def make_checkpoint(folder: Path, num_bytes: int, shards: int) -> None:
    """Random bfloat16 weights of about ``num_bytes`` in all, in files of equal size."""
    folder.mkdir(parents=True)
    rows = max(1, math.ceil(num_bytes / (2 * COLUMNS * TENSORS_PER_SHARD * shards)))
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = [f"layers.{shard * TENSORS_PER_SHARD + number}.weight" for number in range(TENSORS_PER_SHARD)]
        tensors = {name: torch.randn(rows, COLUMNS, dtype=torch.bfloat16) for name in names}
        safetensors.torch.save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX_NAME).write_text(json_module.dumps({"metadata": {}, "weight_map": weight_map}))


def make_delta(base: Path, density: float) -> SparseDelta:
    """A delta that changes a share of the entries of every tensor, evenly spread."""
    indices = {name: torch.arange(0, weight.numel(), round(1 / density)) for name, weight in Checkpoint(base).items()}
    weights = Checkpoint(base)
    return SparseDelta({name: entries_of(weights[name], indices[name], lambda old: old + 1) for name in indices})


def merge_and_report(delta: str, base: str, out: str) -> None:
    libraries, started = peak_bytes(), time.perf_counter()
    SparseDelta.load(delta).merge(base, out)
    seconds = time.perf_counter() - started
    print(json_module.dumps({"library_bytes": libraries, "peak_bytes": peak_bytes(), "seconds": seconds}))


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        merge_and_report(*sys.argv[2:])
    else:
        run(main)
