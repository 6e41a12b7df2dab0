"""What a benchmark ends with: its conditions in words, a table with ratios, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sparsify.analysis.plots import COLORS
from sparsify.bench.methods import FLOOR, FULL, window_of
from sparsify.bench.run import Measurement
from sparsify.bench.shapes import note
from sparsify.common.extras import require

MB = 2**20
PANELS: tuple[tuple[str, Callable[[Measurement], float]], ...] = (
    ("time of a step (seconds)", lambda one: one.step_seconds),
    ("peak memory (GB)", lambda one: one.held_bytes / 1e9),
)


def headline(results: Sequence[Measurement], rounds: int, steps: int) -> str:
    """What was measured, and how."""
    first, settings = results[0], results[0].settings
    parts = [
        f"{settings.shape} ({first.parameters:,} parameters)", note(settings), settings.tokens or "random tokens",
        settings.dtype, settings.device, f"batch {settings.batch} x {settings.length}",
        "activation checkpointing" if settings.checkpointing else "",
        "glibc's own heap limits" if settings.heap == "system" else "",
        f"budget {settings.budget:,}", f"buffers filled to {settings.start / 10:g} %",
    ]  # fmt: skip
    cycles = "; id3-every-10 by means of 10 steps" if any(window_of(one.settings.method) > 1 for one in results) else ""
    libraries = f"memory beyond the {first.library_bytes / MB:,.0f} MB of libraries; resident: with the heap's holes"
    memory = "memory of tensors on the GPU" if settings.is_cuda else libraries
    medians = f"medians of {rounds * steps} steps in {rounds} interleaved rounds"
    return f"{', '.join(filter(None, parts))}: {medians}{cycles}; {memory}"


def make_table(results: Sequence[Measurement]) -> Table:
    """A row per method, with its ratios to full fine-tuning and to the floor where these were measured."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    bases = {name: one for name in (FULL, FLOOR) for one in results if one.settings.method == name}
    ratios = [f"/ {name}" for name in bases]
    columns = ["trained", "unmasked", "memory (MB)", *ratios, "resident (MB)"]
    columns += ["init (s)", "sparse (s)", "update (s)", "step (s)", *ratios]
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(column.replace(" (", "\n("), justify="right", no_wrap=True)
    for one in results:
        table.add_row(
            one.settings.method,
            f"{one.trained:,}" if one.trained else "-",
            f"{one.unmasked:,}" if one.unmasked else "-",
            f"{one.held_bytes / MB:,.0f}",
            *(f"{one.held_bytes / base.held_bytes:.2f}" for base in bases.values()),
            f"{one.peak_bytes / MB:,.0f}",
            f"{statistics.median(one.initialisations):.2f}",
            f"{statistics.median(one.sparse):.3f}" if one.sparse else "-",
            f"{statistics.median(one.updates):.3f}",
            f"{one.step_seconds:.3f}",
            *(f"{one.step_seconds / base.step_seconds:.2f}" for base in bases.values()),
        )
    return table


def plot(results: Sequence[Measurement], path: Path) -> None:
    """Draws time and memory: bars, or curves where there are several budgets or sizes of the model."""
    figure = require("matplotlib.figure", extra="plot").Figure(figsize=(10, 3.6), layout="constrained")
    first = results[0].settings
    budgets, sizes = {one.settings.budget for one in results}, {one.parameters for one in results}
    parts = [first.shape] * (len(sizes) == 1) + [f"budget {first.budget:,}"] * (len(budgets) == 1)
    figure.suptitle(
        ", ".join([*parts, first.dtype, first.device, f"batch {first.batch} x {first.length}"]), fontsize=10
    )
    for ax, (title, value_of) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        if len(budgets) * len(sizes) == 1:
            _draw_bars(ax, results, value_of)
        else:
            _draw_curves(ax, results, value_of, by_size=len(sizes) > 1, by_budget=len(budgets) > 1)
        ax.set_title(title, fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=150)


def _draw_bars(ax: Any, results: Sequence[Measurement], value_of: Callable[[Measurement], float]) -> None:
    values = {one.settings.method: value_of(one) for one in results}
    own = {"static": COLORS[4], "bitfit": COLORS[4]}  # this library's methods stand out
    colors = [COLORS[1] if name.startswith("id3") else own.get(name, COLORS[0]) for name in values]
    full = values.get(FULL)
    labels = [f" {value:.2f}" + (f"  ({value / full:.2f} x full)" if full else "") for value in values.values()]
    ax.bar_label(ax.barh(list(values), list(values.values()), color=colors), labels, fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.35)


def _draw_curves(
    ax: Any, results: Sequence[Measurement], value_of: Callable[[Measurement], float], by_size: bool, by_budget: bool
) -> None:
    """Against the model's size, a curve per method and budget; or against the budget."""
    curves: dict[str, dict[float, float]] = {}
    for one in results:
        label = one.settings.method + (f", budget {one.settings.budget:,}" if by_size and by_budget else "")
        x = one.parameters / 1e6 if by_size else one.settings.budget
        curves.setdefault(label, {})[x] = value_of(one)
    for (label, points), color in zip(curves.items(), COLORS * 9, strict=False):
        ax.plot(sorted(points), [points[x] for x in sorted(points)], "o-", color=color, label=label)
    ax.set_xscale("log")
    measured = sorted({x for points in curves.values() for x in points})
    ax.set_xticks(measured, [f"{x:,.0f}" for x in measured])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel("parameters (millions)" if by_size else "budget (entries)", fontsize=8)
    ax.legend(fontsize=8)
