"""``sparsify demo``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sparsify.cli.demo.classifier import default_model, quiet_transformers
from sparsify.cli.demo.flow import Settings, run
from sparsify.cli.demo.report import RichReporter, make_table
from sparsify.errors import SparsifyError

DEFAULT_BUDGET = 38_000


def demo(
    model: Annotated[str, typer.Option(help="An encoder's name or path; by default all-MiniLM-L6-v2, offline.")] = "",
    strategy: Annotated[str, typer.Option(help="id3, pafi, random or bitfit.")] = "id3",
    budget: Annotated[
        str, typer.Option(help=f"Entries to train, or a share in (0, 1); {DEFAULT_BUDGET} unless bitfit.")
    ] = "",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 250,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    out: Annotated[Path, typer.Option(help="Folder for the delta.")] = Path("sparsify-demo"),
    seed: Annotated[int, typer.Option(help="Of the head, the batches and dropout.")] = 0,
) -> None:
    """Fine-tune a real model on real text, save the delta, load it onto a fresh base, compare."""
    settings = Settings(
        model=model or default_model(),
        strategy=strategy,
        budget=parse_budget(budget, strategy),
        steps=steps,
        lr=lr,
        out=out,
        seed=seed,
    )
    quiet_transformers()
    console = Console()
    with RichReporter(console, steps) as reporter:
        result = run(settings, reporter)
    console.print(make_table(settings, result))
    console.print(f"The delta is in {out}: SparseDelta.load({str(out)!r}).apply(model)", markup=False, highlight=False)


def parse_budget(text: str, strategy: str) -> int | float | None:
    """Entries, or a share of the candidates; where none is given, the default, or all of bitfit's biases.

    Raises:
        SparsifyError: when it is not a number.

    Example:
        >>> parse_budget("20_000", "id3"), parse_budget("0.01", "id3"), parse_budget("", "bitfit")
        (20000, 0.01, None)
    """
    if not text:
        return None if strategy == "bitfit" else DEFAULT_BUDGET
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise SparsifyError(f"budget={text!r}; expected a number of entries, or a share of the candidates in (0, 1).")
