"""Pictures of a selection: its trajectory over the steps, and the unmasked share by layer and kind of tensor.

In: sparsified models (or deltas, for the shares), one or several by label. Out: a matplotlib figure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import matplotlib
from matplotlib import colors, pyplot, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from examples.analysis.trajectory import trajectory
from sparsify import SparsifyError
from sparsify.analysis import Source, TensorShare, places, shares

# Okabe and Ito's colour-blind safe palette; the line styles differ in greyscale, too
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
COLORMAP = "viridis_r"
NONE_COLOR = "#e4e4e4"  # of tensors with nothing unmasked
LOG_FROM = 20.0  # ratio of the largest to the smallest share from which on colours are logarithmic
MAX_LABELS = 16  # of layers
SMALL, TITLE = 8, 10  # points, of tick labels and titles


def plot_trajectory(model: nn.Module | Mapping[str, nn.Module], points: int = 100) -> Figure:
    """Draws selection entropy and tensor sparsity over the optimizer steps, from the first unmasked entry on.

    Args:
        model: a sparsified model, or several by label, drawn in the same axes.
        points: maximum number of points of each curve.
    """
    models = _by_label(model)
    curves = [[point for point in trajectory(one, points) if point.unmasked] for one in models.values()]
    figure, (entropy, sparsity) = pyplot.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
    for label, curve, color, style in zip(models, curves, cycle(COLORS), cycle(STYLES), strict=False):
        look: Any = {"color": color, "linestyle": style, "label": label, "marker": "o" if len(curve) == 1 else ""}
        steps = [point.step for point in curve]
        entropy.plot(steps, [point.selection_entropy for point in curve], **look)
        sparsity.plot(steps, [100 * point.tensor_sparsity for point in curve], **look)
    entropy.set_title("How evenly the tensors are unmasked", fontsize=TITLE)
    sparsity.set_title("Tensors with nothing unmasked", fontsize=TITLE)
    entropy.set(ylabel="selection entropy (nats)", ylim=(0, None))
    sparsity.set(ylabel="tensor sparsity (%)", ylim=(0, 100))
    for axes in (entropy, sparsity):
        axes.set_xlabel("optimizer step")
        axes.locator_params(axis="x", integer=True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if isinstance(model, Mapping):
        sparsity.legend(frameon=False)
    return figure


def plot_shares(source: Source | Mapping[str, Source]) -> Figure:
    """Draws the unmasked share of every tensor: a row for each kind, a column for each layer.

    Tensors outside of layers have a column of their own. Tensors with nothing unmasked are grey; cells without a
    tensor, or with one that a delta does not contain, are white. The colours are logarithmic where the shares are far
    apart.

    Args:
        source: a sparsified model or a delta, or several by label, drawn side by side in the same colours.
    """
    by_label = tables(_by_label(source))
    rows = [row for table in by_label.values() for row in table]
    if not rows:
        raise SparsifyError("there is nothing to draw: no tensor has entries in the delta; train further.")
    kinds = _kinds(by_label.values())
    layers = sorted({row.layer for row in rows}, key=lambda layer: -1 if layer is None else layer)
    grids = {label: _grid(table, kinds, layers) for label, table in by_label.items()}
    width = 1.3 + 0.065 * max(map(len, kinds)) + len(grids) * max(2.6, 0.3 * len(layers))  # inches
    size = (width, max(2.8, 1.0 + 0.2 * len(kinds)))
    figure, [panels] = pyplot.subplots(1, len(grids), squeeze=False, layout="constrained", figsize=size, sharey=True)
    norm = _norm([share for grid in grids.values() for row in grid for share in row])
    for panel, (label, table) in zip(panels, by_label.items(), strict=True):
        mesh = _draw(panel, grids[label], kinds, layers, norm)
        title = f"{sum(row.unmasked for row in table):,} unmasked entries"
        panel.set_title(f"{label}\n{title}" if label else title, fontsize=TITLE)
    _add_bar(panels[-1], mesh, has_empty=not all(row.unmasked for row in rows))
    return figure


def tables(sources: Mapping[str, Source]) -> dict[str, list[TensorShare]]:
    """The shares of several sources by label, with layers and kinds from all their names together."""
    found = {label: shares(source) for label, source in sources.items()}
    place_of = places(row.name for rows in found.values() for row in rows)
    for rows in found.values():
        rows[:] = (replace(row, layer=layer, kind=kind) for row in rows for layer, kind in [place_of[row.name]])
    return found


def _grid(table: Sequence[TensorShare], kinds: Sequence[str], layers: Sequence[int | None]) -> list[list[float]]:
    """Unmasked shares (kinds, layers), nan without a tensor; tensors of one cell, such as experts, are summed."""
    unmasked: Counter[tuple[str, int | None]] = Counter()
    size: Counter[tuple[str, int | None]] = Counter()
    for row in table:
        unmasked[row.kind, row.layer] += row.unmasked
        size[row.kind, row.layer] += row.size
    cells = {cell: unmasked[cell] / size[cell] for cell in size}
    return [[cells.get((kind, layer), math.nan) for layer in layers] for kind in kinds]


def _kinds(by_source: Iterable[Sequence[TensorShare]]) -> list[str]:
    """The kinds in order: outside before the first layer, within a layer, outside after it.

    In a layer that lacks some kinds the others have lower positions, so that the highest position of each kind counts.
    """
    last: dict[str, tuple[int, int]] = {}
    for table in by_source:
        num_rows: Counter[int | None] = Counter()
        outside = 0
        for row in table:
            outside = max(outside, 2 * (row.layer is not None))
            group = outside if row.layer is None else 1
            last[row.kind] = max(last.get(row.kind, (0, 0)), (group, num_rows[row.layer]))
            num_rows[row.layer] += 1
    return sorted(last, key=last.__getitem__)


def _draw(panel: Axes, grid: Any, kinds: Sequence[str], layers: Sequence[int | None], norm: Any) -> Any:
    """Draws one source's cells; returns the mesh for a colour bar."""
    colormap = matplotlib.colormaps[COLORMAP].with_extremes(under=NONE_COLOR, bad="none")
    below = norm.vmin / 2 if norm.vmin else -1.0
    cells = [[share or below for share in row] for row in grid]
    mesh = panel.pcolormesh(cells, cmap=colormap, norm=norm, edgecolors="white", linewidth=0.8)
    panel.set_ylim(len(kinds), 0)
    panel.set_yticks([y + 0.5 for y in range(len(kinds))], kinds, fontsize=SMALL)
    first = int(layers[0] is None)
    labelled = [*range(first), *range(first, len(layers), -(-len(layers) // MAX_LABELS))]
    names = ["none" if layers[x] is None else str(layers[x]) for x in labelled]
    panel.set_xticks([x + 0.5 for x in labelled], names, fontsize=SMALL)
    panel.set_xlabel("layer")
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    return mesh


def _norm(shares: Sequence[float]) -> Any:
    """The scale of the colours: logarithmic where the shares are far apart, otherwise linear from zero."""
    positive = [share for share in shares if share > 0] or [1.0]
    if max(positive) > LOG_FROM * min(positive):
        return colors.LogNorm(min(positive), max(positive))
    return colors.Normalize(0, max(positive))


def _add_bar(panel: Any, mesh: Any, *, has_empty: bool) -> None:
    """Adds a colour bar in percent; on a logarithmic scale, its ticks are at 1, 2, 5 times a power of ten."""
    bar = panel.get_figure().colorbar(mesh, cax=panel.inset_axes((1.05, 0, 0.05, 1)))
    if bar.norm.vmin:
        bar.ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        bar.ax.yaxis.set_minor_locator(ticker.NullLocator())
    bar.ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda share, _: f"{100 * share:.3g} %"))
    bar.ax.tick_params(labelsize=SMALL)
    bar.set_label("unmasked share" + (" (grey: none)" if has_empty else ""))
    bar.outline.set_visible(False)


def _by_label(one_or_more: Any) -> Mapping[str, Any]:
    """Sources by label; the label of a single one is empty."""
    return one_or_more if isinstance(one_or_more, Mapping) else {"": one_or_more}
