"""From runs to scores, in two ways, and the scores at each rate.

The paper's: of each run the best score over its epochs, on all rows; a method's score is the mean over its rates (and
seeds). It rewards methods for choosing epochs on the rows that they are judged on.

The strict one: the score after the last epoch; the rate is chosen by its mean over the seeds on one half of the rows,
and the score is that of the other half; then with the halves exchanged. A seed's score is the mean of the two.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from examples.paper.runs import Run, settings_of
from examples.paper.settings import Settings

HALVES = (0, 1)


@dataclass(frozen=True)
class Cell:
    """The scores of one method on one task.

    Args:
        scores: in percent; by the paper one for each run, else one for each seed, in their order.
        rates: those chosen; by the paper all.
        seeds: of the runs.
        loss: mean over the runs behind the score, after the last epoch.
        trained: numbers trained, the head's included.
    """

    scores: tuple[float, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    loss: float
    trained: int

    @property
    def mean(self) -> float:
        return statistics.mean(self.scores)


Method = Settings  # a run's settings without task, seed, what depends on the task and, but in `rate_scores`, rate
Scores = dict[Method, dict[str, Cell]]  # by method, then by task


def method_of(settings: Settings) -> Method:
    """What runs of the same method have in common over tasks, rates and seeds."""
    return replace(settings, task="", rate=0.0, seed=0, epochs=0, max_length=0, target_length=None)


def grouped(runs: Iterable[Run]) -> dict[Method, dict[str, list[Run]]]:
    """The runs by method and task, in their order."""
    groups: dict[Method, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        settings = settings_of(run)
        groups[method_of(settings)][settings.task].append(run)
    return groups


def paper_scores(runs: Iterable[Run]) -> Scores:
    """A cell's scores are those of its runs, each at its best epoch."""
    return {m: {task: paper_cell(own) for task, own in tasks.items()} for m, tasks in grouped(runs).items()}


def strict_scores(runs: Iterable[Run]) -> Scores:
    """A cell's scores are those of its seeds, each on rows that chose nothing."""
    return {m: {task: strict_cell(own) for task, own in tasks.items()} for m, tasks in grouped(runs).items()}


def rate_scores(runs: Iterable[Run]) -> Scores:
    """By method and rate: a cell's scores are those of its seeds after the last epoch."""
    scores: Scores = {}
    for method, tasks in grouped(runs).items():
        for rate in sorted({settings_of(run).rate for own in tasks.values() for run in own}):
            at_rate = {task: [run for run in own if settings_of(run).rate == rate] for task, own in tasks.items()}
            scores[replace(method, rate=rate)] = {task: rate_cell(own) for task, own in at_rate.items() if own}
    return scores


def paper_cell(runs: list[Run]) -> Cell:
    scores = tuple(max(epoch["score"] for epoch in run["epochs"]) for run in runs)
    rates, seeds = ({getattr(settings_of(run), name) for run in runs} for name in ("rate", "seed"))
    return Cell(scores, tuple(sorted(rates)), tuple(sorted(seeds)), _loss(runs), runs[0]["trained"])


def strict_cell(runs: list[Run]) -> Cell:
    """Only rates that were run with as many seeds as any other are chosen from."""
    by_rate: dict[float, dict[int, Run]] = defaultdict(dict)
    for run in runs:
        by_rate[settings_of(run).rate][settings_of(run).seed] = run
    most = max(len(seeds) for seeds in by_rate.values())
    complete = {rate: own for rate, own in by_rate.items() if len(own) == most}
    seeds = sorted(next(iter(complete.values())))
    complete = {rate: own for rate, own in complete.items() if sorted(own) == seeds}
    chosen = [max(complete, key=lambda rate: _mean_half(complete[rate].values(), half)) for half in HALVES]
    scores = [
        statistics.mean(_half(complete[rate][seed], 1 - half) for half, rate in zip(HALVES, chosen, strict=True))
        for seed in seeds
    ]
    behind = [complete[rate][seed] for rate in dict.fromkeys(chosen) for seed in seeds]
    return Cell(tuple(scores), tuple(chosen), tuple(seeds), _loss(behind), runs[0]["trained"])


def rate_cell(runs: list[Run]) -> Cell:
    scores = {settings_of(run).seed: run["epochs"][-1]["score"] for run in runs}
    return Cell(tuple(scores.values()), (settings_of(runs[0]).rate,), tuple(scores), _loss(runs), runs[0]["trained"])


def _half(run: Run, half: int) -> float:
    return run["epochs"][-1]["halves"][half]


def _mean_half(runs: Iterable[Run], half: int) -> float:
    return statistics.mean(_half(run, half) for run in runs)


def _loss(runs: list[Run]) -> float:
    """The mean loss after the last epoch; NaN if it was not finite in one of the runs."""
    losses = [run["epochs"][-1]["loss"] for run in runs]
    return float("nan") if None in losses else statistics.mean(losses)
