"""Intervals and tests, by scipy: how sure a difference of two methods is.

In the strict protocol a method has one score for each task and seed. The difference of two methods in the mean over
their common tasks is d = mean over tasks of (mean_a - mean_b), with variance sum over tasks of (s_a^2 / n_a +
s_b^2 / n_b) / tasks^2: the tasks are fixed, the seeds are drawn. Its interval is Student's, with Welch's degrees of
freedom. It covers what seeds change (head, order, dropout), not what another sample of rows to judge on would.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scipy import stats

from examples.paper.protocol import Cell, Method, Scores, method_of
from examples.paper.runs import Run, settings_of

LEVEL = 0.95
NAN = float("nan")


@dataclass(frozen=True)
class Difference:
    """The first method's mean score minus the second's, over the tasks that both have.

    Args:
        half_width: of the 95 % interval; NaN with a single seed.
        p: of a one-sided Wilcoxon signed-rank test: that the first is not better.
        pairs: that the test is of.
    """

    mean: float
    half_width: float
    p: float
    pairs: int
    tasks: int


def interval(scores: Sequence[float]) -> float:
    """Half the width of Student's 95 % interval of a mean; NaN for a single score."""
    if len(scores) < 2:
        return NAN
    return float(stats.t.ppf((1 + LEVEL) / 2, len(scores) - 1)) * statistics.stdev(scores) / math.sqrt(len(scores))


def strict_difference(first: dict[str, Cell], second: dict[str, Cell]) -> Difference:
    """By the strict protocol; the test is of pairs with the same task and seed."""
    tasks = [task for task in first if task in second]
    mean = statistics.mean(first[task].mean - second[task].mean for task in tasks)
    own = [cell.scores for task in tasks for cell in (first[task], second[task])]
    pairs = [
        (first[task].scores[first[task].seeds.index(seed)], second[task].scores[second[task].seeds.index(seed)])
        for task in tasks
        for seed in first[task].seeds
        if seed in second[task].seeds
    ]
    return Difference(mean, _welch(own) / len(tasks), wilcoxon(pairs), len(pairs), len(tasks))


def paper_difference(first: dict[str, Cell], second: dict[str, Cell]) -> Difference:
    """By the paper: every run of the first method is paired with every run of the second on the same task.

    These pairs are not independent, so that p is too small; it is here to compare with the paper's.
    """
    tasks = [task for task in first if task in second]
    mean = statistics.mean(first[task].mean - second[task].mean for task in tasks)
    pairs = [(a, b) for task in tasks for a in first[task].scores for b in second[task].scores]
    return Difference(mean, NAN, wilcoxon(pairs), len(pairs), len(tasks))


def wilcoxon(pairs: Sequence[tuple[float, float]]) -> float:
    """p of the one-sided signed-rank test that the first of each pair is not larger; 1 where no pair differs."""
    differences = [a - b for a, b in pairs]
    if not any(differences):
        return 1.0
    return float(stats.wilcoxon(differences, alternative="greater").pvalue)


def anova(runs: Iterable[Run], setting: str) -> dict[Method, tuple[float, float, int]]:
    """One-way ANOVA of a setting (``exp``, ``eps``, ``until``, ...): F, p and the number of groups.

    For every method that was run with several values of the setting; the observations are the runs' best scores, minus
    the mean of the task's, so that tasks do not count as noise; each task but one costs a degree of freedom.
    """
    values: dict[Method, dict[str, list[tuple[object, float]]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        settings = settings_of(run)
        best = max(epoch["score"] for epoch in run["epochs"])
        method = replace(method_of(settings), **{setting: None})
        values[method][settings.task].append((getattr(settings, setting), best))
    found = {}
    for method, tasks in values.items():
        groups: dict[object, list[float]] = defaultdict(list)
        for own in tasks.values():
            mean = statistics.mean(score for _, score in own)
            for value, score in own:
                groups[value].append(score - mean)
        freedom = sum(map(len, groups.values())) - len(groups) - (len(tasks) - 1)
        if len(groups) > 1 and min(len(group) for group in groups.values()) > 1 and freedom > 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of groups whose scores are all the same: F is NaN
                statistic = float(stats.f_oneway(*groups.values()).statistic)
            statistic *= freedom / (freedom + len(tasks) - 1)
            found[method] = (statistic, float(stats.f.sf(statistic, len(groups) - 1, freedom)), len(groups))
    return found


def rivals(scores: Scores, of: str) -> Iterable[tuple[Method, Method]]:
    """Every method named ``of`` with each of its rivals: other methods of its budget, and those without a budget."""
    for method in scores:
        for rival in scores:
            same = rival.budget in (None, method.budget)
            if method.method == of and rival != method and same and set(scores[method]) & set(scores[rival]):
                yield method, rival


def _welch(groups: Sequence[Sequence[float]]) -> float:
    """Half the width of the interval of a sum of independent means; NaN if one of them is a single score."""
    if any(len(group) < 2 for group in groups):
        return NAN
    parts = [statistics.variance(group) / len(group) for group in groups]
    if not sum(parts):
        return 0.0
    freedom = sum(parts) ** 2 / sum(part**2 / (len(group) - 1) for part, group in zip(parts, groups, strict=True))
    return float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * math.sqrt(sum(parts))
