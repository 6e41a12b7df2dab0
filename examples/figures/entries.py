"""Draws where a delta's entries are: the unmasked share by layer and kind of tensor.

sparsify demo
python -m examples.figures.entries sparsify-demo
"""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.analysis import plot_shares
from examples.figures.look import FOLDER, save
from sparsify import SparseDelta


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("delta", help="folder of a delta")
    parser.add_argument("--out", type=Path, default=FOLDER / "entries.svg")
    options = parser.parse_args(arguments)
    figure = plot_shares(SparseDelta.load(options.delta))
    figure.axes[0].collections[0].set_edgecolor("none")  # white lines between empty cells are seen on a dark page
    save(figure, options.out)


if __name__ == "__main__":
    main()
