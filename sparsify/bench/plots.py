"""Pictures of a benchmark: bars of time and memory, or curves against the budget and against the model's size.

In: measurements of one combination of shape, layers and budget, or of several. Out: a PNG.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparsify.analysis.plots import COLORS
from sparsify.bench.methods import FULL
from sparsify.bench.run import Measurement
from sparsify.bench.table import memory_of, ratio_to, seconds_of
from sparsify.common.extras import require

Value = Callable[[Measurement], float]
PANELS: tuple[tuple[str, str, Value, float], ...] = (
    ("time of a step", "seconds", seconds_of, 1.0),
    ("peak memory", "GB", memory_of, 1e9),
)


def plot(results: Sequence[Measurement], path: Path) -> None:
    """Draws what was measured.

    Args:
        results: of one combination of shape, layers and budget: bars. Of several: curves against what differs.
        path: the PNG.

    Raises:
        MissingExtraError: when matplotlib is not installed.
    """
    figures = require("matplotlib.figure", extra="plot")
    first = results[0].settings
    by_budget = [one for one in results if (one.settings.shape, one.settings.layers) == (first.shape, first.layers)]
    by_size = [one for one in results if one.settings.budget == first.budget]
    axes_wanted: list[tuple[str, list[Measurement], Value]] = []
    if len({one.settings.budget for one in by_budget}) > 1:
        axes_wanted.append((f"budget (entries), {first.shape}", by_budget, lambda one: one.settings.budget))
    if len({(one.settings.shape, one.settings.layers) for one in by_size}) > 1:
        axes_wanted.append(
            (f"parameters (millions), budget {first.budget:,}", by_size, lambda one: one.parameters / 1e6)
        )
    rows = max(1, len(axes_wanted))
    figure = figures.Figure(figsize=(10, 3.6 * rows), layout="constrained")
    axes = figure.subplots(rows, len(PANELS), squeeze=False)
    for row, (label, shown, x_of) in zip(axes, axes_wanted, strict=False):
        for ax, panel in zip(row, PANELS, strict=True):
            _draw_curves(ax, shown, x_of, label, panel)
    figure.suptitle(f"{first.dtype}, {first.device}, batch {first.batch} x {first.length}", fontsize=10)
    if not axes_wanted:
        figure.suptitle(f"{first.shape}, budget {first.budget:,}, {figure.get_suptitle()}", fontsize=10)
        for ax, panel in zip(axes[0], PANELS, strict=True):
            _draw_bars(ax, results, panel)
    figure.savefig(path, format="png", dpi=150)


def _draw_bars(ax: Any, results: Sequence[Measurement], panel: tuple[str, str, Value, float]) -> None:
    title, unit, value_of, scale = panel
    names = [one.settings.method for one in results]
    full = next((one for one in results if one.settings.method == FULL), None)
    bars = ax.barh(names, [value_of(one) / scale for one in results], color=[_color(name) for name in names])
    labels = [
        f" {value_of(one) / scale:.2f}" + (f"  ({ratio_to(full, one, value_of):.2f} x full)" if full else "")
        for one in results
    ]
    ax.bar_label(bars, labels, fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.35)
    ax.set_title(f"{title} ({unit})", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)


def _draw_curves(
    ax: Any, results: Sequence[Measurement], x_of: Value, label: str, panel: tuple[str, str, Value, float]
) -> None:
    title, unit, value_of, scale = panel
    for method, color in zip(dict.fromkeys(one.settings.method for one in results), COLORS * 2, strict=False):
        own = sorted((one for one in results if one.settings.method == method), key=x_of)
        ax.plot([x_of(one) for one in own], [value_of(one) / scale for one in own], "o-", color=color, label=method)
    ax.set_xscale("log")
    measured = sorted({x_of(one) for one in results})
    ax.set_xticks(measured, [f"{x:,.0f}" for x in measured])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel(label, fontsize=8)
    ax.set_title(f"{title} ({unit})", fontsize=10)
    ax.legend(fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def _color(method: str) -> str:
    """This library's methods stand out."""
    return COLORS[1] if method.startswith("id3") else COLORS[4] if method in ("static", "bitfit") else COLORS[0]
