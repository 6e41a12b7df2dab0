"""What the scripts here share: shapes, deltas of given entries, tables, and JSON with its conditions."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table
from step_bench.run import conditions
from torch import Tensor

from sparsify import SparseDelta, SparsifyError
from sparsify.common.raw_bits import digest
from sparsify.delta.entries import TensorDelta
from sparsify.errors import did_you_mean

MB = 2**20
NOISE = 1_000_003  # random numbers that are repeated over large tensors
BERTS = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bert-base": {},
}


def run(main: Callable) -> None:
    """Runs a script's main function; an error of the library's is one line."""
    try:
        typer.run(main)
    except (SparsifyError, OSError) as error:
        sys.exit(str(error))


def check_names(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raises ``SparsifyError`` for the first unknown name, with those that are near."""
    known = list(known)
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise SparsifyError(f"unknown {what} {name!r}; expected one of {', '.join(known)}.{hint}")


def bert(shape: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A BERT encoder with random weights, the same at each call."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return BertModel(BertConfig(**BERTS[shape])).to(dtype)


def build(make: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
    """A model with random weights; large ones repeat a million random numbers, which is quick."""
    with torch.device("meta"):
        model = make()
    model.to(dtype).to_empty(device="cpu").tie_weights()
    noise = torch.randn(NOISE, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            for part in parameter.view(-1).split(NOISE):
                part.copy_(noise[: part.numel()])
    return model.eval()


def entries_of(weight: Tensor, indices: Tensor, train: Callable[[Tensor], Tensor]) -> TensorDelta:
    """A delta of one tensor at sorted flat indices (n,); ``train`` makes the values (n,) from the base's."""
    base = weight.detach().take(indices)
    return TensorDelta(indices, train(base), tuple(weight.shape), weight.dtype, "replace", digest(base))


def saved_bytes(delta: SparseDelta) -> int:
    """The size of a delta's file."""
    with tempfile.TemporaryDirectory() as folder:
        delta.save(folder)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def report(headline: str, columns: Sequence[str], rows: Iterable[Sequence[object]], left: Sequence[int] = (0,)) -> None:
    """Prints a table; the columns at ``left`` are text, the others numbers."""
    table = Table()
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place in left else "right")
    for row in rows:
        table.add_row(*map(str, row))
    console = Console()
    console.print(headline)
    console.print(table)


def write_json(path: Path | None, results: object, **settings: object) -> None:
    """Writes raw results with what they depend on, if there is a path."""
    if path is not None:
        path.write_text(json.dumps({"conditions": conditions() | settings, "results": results}, indent=2) + "\n")
