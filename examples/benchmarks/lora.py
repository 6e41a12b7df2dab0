"""Size on disk of a sparsely trained LoRA: PEFT's own file, and the delta.

    python examples/benchmarks/lora.py

A LoRA of a BERT with random weights is trained for two steps by ID3, so that its entries lie where ID3 puts them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from common import BERTS, bert, check_names, report, run, saved_bytes, write_json
from peft import LoraConfig, get_peft_model

from sparsify import SparseDelta, sparsify

STEPS = 2


def main(
    shape: Annotated[str, typer.Option(help=f"Model shape: {', '.join(BERTS)}.")] = "bert-base",
    rank: Annotated[int, typer.Option(help="Of the LoRA, on all linear layers.")] = 8,
    entries: Annotated[int, typer.Option(help="How many of its numbers are trained.")] = 320_000,
    json: Annotated[Path | None, typer.Option(help="Also write the numbers here.")] = None,
) -> None:
    """Compare files of a sparsely trained LoRA: bytes a trained entry, all included."""
    check_names([shape], BERTS, "shape")
    numel, sizes = measure(shape, rank, entries)
    report(
        f"{shape}, LoRA of rank {rank} on all linear layers: {entries:,} of its {numel:,} float32 numbers trained "
        f"({entries / numel:.1%})",
        ["format", "bytes an entry", "MB"],
        [(name, f"{size / entries:,.2f}", f"{size / 1e6:,.2f}") for name, size in sizes.items()],
    )
    write_json(json, sizes, shape=shape, rank=rank, entries=entries, numel=numel)


def measure(shape: str, rank: int, entries: int) -> tuple[int, dict[str, int]]:
    """The LoRA's numbers, and the bytes that ``entries`` of them take in each format."""
    model = train(shape, rank, entries, fresh="store")
    numel = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        sizes = {"PEFT: all of the LoRA": Path(folder, "adapter_model.safetensors").stat().st_size}
    sizes["delta, fresh='store': all of the LoRA"] = saved_bytes(SparseDelta.from_model(model))
    drawn = SparseDelta.from_model(train(shape, rank, entries, fresh="seed"))
    sizes["delta, fresh='seed': trained entries, and a seed"] = saved_bytes(drawn)
    return numel, sizes


def train(shape: str, rank: int, entries: int, fresh: str) -> torch.nn.Module:
    model = get_peft_model(bert(shape), LoraConfig(r=rank, target_modules="all-linear"))
    sparsify(model, entries, steps=STEPS, fresh=fresh)
    optimizer = torch.optim.SGD([model.sparse_values], lr=1.0)
    for _ in range(STEPS):
        model(input_ids=torch.randint(1000, (2, 8))).pooler_output.square().mean().backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    run(main)
