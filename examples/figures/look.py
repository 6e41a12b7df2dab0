"""What the figures share: a transparent SVG in colours that are readable on white and on dark pages."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

matplotlib.use("agg")

FOLDER = Path(__file__).parent
INK = "#7d8590"  # text and axes: as far from white as from a dark page
OURS, LORA, FULL, OTHER = "#e8710a", "#2f81d6", "#9a6dd7", "#1b9e77"

matplotlib.rcParams.update(
    dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    | {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "axes.titlesize": 10}
    | {"svg.fonttype": "none", "svg.hashsalt": "sparsify"}  # the same bytes at each run
)


def save(figure: Figure, path: Path) -> None:
    """Writes the figure as an SVG, or in the format of the path's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    print(f"wrote {path}")
