"""``sparsify bench-ranks``: DDP on this machine's CPU, method beside method: step time, memory of a rank, bytes a step.

With ``--paper``: what the formulae of ``scale.py`` say about 64 GPUs and a model of 70 billion parameters.
"""

from __future__ import annotations

import json as json_module
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sparsify.bench.ranks_worker import METHODS
from sparsify.bench.run import answer, conditions
from sparsify.bench.scale import LLAMA_70B, at_scale
from sparsify.bench.settings import Settings
from sparsify.bench.shapes import BERTS
from sparsify.errors import SparsifyError

MB = 2**20


@dataclass
class RankMeasurement:
    """What one method took on several ranks.

    Attributes:
        settings: the method and the model.
        ranks: number of processes.
        trained: numbers that the optimizer trains.
        seconds: of each measured step, on the slowest rank.
        peak_bytes: the largest resident set of any rank, beyond the libraries'.
        averaging_bytes: that a rank sends a step to average gradients.
        choosing_bytes: that a rank sends a step to choose the same entries.
    """

    settings: Settings
    ranks: int
    trained: int = 0
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    averaging_bytes: list[int] = field(default_factory=list)
    choosing_bytes: list[int] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds)


def bench_ranks(
    shape: Annotated[str, typer.Option(help=f"Model shape: {', '.join(BERTS)}.")] = "minilm",
    methods: Annotated[str, typer.Option(help="Comma-separated; the first is what ratios refer to.")] = ",".join(
        METHODS
    ),
    ranks: Annotated[int, typer.Option(help="Processes of each method.")] = 2,
    budget: Annotated[int, typer.Option(help="Entries.")] = 38_000,
    fill: Annotated[float, typer.Option(help="Share of the budget unmasked before measuring.")] = 0.5,
    batch: Annotated[int, typer.Option(help="Sequences a step and rank.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens a sequence.")] = 128,
    rounds: Annotated[int, typer.Option(help="Turns of each method.")] = 5,
    steps: Annotated[int, typer.Option(help="Training steps a turn.")] = 2,
    threads: Annotated[int, typer.Option(help="Of each process.")] = 1,
    paper: Annotated[bool, typer.Option(help="Only print what formulae say about 70 billion parameters.")] = False,
    json: Annotated[Path | None, typer.Option(help="Also write the raw measurements here.")] = None,
) -> None:
    """Measure DDP training on several ranks side by side: step time, memory of a rank, bytes it sends."""
    console = Console()
    if paper:
        console.print(f"{LLAMA_70B.name}, 64 GPUs, 0.1 % of the entries, 10,000 steps; without activations")
        console.print(make_paper_table())
        return
    names = [name.strip() for name in methods.split(",")]
    for name, known, what in [*((name, METHODS, "method") for name in names), (shape, BERTS, "shape")]:
        if name not in known:
            raise SparsifyError(f"unknown {what} {name!r}; expected one of {', '.join(known)}.")
    settings = [Settings(name, shape, budget, fill, batch, seq, "float32", threads) for name in names]
    with console.status("starting") as status:
        results = measure_ranks(settings, ranks, rounds, steps, progress=status.update)
    console.print(
        f"{shape}, float32, {ranks} ranks with batch {batch} x {seq} each, budget {budget:,}: medians of "
        f"{rounds * steps} steps in {rounds} interleaved rounds"
    )
    console.print(make_table(results))
    if json is not None:
        rows = [asdict(result) for result in results]
        json.write_text(json_module.dumps({"conditions": conditions(), "results": rows}, indent=2) + "\n")


def measure_ranks(
    methods: Sequence[Settings],
    ranks: int = 2,
    rounds: int = 5,
    steps: int = 2,
    progress: Callable[[str], None] = lambda text: None,
) -> list[RankMeasurement]:
    """Measures the methods in interleaved rounds; all ranks of all methods are alive at once.

    Args:
        methods: what to measure.
        ranks: processes of each method.
        rounds: how often each method has its turn.
        steps: training steps a turn.
        progress: told what is being done.
    """
    results = [RankMeasurement(settings, ranks) for settings in methods]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        groups = []
        for number, result in enumerate(results):
            progress(f"{result.settings.method}: preparing")
            workers = [stack.enter_context(_start()) for _ in range(ranks)]
            for worker in workers:
                stack.callback(worker.kill)
            tasks = [
                {"settings": asdict(result.settings), "rank": rank, "ranks": ranks, "meeting": f"{folder}/{number}"}
                for rank in range(ranks)
            ]
            result.trained = _ask_all(workers, [json_module.dumps(task) for task in tasks])[0]["trained"]
            groups.append(workers)
        for number in range(1, rounds + 1):
            for workers, result in zip(groups, results, strict=True):
                progress(f"round {number} of {rounds}: {result.settings.method}")
                answers = _ask_all(workers, [str(steps)] * ranks)
                result.seconds += map(max, zip(*(answer["seconds"] for answer in answers), strict=True))
                result.peak_bytes = max(answer["peak_bytes"] for answer in answers)
                result.averaging_bytes.append(max(answer["averaging_bytes"] for answer in answers))
                result.choosing_bytes.append(max(answer["choosing_bytes"] for answer in answers))
    return results


def make_table(results: Sequence[RankMeasurement]) -> Table:
    """A row a method, with the ratio of its step time to the first one's."""
    table = Table()
    for column in ("method", "trained", "step (s)", "ratio", "peak memory (MB)", "averaging (MB)", "choosing (MB)"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for result in results:
        table.add_row(
            result.settings.method,
            f"{result.trained:,}",
            f"{result.step_seconds:.2f}",
            f"{result.step_seconds / results[0].step_seconds:.2f}",
            f"{result.peak_bytes / MB:,.0f}",
            f"{statistics.median(result.averaging_bytes) / 1e6:,.3f}",
            f"{statistics.median(result.choosing_bytes) / 1e6:,.3f}" if any(result.choosing_bytes) else "-",
        )
    return table


def make_paper_table() -> Table:
    """What each method takes at scale; bytes of choosing are upper bounds."""
    table = Table()
    for column in (
        "method",
        "state (GB/GPU)",
        "gradient at once",
        "weights (GB/step)",
        "gradients",
        "choosing, at most",
    ):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in at_scale(LLAMA_70B, ranks=64, budget=LLAMA_70B.num_parameters // 1000, steps=10_000):
        cells = (row.state_bytes, row.transient_bytes, row.weight_bytes, row.averaging_bytes, row.choosing_bytes)
        table.add_row(row.method, *(f"{cell / 1e9:,.2f}" if cell else "-" for cell in cells))
    return table


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sparsify.bench.ranks_worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask_all(workers: Sequence[subprocess.Popen[str]], lines: Sequence[str]) -> list[dict[str, Any]]:
    for worker, line in zip(workers, lines, strict=True):
        assert worker.stdin is not None
        worker.stdin.write(line + "\n")
        worker.stdin.flush()
    return [answer(worker) for worker in workers]
