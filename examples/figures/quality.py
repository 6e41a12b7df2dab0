"""Draws quality against trained numbers, a panel for each task, from the runs of examples/paper.

    python -m examples.figures.quality

A point is a method's score by the strict protocol (the rate chosen on one half of the judged rows, the score taken on
the other, and the same with the halves exchanged), the mean over the seeds. Of ID3's recipes it is the one that
Choosing recommends; the rate falls to 0 for all methods.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from examples.figures.look import FOLDER, FULL, LORA, OTHER, OURS, save
from examples.paper.protocol import strict_scores
from examples.paper.runs import read, settings_of
from examples.paper.settings import Settings

RUNS = FOLDER.parent / "results" / "paper_local.jsonl"
# title, and the standard error that comes from the number of judged rows, in percent (not known for WNUT17)
PANELS = {
    "sst2": ("SST-2, accuracy", 1.2),
    "mrpc": ("MRPC, accuracy", 2.0),
    "cola": ("CoLA, Matthews correlation", 3.0),
    "wnut17": ("WNUT17, entity F1", 0.0),
}
LOOKS = {
    "id3": ("ID3", OURS, "o"),
    "lora": ("LoRA", LORA, "s"),
    "static-gradient": ("largest gradients, chosen once", OTHER, "^"),
    "full": ("full fine-tuning", FULL, "D"),
}


def is_drawn(settings: Settings) -> bool:
    """Whether a run has the recommended recipe: early, on the linear layers, with the paper's exp, and a rate to 0."""
    early, linear = settings.until in (None, 0.2), settings.candidates in (None, "linear")
    recipe = (early, linear, settings.exp in (None, 2), settings.decay == "linear", settings.head_rate is None)
    return all(recipe) and settings.method in LOOKS and settings.task in PANELS


def draw(path: Path) -> Figure:
    """The figure of a file of runs."""
    scores = strict_scores(run for run in read(path).values() if is_drawn(settings_of(run)))
    figure = Figure(figsize=(9, 2.9), layout="constrained")
    for ax, (task, (title, error)) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for method, (name, color, marker) in LOOKS.items():
            cells = [tasks[task] for own, tasks in scores.items() if own.method == method and task in tasks]
            cells.sort(key=lambda cell: cell.trained)
            numbers, means = [cell.trained for cell in cells], [cell.mean for cell in cells]
            ax.errorbar(
                numbers, means, error or None, color=color, marker=marker, markersize=6, linewidth=1, label=name
            )
        ax.set(title=title, xscale="log", xlim=(2e4, 5e7))
        ax.margins(y=0.15)
        ax.grid(axis="y", alpha=0.25)
    figure.supxlabel("trained numbers, of 22.6 million", fontsize=10)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=len(LOOKS), frameon=False)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RUNS, help="lines of examples/paper")
    parser.add_argument("--out", type=Path, default=FOLDER / "quality.svg")
    options = parser.parse_args(arguments)
    save(draw(options.results), options.out)


if __name__ == "__main__":
    main()
