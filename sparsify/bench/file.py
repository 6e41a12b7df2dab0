"""``sparsify bench-file``: its options, and its table of bytes an entry."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from sparsify.bench.settings import DTYPES
from sparsify.bench.shapes import BERTS
from sparsify.bench.sizes import SIGMA, Size, build, linear_weights, measure
from sparsify.errors import SparsifyError

MB = 1e6


def bench_file(
    shape: Annotated[str, typer.Option(help=f"Model shape: {', '.join(BERTS)}; its linear layers.")] = "bert-base",
    entries: Annotated[int, typer.Option(help="Entries of the delta.")] = 320_000,
    density: Annotated[float | None, typer.Option(help="Instead of entries: their share of the layers'.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the model: float32 or bfloat16.")] = "float32",
    json: Annotated[Path | None, typer.Option(help="Also write the numbers here.")] = None,
) -> None:
    """Compare file formats: bytes an entry, all included, beside the entropy bound."""
    for name, known, what in ((shape, BERTS, "shape"), (dtype, DTYPES, "dtype")):
        if name not in known:
            raise SparsifyError(f"unknown {what} {name!r}; expected one of {', '.join(known)}.")
    with torch.device("meta"):
        weights = linear_weights(build(shape, DTYPES[dtype]))
    numel = sum(weight.numel() for weight in weights.values())
    if density is not None:
        entries = round(density * numel)
    # Beyond some percent the densest layers would be full, and no adapter of PEFT could be padded to them.
    if not len(weights) <= entries <= numel // 50:
        raise SparsifyError(
            f"{entries:,} entries; expected {len(weights):,}, one a layer, to {numel // 50:,}, 2 % of the {numel:,} in "
            f"{shape}'s linear layers: change --entries or --density."
        )
    console = Console()
    with console.status("writing files"):
        sizes = measure(shape, entries, DTYPES[dtype])
    conditions = {
        "shape": shape,
        "dtype": dtype,
        "layers": len(weights),
        "numel": numel,
        "entries": entries,
        "density": entries / numel,
        "placement": f"density of each layer lognormal, sigma {SIGMA:g}, seed 0; at random within a layer",
    }
    console.print(
        f"{shape}, {dtype}: {entries:,} entries of {numel:,} in {len(weights)} linear layers ({entries / numel:.3%}); "
        f"{conditions['placement']}"
    )
    console.print(make_table(sizes))
    if json is not None:
        json.write_text(to_json(conditions, sizes) + "\n")


def make_table(sizes: Sequence[Size]) -> Table:
    """A row a format."""
    table = Table()
    for column in ("format", "bytes an entry", "MB", "to the bound", "what is counted"):
        table.add_column(column, justify="left" if column in ("format", "what is counted") else "right")
    bound = next(size for size in sizes if size.format == "entropy bound")
    for size in sizes:
        table.add_row(
            size.format,
            f"{size.bytes_per_entry:,.2f}",
            f"{size.num_bytes / MB:,.2f}",
            f"{size.bytes_per_entry / bound.bytes_per_entry:,.2f}",
            size.counted,
        )
    return table


def to_json(conditions: dict[str, Any], sizes: Sequence[Size]) -> str:
    """The conditions and the rows."""
    rows = [{**asdict(size), "bytes_per_entry": size.bytes_per_entry} for size in sizes]
    return json_module.dumps({"conditions": conditions, "sizes": rows}, indent=2)
