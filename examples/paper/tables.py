"""Scores, differences and analyses of variance as tables in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from examples.paper.protocol import Cell, Method, Scores, paper_scores, rate_scores, strict_scores
from examples.paper.runs import Run
from examples.paper.significance import Difference, anova, interval, paper_difference, rivals, strict_difference
from examples.paper.tasks import TASKS

RECIPE = ("head", "shape", "until", "every", "decay", "warmup", "head_rate", "beta2", "candidates", "exp", "eps")


def report(runs: Iterable[Run], method: str) -> str:
    """All tables of some runs; ``method`` is the one that the others are compared with."""
    runs = list(runs)
    paper, strict = paper_scores(runs), strict_scores(runs)
    parts = [
        "### As in the paper\n\nPercent; best epoch of each run, mean ± standard deviation over the runs.",
        score_table(paper, lambda cell: _plus_minus(cell.mean, _deviation(cell.scores))),
        "### Rate chosen on one half of the rows, score of the other\n\nPercent after the last epoch; mean ± 95 % "
        "interval over the seeds; in brackets the rates that each half has chosen.",
        score_table(strict, lambda cell: f"{_plus_minus(cell.mean, interval(cell.scores))} ({_rates(cell)})"),
        "### Each rate\n\nPercent and loss after the last epoch, mean over the seeds.",
        score_table(rate_scores(runs), lambda cell: f"{cell.mean:.1f}, {cell.loss:.3f}"),
    ]
    if parts_of := paper_scores(part_runs(runs)):
        parts += [
            "### Parts of the scores\n\nPercent; of each run the epoch with the best score, mean over the runs.",
            score_table(parts_of, lambda cell: f"{cell.mean:.1f}"),
        ]
    for title, scores, compare in (
        ("strict protocol", strict, strict_difference),
        ("as in the paper, whose pairs are not independent", paper, paper_difference),
    ):
        if pairs := list(rivals(scores, method)):
            parts += [f"### {method} minus each rival, {title}", difference_table(scores, pairs, compare)]
    parts += [text for setting in ("exp", "eps", "until", "every") if (text := anova_text(runs, setting))]
    return "\n\n".join(parts)


def part_runs(runs: Iterable[Run]) -> list[Run]:
    """A run for each part of a score, as if it were the score of a task of its own."""
    found = []
    for run in runs:
        best = max(run["epochs"], key=lambda epoch: epoch["score"])
        for name, value in best.get("parts", {}).items():
            settings = run["settings"] | {"task": f"{run['settings']['task']} {name}"}
            found.append(run | {"settings": settings, "epochs": [best | {"score": value}]})
    return found


def score_table(scores: Scores, show: Callable[[Cell], str]) -> str:
    """A row for each method: numbers trained, each task's score, their mean, and the mean loss on the judged rows."""
    tasks = list(dict.fromkeys(task for cells in scores.values() for task in cells))
    names = label(scores)
    titles = [f"{task} {TASKS[task].metric}" if task in TASKS else task for task in tasks]
    header = ["method", "trained", *titles, "mean", "loss", "seeds"]
    rows = []
    for method in sorted(scores, key=lambda method: method.budget or 0):
        cells = scores[method]
        complete = len(cells) == len(tasks)
        shown = [show(cells[task]) if task in cells else "" for task in tasks]
        mean = f"{statistics.mean(cell.mean for cell in cells.values()):.1f}" if complete else ""
        loss = f"{statistics.mean(cell.loss for cell in cells.values()):.3f}" if complete else ""
        trained = f"{max(cell.trained for cell in cells.values()):,}".replace(",", " ")
        seeds = min(len(cell.seeds) for cell in cells.values())
        rows.append([names[method], trained, *shown, mean, loss, str(seeds)])
    return markdown(header, rows)


def difference_table(
    scores: Scores,
    pairs: Sequence[tuple[Method, Method]],
    compare: Callable[[dict[str, Cell], dict[str, Cell]], Difference],
) -> str:
    """A row for each pair of methods: the difference in the mean over their common tasks, and the test's p."""
    names, rows = label(scores), []
    for method, rival in pairs:
        found = compare(scores[method], scores[rival])
        difference = _plus_minus(found.mean, found.half_width, sign=True)
        rows.append([names[method], names[rival], difference, f"{found.p:.2g}", str(found.pairs), str(found.tasks)])
    return markdown(["method", "rival", "difference", "Wilcoxon p", "pairs", "tasks"], rows)


def anova_text(runs: Iterable[Run], setting: str) -> str:
    """A line for each method that was run with several values of a setting; empty if there is none."""
    lines = [
        f"- {method.method}, {method.budget:,} entries: F = {statistic:.2f}, p = {p:.2g}, {groups} values"
        for method, (statistic, p, groups) in anova(runs, setting).items()
    ]
    return "\n".join([f"### One-way ANOVA over {setting}\n", *lines]) if lines else ""


def label(scores: Scores) -> dict[Method, str]:
    """Each method's name: with its budget, its rate, and what of its recipe differs between methods of that name."""
    names = {}
    for method in scores:
        alike = [other for other in scores if other.method == method.method]
        own = [f"{name}={value}" for name in RECIPE if (value := getattr(method, name)) is not None
               and len({getattr(other, name) for other in alike}) > 1]  # fmt: skip
        budget = f" {method.budget:,}".replace(",", " ") if method.budget else ""
        rate = f" at {method.rate:g}" if method.rate else ""
        names[method] = f"{method.method}{budget}{rate}" + (f" ({', '.join(own)})" if own else "")
    return names


def _rates(cell: Cell) -> str:
    return ", ".join(f"{rate:g}" for rate in dict.fromkeys(cell.rates))


def _deviation(scores: Sequence[float]) -> float:
    return statistics.stdev(scores) if len(scores) > 1 else float("nan")


def _plus_minus(value: float, spread: float, sign: bool = False) -> str:
    return f"{value:{'+' if sign else ''}.1f}" + ("" if math.isnan(spread) else f" ± {spread:.1f}")


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, its first column to the left, the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
