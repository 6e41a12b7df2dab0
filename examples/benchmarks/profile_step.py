"""Where a training step's time goes: the longest kernels, launches, host waits, and this library's parts of backward.

    python examples/benchmarks/profile_step.py --device cuda --dtype bfloat16 --batch 32 --plot profile.png

Times without a profiler first, then one step under torch's, which slows the host down. On a CPU, operators stand for
kernels, and nothing is launched.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from common import check_names, report, run, write_json
from step_bench.methods import METHODS
from step_bench.models import SHAPES
from step_bench.profiling import profile_step
from step_bench.run import run_worker
from step_bench.settings import DTYPES, Settings
from step_bench.worker import FILL, Worker

from sparsify.common.extras import require

SHOWN = 12  # kernels
WIDTH = 60  # characters of a kernel's name


def main(
    shape: Annotated[str, typer.Option(help=f"Model shape: {', '.join(SHAPES)}.")] = "bert-base",
    methods: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(METHODS)}.")] = "id3,lora",
    budget: Annotated[int, typer.Option(help="Entries.")] = 320_000,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens a sequence.")] = 128,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: Annotated[Path | None, typer.Option(help="Also write the numbers here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the kernels: a PNG.")] = None,
) -> None:
    """Break one training step of each method down."""
    names = methods.split(",")
    check_names([shape], SHAPES, "shape")
    check_names(names, METHODS, "method")
    check_names([dtype], DTYPES, "dtype")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            settings = Settings(name, shape, budget, batch=batch, length=seq, dtype=dtype, device=device, folder=folder)
            if METHODS[name].starts_filled and not settings.state_file.exists():
                run_worker(settings, FILL, {})
            results[name] = profile_step(Worker(settings))
            gc.collect()
    conditions = {"shape": shape, "budget": budget, "batch": batch, "seq": seq, "dtype": dtype, "device": device}
    write_json(json, results, **conditions)
    show(results, ", ".join(f"{name} {value}" for name, value in conditions.items()))
    if plot is not None:
        draw(results, plot)


def show(results: dict[str, dict[str, Any]], headline: str) -> None:
    """Prints a table of the steps, and one of each method's kernels."""
    rows = []
    for name, one in results.items():
        own = (sum(times[at] for times in one["ranges"].values()) for at in ("host", "device"))
        times = (one["step"], one["host"], sum(kernel[2] for kernel in one["kernels"]), *own)
        waits = ", ".join(f"{wait} {count}" for wait, count in one["waits"].items()) or "-"
        rows.append([name, *(f"{time:.2f}" for time in times), one["launches"], waits])
    columns = ["method", "step (ms)", "host (ms)", "kernels (ms)", "ours, host", "ours, device", "launches", "waits"]
    report(f"One step: {headline}", columns, rows, left=(0, 7))
    for name, one in results.items():
        kernels = [(kernel[:WIDTH], count, f"{time:.3f}") for kernel, count, time in one["kernels"][:SHOWN]]
        report(f"{name}: the longest", ["kernel", "count", "ms"], kernels)


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draws the longest kernels of each method and the sum of all others."""
    figure = require("matplotlib.figure", extra="plot").Figure(figsize=(8 * len(results), 5), layout="constrained")
    for ax, (name, one) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        shown, others = one["kernels"][:SHOWN], sum(kernel[2] for kernel in one["kernels"][SHOWN:])
        bars = [(f"{kernel[: WIDTH // 2]} ({count})", time) for kernel, count, time in shown] + [("others", others)]
        ax.bar_label(ax.barh(range(len(bars)), [time for _, time in bars]), fmt=" %.2f", fontsize=8)
        ax.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
        ax.invert_yaxis()
        title = f"{name}: {one['step']:.2f} ms a step, {one['launches']} launches; milliseconds of kernels"
        ax.set_title(title, fontsize=10)
    figure.savefig(path, format="png", dpi=150)


if __name__ == "__main__":
    run(main)
