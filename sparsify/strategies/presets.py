"""Presets of strategies and schedules, and the selections beyond the core's: pruning, and a given set of entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sparsify.core.importance import D3, Importance
from sparsify.core.schedule import SHAPES, Schedule
from sparsify.errors import SparsifyError, did_you_mean
from sparsify.strategies.importance import SNIP, Bias, Fisher, Magnitude, Random
from sparsify.strategies.strategy import SELECTIONS, Increment, Repeat, Selection, Static, Strategy


@dataclass(frozen=True)
class Prune(Static):
    """Pruning at initialisation: select once, set every other entry to zero, train the selected ones.

    For new modules such as adapters; a pretrained matrix loses all entries that are not selected, so that ``sparsify``
    refuses it unless ``pretrained`` is set. Matrices and tensors of more dimensions are pruned; biases, norms and other
    vectors are trained whole. The budget is the number of trained entries, vectors included.

    ``desparsify()`` keeps the zeros. The base of ``base_weights()`` is the pruned model.

    Args:
        allocation: as for :class:`Static`.
        pretrained: also prune matrices that are not known to be new. New are those that PEFT and adapters add, those
            that the model's checkpoint lacks, and those in ``fresh_modules``.

    Example:
        >>> Strategy(SNIP(), Prune())  # SparseAdapter's choice: strategy="sparseadapter"
        Strategy(importance=SNIP(), selection=Prune(allocation='global', pretrained=False))

    Source: He et al. 2022, "SparseAdapter: An easy approach for improving the parameter-efficiency of adapters", where
    biases and norms are not pruned either, and are not part of the budget.
    """

    pretrained: bool = False
    name = "prune"

    def removes_from(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape is pruned."""
        return len(shape) > 1

    def check(self, importance: Importance) -> None:
        if importance == Magnitude(largest=False):
            raise SparsifyError(
                f"{importance} with {self} would keep the smallest weights and remove the large ones; magnitude "
                "pruning is Magnitude(largest=True)."
            )


@dataclass(frozen=True, eq=False)
class Given(Selection):
    """A given set of entries: an earlier delta's support, or a mask.

    Args:
        support: the entries by tensor name: a bool mask in the tensor's shape, or flat indices (n,) int64.
    """

    support: Mapping[str, Tensor] = field(compare=False)  # not a setting: the delta's file holds it
    name = "given"
    scored = False


def _not_stored(**settings: Any) -> Given:
    raise SparsifyError("a given set is not stored in the config; pass the set itself, such as delta.support.")


SELECTIONS.update(prune=Prune, given=_not_stored)

SCHEDULES = {"early": Schedule(until=0.2), **{shape: Schedule(shape) for shape in SHAPES}}

PRESETS: dict[str, Strategy] = {
    "id3": Strategy(D3(exp=2, eps=1), Increment()),
    "d3-repeat": Strategy(D3(exp=2, eps=1), Repeat()),
    "pafi": Strategy(Magnitude(), Static()),
    "fish": Strategy(Fisher(num_samples=1024), Static()),
    "random": Strategy(Random(), Static()),
    "sparseadapter": Strategy(SNIP(), Prune()),
    "bitfit": Strategy(Bias(), Static()),
}


def resolve_strategy(strategy: str | Strategy | Mapping[str, Tensor]) -> Strategy:
    """Returns the strategy itself, the preset of that name, or the one that trains a given set."""
    if isinstance(strategy, Strategy):
        return strategy
    if isinstance(strategy, Mapping) and all(isinstance(entries, Tensor) for entries in strategy.values()):
        return Strategy(None, Given(strategy))
    if isinstance(strategy, str) and strategy in PRESETS:
        return PRESETS[strategy]
    names = [*PRESETS, "full"]  # the latter selects nothing: sparsify() takes it by itself
    raise SparsifyError(
        f"unknown strategy {strategy!r}; expected one of {', '.join(names)}, a Strategy(importance=..., "
        f"selection=...), or a set of entries such as delta.support.{did_you_mean(strategy, names)}"
    )


def resolve_schedule(schedule: str | Schedule) -> Schedule:
    """Returns the schedule itself, or the one of this name."""
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, str) and schedule in SCHEDULES:
        return SCHEDULES[schedule]
    raise SparsifyError(
        f"schedule={schedule!r}; expected a name ({', '.join(SCHEDULES)}) or a Schedule."
        f"{did_you_mean(schedule, SCHEDULES)}"
    )
