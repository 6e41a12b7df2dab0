"""``sparsify bench-lora``: what a sparsely trained LoRA takes on disk, as PEFT's own file and as a delta.

A LoRA of a BERT with random weights is trained for two steps by ID3, so that its entries lie where ID3 puts them.
"""

from __future__ import annotations

import json as json_module
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from sparsify.api import sparsify
from sparsify.bench.shapes import BERTS
from sparsify.bench.sizes import Size, build
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import SparsifyError

STEPS = 2


def bench_lora(
    shape: Annotated[str, typer.Option(help=f"Model shape: {', '.join(BERTS)}.")] = "bert-base",
    rank: Annotated[int, typer.Option(help="Of the LoRA, on all linear layers.")] = 8,
    entries: Annotated[int, typer.Option(help="How many of its numbers are trained.")] = 320_000,
    json: Annotated[Path | None, typer.Option(help="Also write the numbers here.")] = None,
) -> None:
    """Compare files of a sparsely trained LoRA: bytes a trained entry, all included."""
    if shape not in BERTS:
        raise SparsifyError(f"unknown shape {shape!r}; expected one of {', '.join(BERTS)}.")
    console = Console()
    with console.status("training two steps, twice"):
        numel, sizes = measure_lora(shape, rank, entries)
    console.print(
        f"{shape}, LoRA of rank {rank} on all linear layers: {entries:,} of its {numel:,} float32 numbers trained "
        f"({entries / numel:.1%})"
    )
    table = Table("format", "bytes an entry", "MB", "what is counted")
    for size in sizes:
        table.add_row(size.format, f"{size.bytes_per_entry:,.2f}", f"{size.num_bytes / 1e6:,.2f}", size.counted)
    console.print(table)
    if json is not None:
        conditions = {"shape": shape, "rank": rank, "entries": entries, "numel": numel}
        rows = [{**asdict(size), "bytes_per_entry": size.bytes_per_entry} for size in sizes]
        json.write_text(json_module.dumps({"conditions": conditions, "sizes": rows}, indent=2) + "\n")


def measure_lora(shape: str, rank: int, entries: int) -> tuple[int, list[Size]]:
    """The number of a LoRA's numbers, and what ``entries`` of them take in each format."""
    sizes = []
    for fresh in ("store", "seed"):
        model = _trained_lora(shape, rank, entries, fresh)
        numel = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
        with tempfile.TemporaryDirectory() as folder:
            if fresh == "store":
                model.save_pretrained(folder)
                sizes.append(Size("PEFT", entries, _bytes(folder, "adapter_model.safetensors"), "all of the LoRA"))
            SparseDelta.from_model(model).save(folder)
            counted = "all of the LoRA" if fresh == "store" else "trained entries, and a seed"
            sizes.append(Size(f"delta, fresh='{fresh}'", entries, _bytes(folder, "sparse_delta.safetensors"), counted))
    return numel, sizes


def _trained_lora(shape: str, rank: int, entries: int, fresh: str) -> Any:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(build(shape, torch.float32), LoraConfig(r=rank, target_modules="all-linear"))
    sparsify(model, entries, steps=STEPS, fresh=fresh)
    optimizer = torch.optim.SGD([model.sparse_values], lr=1.0)
    for _ in range(STEPS):
        model(input_ids=torch.randint(1000, (2, 8))).pooler_output.square().mean().backward()
        optimizer.step()
    return model


def _bytes(folder: str, name: str) -> int:
    return (Path(folder) / name).stat().st_size
