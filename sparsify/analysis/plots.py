"""Pictures of a selection: its trajectory over the steps, and the unmasked share by layer and kind of tensor.

In: sparsified models (or deltas, for the shares), one or several by label. Out: a matplotlib figure. The numbers come
from ``trajectory.py`` and ``shares.py``; here they are only drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from sparsify.analysis.shares import Source, TensorShare, tables
from sparsify.analysis.trajectory import trajectory
from sparsify.common.extras import require
from sparsify.errors import SparsifyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by all; the line styles tell them apart in grey, too
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
COLORMAP = "viridis_r"
NONE_COLOR = "#e4e4e4"
LOG_FROM = 20.0  # the ratio of the largest to the smallest share from which on colours are logarithmic
LAYERS_LABELLED = 16  # at most
SMALL, TITLE = 8, 10  # points, of tick labels and titles
OUTSIDE = "none"  # the column label where there is no layer


def plot_trajectory(
    model: nn.Module | Mapping[str, nn.Module], ax: Sequence[Axes] | None = None, *, points: int = 100
) -> Figure:
    """Draws selection entropy and tensor sparsity over the optimizer steps, from the first unmasked entry on.

    Args:
        model: a sparsified model, or several by label, to be drawn over each other.
        ax: two axes, for the entropy and for the sparsity; a new figure by default.
        points: at most so many for each curve.

    Returns:
        The figure.

    Raises:
        SparsifyError: as :func:`sparsify.analysis.trajectory` does, and for another number of axes, or no axes.
        MissingExtraError: when matplotlib is not installed.

    Example:
        >>> from sparsify import sparsify
        >>> models = {name: sparsify(nn.Linear(4, 4), 8, strategy=name) for name in ["pafi", "random"]}
        >>> [ax.get_ylabel() for ax in plot_trajectory(models).axes]
        ['selection entropy (nats)', 'tensor sparsity (%)']
    """
    models = _labelled(model)
    curves = [[point for point in trajectory(one, points) if point.unmasked] for one in models.values()]
    entropy, sparsity = _axes(ax, 2, figsize=(8.4, 3.2))
    for number, (label, curve) in enumerate(zip(models, curves, strict=True)):
        look: dict[str, Any] = {
            "color": COLORS[number % len(COLORS)],
            "linestyle": STYLES[number % len(STYLES)],
            "label": label,
        }
        look["marker"] = "o" if len(curve) == 1 else ""  # a line of one point is not to be seen
        steps = [point.step for point in curve]
        entropy.plot(steps, [point.selection_entropy for point in curve], **look)
        sparsity.plot(steps, [100 * point.tensor_sparsity for point in curve], **look)
    entropy.set_title("How evenly the tensors are unmasked", fontsize=TITLE)
    sparsity.set_title("Tensors with nothing unmasked", fontsize=TITLE)
    entropy.set(ylabel="selection entropy (nats)", ylim=(0, None))
    sparsity.set(ylabel="tensor sparsity (%)", ylim=(0, 100))
    for axes in (entropy, sparsity):
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(require("matplotlib.ticker", extra="plot").MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if isinstance(model, Mapping):
        sparsity.legend(frameon=False)
    return _figure(entropy)


def plot_shares(source: Source | Mapping[str, Source], ax: Axes | Sequence[Axes] | None = None) -> Figure:
    """Draws the unmasked share of every tensor: a row for each kind, a column for each layer.

    Tensors outside of layers are in a column of their own. Grey is a tensor with nothing unmasked, white is none at
    all, or one that a delta does not say anything about. The colours are logarithmic where the shares are far apart.

    Args:
        source: a sparsified model or a :class:`sparsify.SparseDelta`, or several by label, to be drawn side by side in
            the same colours.
        ax: one for each source; a new figure by default.

    Returns:
        The figure.

    Raises:
        SparsifyError: as :func:`sparsify.analysis.shares` does, for nothing to draw, and for another number of axes, or
            no axes.
        MissingExtraError: when matplotlib is not installed.

    Example:
        >>> from sparsify import sparsify
        >>> model = sparsify(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 8, strategy="pafi")
        >>> figure = plot_shares(model)
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['weight', 'bias']
    """
    by_label = tables(_labelled(source))
    rows = [row for table in by_label.values() for row in table]
    if not rows:
        raise SparsifyError("there is nothing to draw: no tensor has entries in the delta; train further.")
    kinds = _kinds(by_label.values())
    columns = _columns(rows)
    grids = {label: _grid(table) for label, table in by_label.items()}
    panels = _axes(ax, len(by_label), figsize=_size(kinds, columns, len(by_label)), sharey=True)
    norm = _norm([share for grid in grids.values() for share in grid.values()])
    for panel, (label, table) in zip(panels, by_label.items(), strict=True):
        mesh = _draw(panel, grids[label], kinds, columns, norm)
        title = f"{sum(row.unmasked for row in table):,} unmasked entries"
        panel.set_title(f"{label}\n{title}" if label else title, fontsize=TITLE)
    _add_bar(panels[-1], mesh, has_empty=not all(row.unmasked for row in rows))
    return _figure(panels[0])


Cells = dict[tuple[str, int | None], float]  # share by kind and layer


def _grid(table: Sequence[TensorShare]) -> Cells:
    """The unmasked share of each cell: tensors of one kind and layer, such as a mixture's experts, are added up."""
    unmasked: dict[tuple[str, int | None], int] = {}
    size: dict[tuple[str, int | None], int] = {}
    for row in table:
        cell = (row.kind, row.layer)
        unmasked[cell] = unmasked.get(cell, 0) + row.unmasked
        size[cell] = size.get(cell, 0) + row.size
    return {cell: unmasked[cell] / size[cell] for cell in size}


def _kinds(by_source: Iterable[Sequence[TensorShare]]) -> list[str]:
    """The kinds in the order that they have within a layer, also where some layers lack some of them."""
    kinds: list[str] = []
    for table in by_source:
        for at, row in enumerate(table):
            if row.kind not in kinds:
                kinds.insert(_place_among(kinds, table, at), row.kind)
    return kinds


def _place_among(kinds: Sequence[str], table: Sequence[TensorShare], at: int) -> int:
    """Where a row's kind goes: before what follows it in its layer, or after what comes before it there, or last."""
    layer = table[at].layer
    if layer is not None:
        for row in table[at + 1 :]:
            if row.layer == layer and row.kind in kinds:
                return kinds.index(row.kind)
        for row in reversed(table[:at]):
            if row.layer == layer:
                return kinds.index(row.kind) + 1
    return len(kinds)


def _columns(rows: Sequence[TensorShare]) -> dict[int | None, float]:
    """Where each layer's column begins; that of the tensors outside of layers stands a little apart, on the left."""
    layers = sorted({row.layer for row in rows if row.layer is not None})
    begins: dict[int | None, float] = {layer: float(at) for at, layer in enumerate(layers)}
    return {None: -1.5 if layers else 0.0, **begins} if any(row.layer is None for row in rows) else begins


def _draw(panel: Axes, cells: Cells, kinds: Sequence[str], columns: Mapping[int | None, float], norm: Any) -> Any:
    """Draws one source's cells; returns what a colour bar needs."""
    colors = require("matplotlib", extra="plot").colormaps[COLORMAP].with_extremes(under=NONE_COLOR)
    places = [(columns[layer], kinds.index(kind)) for kind, layer in cells]
    corners = [[(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1)] for x, y in places]
    polygons = require("matplotlib.collections", extra="plot").PolyCollection
    mesh = polygons(corners, cmap=colors, norm=norm, edgecolors="white", linewidths=0.8)
    below = norm.vmin / 2 if norm.vmin else -1.0
    mesh.set_array([share or below for share in cells.values()])
    panel.add_collection(mesh, autolim=False)
    panel.set_xlim(min(columns.values()), max(columns.values()) + 1)
    panel.set_ylim(len(kinds), 0)
    panel.set_yticks([y + 0.5 for y in range(len(kinds))], kinds, fontsize=SMALL)
    _label_columns(panel, columns)
    return mesh


def _label_columns(panel: Axes, columns: Mapping[int | None, float]) -> None:
    """Labels the layers, every few of them where there are many."""
    every = -(-len(columns) // LAYERS_LABELLED)
    layers = [layer for layer in columns if layer is not None][::every]
    labelled: list[int | None] = [*([None] if None in columns else []), *layers]
    labels = [OUTSIDE if layer is None else str(layer) for layer in labelled]
    panel.set_xticks([columns[layer] + 0.5 for layer in labelled], labels, fontsize=SMALL)
    panel.set_xlabel("layer")
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)


def _norm(values: Sequence[float]) -> Any:
    """The scale of the colours: logarithmic where the shares are far apart, from zero on where they are not."""
    colors = require("matplotlib.colors", extra="plot")
    positive = [value for value in values if value] or [1.0]
    if max(positive) > LOG_FROM * min(positive):
        return colors.LogNorm(min(positive), max(positive))
    return colors.Normalize(0, max(positive))


def _add_bar(panel: Axes, mesh: Any, *, has_empty: bool) -> None:
    """Adds a colour bar in percent; on a logarithmic scale, its ticks are at 1, 2, 5 times a power of ten."""
    ticker = require("matplotlib.ticker", extra="plot")
    left, right = panel.get_xlim()
    width = min(0.5 / (right - left), 1 / 16)  # half a column
    bar = _figure(panel).colorbar(mesh, cax=panel.inset_axes((1 + width, 0, width, 1)))
    if bar.norm.vmin:
        bar.ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        bar.ax.yaxis.set_minor_locator(ticker.NullLocator())
    bar.ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda share, _: f"{100 * share:.3g} %"))
    bar.ax.tick_params(labelsize=SMALL)
    bar.set_label("unmasked share" + (" (grey: none)" if has_empty else ""))
    bar.outline.set_visible(False)


def _size(kinds: Sequence[str], columns: Mapping[int | None, float], panels: int) -> tuple[float, float]:
    """Width and height, in inches, that leave room for the labels."""
    labels = 0.065 * max(map(len, kinds))
    return 1.3 + labels + panels * max(2.6, 0.3 * len(columns)), max(2.8, 1.0 + 0.2 * len(kinds))


def _labelled(one_or_more: Any) -> Mapping[str, Any]:
    """What to draw by label; a single thing has an empty one."""
    if isinstance(one_or_more, (list, tuple)):
        raise SparsifyError(f"got a {type(one_or_more).__name__}; expected one source, or several by label in a dict.")
    if not isinstance(one_or_more, Mapping):
        return {"": one_or_more}
    if not one_or_more:
        raise SparsifyError("there is nothing to draw: the mapping is empty; expected label -> model.")
    return one_or_more


def _axes(ax: Axes | Sequence[Axes] | None, number: int, **settings: Any) -> Sequence[Axes]:
    """The axes to draw on: those given, or ``number`` new ones beside each other."""
    pyplot = require("matplotlib.pyplot", extra="plot")
    if ax is None:
        return list(pyplot.subplots(1, number, squeeze=False, layout="constrained", **settings)[1][0])
    given: list[Any] = list(ax) if isinstance(ax, Iterable) else [ax]
    axes = require("matplotlib.axes", extra="plot").Axes
    if wrong := [one for one in given if not isinstance(one, axes)]:
        raise SparsifyError(f"ax holds a {type(wrong[0]).__name__}; expected axes of matplotlib, as in figure.axes.")
    if len(given) != number:
        raise SparsifyError(f"ax has {len(given)} axes; expected {number}, or None for a new figure.")
    return given


def _figure(axes: Axes) -> Figure:
    """The figure that axes are part of."""
    figure: Any = axes.get_figure()
    return figure
