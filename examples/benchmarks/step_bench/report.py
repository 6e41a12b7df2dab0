"""What a benchmark ends with: its conditions in words, a table with ratios, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from .methods import FLOOR, FULL
from .run import OUT_OF_MEMORY, Measurement

MB = 2**20
OURS = ("id3", "static")  # prefixes of this library's methods, which stand out
COLORS = ("#0072B2", "#D55E00")  # other methods, ours
PANELS: dict[str, Callable[[Measurement], float]] = {
    "time of a step (seconds)": lambda one: one.step_seconds,
    "peak memory (GB)": lambda one: one.held_bytes / 1e9,
}


def headline(results: Sequence[Measurement], rounds: int, steps: int) -> str:
    """What was measured, and how."""
    first, settings = max(results, key=lambda one: one.parameters), results[0].settings
    parts = [
        f"{settings.shape} ({first.parameters:,} parameters)", f"{settings.layers} layers" if settings.layers else "",
        settings.tokens or "random tokens", settings.dtype, settings.device,
        f"batch {settings.batch} x {settings.length}", f"budget {settings.budget:,}",
        f"buffers filled to {settings.start / 10:g} %",
    ]  # fmt: skip
    libraries = f"memory beyond the {first.library_bytes / MB:,.0f} MB of libraries; resident: with the heap's holes"
    memory = "memory of tensors on the GPU" if settings.is_cuda else libraries
    medians = f"medians of {rounds * steps} steps in {rounds} interleaved rounds"
    return f"{', '.join(filter(None, parts))}: {medians}; {memory}"


def rows_of(results: Sequence[Measurement]) -> tuple[list[str], list[list[str]]]:
    """Columns, and a row per method with its ratios to full fine-tuning and to the floor where these were measured."""
    measured = [one for one in results if one.updates]
    bases = [measured[_names(measured).index(name)] for name in (FULL, FLOOR) if name in _names(measured)]
    ratios = [f"/ {base.settings.method}" for base in bases]
    columns = ["method", "trained", "unmasked", "memory (MB)", *ratios, "resident (MB)"]
    columns += ["init (s)", "sparse (s)", "update (s)", "step (s)", *ratios]
    rows = []
    for one in results:
        if not one.updates:
            rows.append([one.settings.method, one.failed if one.failed == OUT_OF_MEMORY else "failed"])
            continue
        digits = 4 if one.settings.is_cuda else 3
        rows.append([
            one.settings.method,
            f"{one.trained:,}" if one.trained else "-",
            f"{one.unmasked:,}" if one.unmasked else "-",
            f"{one.held_bytes / MB:,.0f}",
            *(f"{one.held_bytes / base.held_bytes:.2f}" if base.held_bytes else "-" for base in bases),
            f"{one.peak_bytes / MB:,.0f}",
            f"{statistics.median(one.initialisations):.2f}",
            f"{statistics.median(one.sparse):.3f}" if one.sparse else "-",
            f"{statistics.median(one.updates):.{digits}f}",
            f"{one.step_seconds:.{digits}f}",
            *(f"{one.step_seconds / base.step_seconds:.2f}" for base in bases),
        ])  # fmt: skip
    return columns, rows


def make_table(results: Sequence[Measurement]) -> Any:
    """A table of rich's."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    (first, *columns), rows = rows_of(results)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column.replace(" (", "\n("), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def make_text(results: Sequence[Measurement]) -> str:
    """The same without rich."""
    columns, rows = rows_of(results)
    widths = [max(len(row[place]) for row in [columns, *rows] if place < len(row)) for place in range(len(columns))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) for row in [columns, *rows]]
    return "\n".join(lines)


def plot(results: Sequence[Measurement], path: Path) -> None:
    """Draws time and memory: a bar for each measured method, at each budget and size of the model."""
    from matplotlib.figure import Figure

    results = [one for one in results if one.updates]
    conditions = [
        (one.shape, f"{one.layers or 'all'} layers", f"budget {one.budget:,}", one.dtype, one.device,
         f"batch {one.batch} x {one.length}")
        for one in (result.settings for result in results)
    ]  # fmt: skip
    differ = [len(set(column)) > 1 for column in zip(*conditions, strict=True)]
    names = [", ".join([name, *compress(own, differ)]) for name, own in zip(_names(results), conditions, strict=True)]
    colors = [COLORS[1] if name.startswith(OURS) else COLORS[0] for name in names]
    size = (10, max(3.6, 0.4 * len(names)))  # inches
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(", ".join(compress(conditions[0], [not one for one in differ])), fontsize=10)
    for ax, (title, value_of) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        values = list(map(value_of, results))
        full = {
            own: value
            for own, value, one in zip(conditions, values, results, strict=True)
            if one.settings.method == FULL
        }
        labels = [
            f" {value:#.3g}" + (f"  ({value / full[own]:.2f} x full)" if full.get(own) else "")
            for value, own in zip(values, conditions, strict=True)
        ]
        ax.bar_label(ax.barh(names, values, color=colors), labels, fontsize=8)
        ax.invert_yaxis()
        ax.margins(x=0.35)
        ax.set_title(title, fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=150)


def _names(results: Sequence[Measurement]) -> list[str]:
    return [one.settings.method for one in results]
