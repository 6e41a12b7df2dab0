"""``sparsify bench``: its options, and the table it ends with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sparsify.bench.run import Measurement, measure, to_json
from sparsify.bench.worker import METHODS, SHAPES, Settings
from sparsify.errors import SparsifyError

MB = 2**20


def bench(
    shape: Annotated[str, typer.Option(help=f"Model shape: {', '.join(SHAPES)}.")] = "bert-base",
    methods: Annotated[str, typer.Option(help="Comma-separated; the first is what ratios refer to.")] = "full,id3",
    budget: Annotated[int, typer.Option(help="Entries.")] = 320_000,
    fill: Annotated[float, typer.Option(help="Share of the budget unmasked before measuring.")] = 0.5,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens a sequence.")] = 128,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "float32",
    rounds: Annotated[int, typer.Option(help="Turns of each method.")] = 5,
    steps: Annotated[int, typer.Option(help="Training steps a turn.")] = 2,
    threads: Annotated[int, typer.Option(help="Of each process; 0 for torch's default.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write the raw measurements here.")] = None,
) -> None:
    """Measure training steps side by side: step time, peak memory, and their ratios."""
    names = [name.strip() for name in methods.split(",")]
    for name, known, what in [*((name, METHODS, "method") for name in names), (shape, SHAPES, "shape")]:
        if name not in known:
            raise SparsifyError(f"unknown {what} {name!r}; expected one of {', '.join(known)}.")
    settings = [Settings(name, shape, budget, fill, batch, seq, dtype, threads) for name in names]
    console = Console()
    with console.status("starting") as status:
        results = measure(settings, rounds, steps, progress=status.update)
    console.print(
        f"{shape}, {dtype}, batch {batch} x {seq}, budget {budget:,}: medians of {rounds * steps} steps "
        f"in {rounds} interleaved rounds; memory beyond the {results[0].library_bytes / MB:,.0f} MB of the libraries"
    )
    console.print(make_table(results))
    if json is not None:
        json.write_text(to_json(results) + "\n")


def make_table(results: Sequence[Measurement]) -> Table:
    """A row a method, with the ratios to the first one."""
    table = Table()
    for column in ("method", "unmasked", "init (s)", "step (s)", "ratio", "peak memory (MB)", "ratio "):
        table.add_column(column, justify="left" if column == "method" else "right")
    first = results[0]
    for result in results:
        table.add_row(
            result.settings.method,
            f"{result.unmasked:,}" if result.unmasked else "-",
            f"{result.initialisation:.2f}",
            f"{result.step_seconds:.2f}",
            f"{result.step_seconds / first.step_seconds:.2f}",
            f"{result.peak_bytes / MB:,.0f}",
            f"{result.peak_bytes / first.peak_bytes:.2f}",
        )
    return table
