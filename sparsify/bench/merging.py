"""``sparsify bench-merge``: the memory and time that it takes to merge a delta into a large sharded checkpoint.

A checkpoint of random weights and a delta for it are written to a temporary folder; a child process, this same file,
merges the two and reports its largest resident set.
"""

from __future__ import annotations

import json as json_module
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import safetensors.torch
import torch
import typer
from rich.console import Console
from rich.table import Table

from sparsify.bench.memory import peak_bytes
from sparsify.bench.run import conditions
from sparsify.common.raw_bits import digest
from sparsify.delta.checkpoint.reader import INDEX_NAME, Checkpoint
from sparsify.delta.entries import TensorDelta
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import SparsifyError

MB = 2**20
_UNITS = {"MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}
_COLUMNS = 4096
_TENSORS_A_SHARD = 8


def bench_merge(
    size: Annotated[str, typer.Option(help="Of the checkpoint, in bfloat16: 2GB, 500MB.")] = "2GB",
    shards: Annotated[int, typer.Option(help="Files of weights.")] = 4,
    density: Annotated[float, typer.Option(help="Share of the entries that the delta changes.")] = 0.001,
    folder: Annotated[Path | None, typer.Option(help="Where to write the temporary files: twice the size.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the raw measurements here.")] = None,
) -> None:
    """Measure the memory that merging a delta into a sharded checkpoint takes."""
    total = parse_size(size)
    if not 0 < density <= 1:
        raise SparsifyError(f"density={density}; expected a share of the entries: above 0, at most 1.")
    console = Console()
    with tempfile.TemporaryDirectory(dir=folder, prefix="sparsify-bench-merge-") as temporary:
        place = Path(temporary)
        with console.status("writing a checkpoint and a delta"):
            make_checkpoint(place / "base", total, shards)
            make_delta(place / "base", density).save(place / "delta")
        largest = max(file.stat().st_size for file in (place / "base").glob("*.safetensors"))
        with console.status("merging"):
            result = {"largest_shard_bytes": largest, **measure(place / "delta", place / "base", place / "merged")}
    console.print(
        f"{size} of bfloat16 in {shards} shards, density {density:.2%}, mapped pages of files counted as memory"
    )
    console.print(make_table(result))
    if json is not None:
        settings = {"size": size, "shards": shards, "density": density}
        json.write_text(json_module.dumps({"conditions": conditions(), **settings, **result}, indent=2) + "\n")


def make_table(result: dict[str, float]) -> Table:
    """One row: memory in MB, and seconds."""
    table = Table("largest shard (MB)", "peak memory (MB)", "beyond the libraries (MB)", "seconds")
    peak, libraries = result["peak_bytes"], result["library_bytes"]
    memory = (result["largest_shard_bytes"], peak, peak - libraries)
    table.add_row(*(f"{number / MB:,.0f}" for number in memory), f"{result['seconds']:.1f}")
    return table


def parse_size(text: str) -> int:
    """Bytes.

    Example:
        >>> parse_size("2GB"), parse_size("1.5 MiB")
        (2000000000, 1572864)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]+)", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise SparsifyError(f"size {text!r}; expected a number and a unit: 2GB, 500MB, 1.5GiB.")
    return int(float(match[1]) * _UNITS[match[2]])


def make_checkpoint(folder: Path, nbytes: int, shards: int) -> None:
    """Writes random bfloat16 weights of about ``nbytes`` in all, in files of equal size."""
    if shards < 1:
        raise SparsifyError(f"shards={shards}; expected at least 1.")
    folder.mkdir(parents=True)
    rows = max(1, math.ceil(nbytes / (2 * _COLUMNS * _TENSORS_A_SHARD * shards)))
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = [f"layers.{shard * _TENSORS_A_SHARD + number}.weight" for number in range(_TENSORS_A_SHARD)]
        tensors = {name: torch.randn(rows, _COLUMNS, dtype=torch.bfloat16) for name in names}
        safetensors.torch.save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX_NAME).write_text(json_module.dumps({"metadata": {}, "weight_map": weight_map}))


def make_delta(base: Path, density: float) -> SparseDelta:
    """A delta that changes a share of the entries of every tensor, evenly spread."""
    checkpoint = Checkpoint(base)
    step = max(1, round(1 / density))
    tensors = {}
    for name, weight in checkpoint.items():
        indices = torch.arange(0, weight.numel(), step)
        before = weight.take(indices)
        tensors[name] = TensorDelta(indices, before + 1, tuple(weight.shape), weight.dtype, "replace", digest(before))
    return SparseDelta(tensors)


def measure(delta: Path, base: Path, out: Path) -> dict[str, float]:
    """Merges in a child process: its seconds, and its peak memory with the imported libraries alone and in the end."""
    command = [sys.executable, "-m", "sparsify.bench.merging", str(delta), str(base), str(out)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json_module.loads(run.stdout)
    return result


def _merge() -> None:
    path, base, out = sys.argv[1:]
    libraries, started = peak_bytes(), time.perf_counter()
    SparseDelta.load(path).merge(base, out)
    seconds = time.perf_counter() - started
    print(json_module.dumps({"library_bytes": libraries, "peak_bytes": peak_bytes(), "seconds": seconds}))


if __name__ == "__main__":
    _merge()
