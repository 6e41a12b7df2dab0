"""Strategies, frozen dataclasses of importance x selection that round-trip through JSON, presets and budgets."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from numbers import Integral, Real
from typing import Any, TypeAlias

from torch import Tensor

from sparsify.core.importance import D3, Importance
from sparsify.core.schedule import SHAPES, Schedule
from sparsify.errors import SparsifyError, did_you_mean
from sparsify.strategies.importance import GSNR, IMPORTANCES, SNIP, Bias, Fisher, Magnitude, Random

ALLOCATIONS = ("global", "uniform", "spread")


def _check_allocation(selection: Any, known: Sequence[str]) -> None:
    own = selection.allocation
    budgets = own if isinstance(own, dict) and not isinstance(selection, Prune) else {}
    if not budgets and own not in known:
        expected = f"expected one of {', '.join(known)}.{did_you_mean(own, known)}"
        raise SparsifyError(f"{type(selection).__name__} got allocation={own!r}; {expected}")
    for key, budget in budgets.items():
        if not (type(budget) is int and budget >= 1) and not (type(budget) is float and 0 < budget < 1):
            raise SparsifyError(f"the budget of {key!r} is {budget!r}; expected an int, or a share in (0, 1).")
        try:
            re.compile(key)
        except (re.error, TypeError) as error:
            raise SparsifyError(f"{key!r} is no name of a module, nor a regular expression: {error}.") from None


@dataclass(frozen=True)
class Static:
    """static-S: select once, before training. A gradient importance needs a calibration.

    Args:
        allocation: how the budget is divided among the tensors: ``"global"``, the best entries of the whole model;
            ``"uniform"``, the same density in each tensor; ``"spread"``, the best of the whole model, but in a row or
            column of a matrix at most twice as many as in an even spread over the shorter sides of all; or a dict of
            budgets for modules of their own, in addition to the budget, which all others share:
            ``{"q_proj": 1000, "mlp": 0.001}``. As in PEFT's ``rank_pattern``, a key matches the end of a module's
            name, as a regular expression, and each module that it matches gets this number, or this share of its
            entries. The innermost module and the first key that match count.
    """

    allocation: str | dict[str, int | float] = "global"
    name = "static"

    def __post_init__(self) -> None:
        _check_allocation(self, ALLOCATIONS)


@dataclass(frozen=True)
class Prune(Static):
    """Pruning at initialisation: select once, set every other entry to zero, train the selected ones.

    For new modules such as adapters; a pretrained matrix loses all entries that are not selected, so that ``sparsify``
    refuses it unless ``pretrained`` is set. Matrices and tensors of more dimensions are pruned; biases, norms and other
    vectors are trained whole, and count towards the budget. ``desparsify()`` keeps the zeros, and the base of
    ``base_weights()`` is the pruned model.

    Args:
        allocation: ``"global"`` or ``"uniform"``, as for :class:`Static`.
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


@dataclass(frozen=True)
class Increment:
    """increment-S: each step unmasks more entries, and none is ever masked again (the paper's Algorithm 1).

    Args:
        select: the backward passes of a step that choose its entries: ``"all"``, by the sum of their gradients, or
            ``"first"``. The sum is exact for entries that were among the best from the first pass on: the best 65,536,
            or eight times as many as the step unmasks. Where a run changes from one pass in each step to several, the
            first of these steps is chosen by its first pass.
        allocation: ``"global"``, or budgets for modules of their own, as for :class:`Static`, by an importance of
            gradients, the first pass, and on one rank. Each follows the schedule by itself.
    """

    select: str = field(default="all", repr=False)
    allocation: str | dict[str, int | float] = field(default="global", repr=False)
    name = "increment"

    def __post_init__(self) -> None:
        _check_allocation(self, ALLOCATIONS[:1])
        if self.select not in ("first", "all"):
            raise SparsifyError(f"Increment got select={self.select!r}; expected 'all' or 'first'.")


@dataclass(frozen=True)
class Repeat:
    """repeat-S: each step selects the whole budget afresh, among all entries. A baseline, for small models.

    An entry that is no longer selected keeps its value and its optimizer state and gets no gradient, so that the flat
    delta has a place for every entry that was ever selected.

    Args:
        capacity: maximum number of entries that are ever selected; beyond it, a step leaves out new ones. ``None``:
            budget x steps.
    """

    capacity: int | None = None
    name = "repeat"

    def __post_init__(self) -> None:
        if self.capacity is not None and (type(self.capacity) is not int or self.capacity < 1):
            raise SparsifyError(f"Repeat got capacity={self.capacity!r}; expected an int of at least 1, or None.")


@dataclass(frozen=True, eq=False)
class Given:
    """A given set of entries, by tensor name: a bool mask in the tensor's shape, or flat indices (n,) int64."""

    support: Mapping[str, Tensor] = field(compare=False)  # not a setting: the delta's file holds it
    name = "given"


Selection: TypeAlias = Static | Increment | Repeat | Given
SELECTIONS: dict[str, Callable[..., Selection]] = {kind.name: kind for kind in (Static, Increment, Repeat, Prune)}


@dataclass(frozen=True)
class Strategy:
    """An importance and a selection, in any combination.

    Args:
        importance: the score of an entry: :class:`D3`, :class:`Fisher`, :class:`GSNR`, :class:`SNIP`,
            :class:`Magnitude`, :class:`Random`, :class:`Bias`, or one of your own (:func:`register_importance`).
        selection: when entries are selected: :class:`Static`, :class:`Prune`, :class:`Increment`, :class:`Repeat`.

    Raises:
        SparsifyError: when a part has the wrong type, or the two cannot be combined.

    Example:
        >>> from sparsify import D3
        >>> strategy = Strategy(D3(exp=1, eps=1e-3), Increment())
        >>> Strategy.from_dict(strategy.to_dict()) == strategy
        True
    """

    importance: Importance | None
    selection: Selection

    def __post_init__(self) -> None:
        if not isinstance(self.selection, Selection):
            raise SparsifyError(f"selection={self.selection!r}; expected an object such as Increment() or Static().")
        if not isinstance(self.importance, Importance) and not isinstance(self.selection, Given):
            expected = "an object such as D3(), or what register_importance(name) makes of a function of (weight, grad)"
            raise SparsifyError(f"importance={self.importance!r} with {self.selection}; expected {expected}.")
        selection: Any = self.selection
        if isinstance(self.importance, GSNR) and not isinstance(selection, Static):
            raise SparsifyError(f"{self.importance} with {selection}; it compares a calibration's batches: Static().")
        if isinstance(self.importance, Random) and getattr(selection, "allocation", None) == "spread":
            problem = f"{self.importance} with {selection}"
            raise SparsifyError(f"{problem}; random entries are spread by themselves: Static().")
        divides = isinstance(selection, Increment) and isinstance(selection.allocation, dict)
        if divides and not getattr(self.importance, "uses_gradient", False):
            problem = f"{self.importance} with {selection} and budgets of modules"
            raise SparsifyError(f"{problem}; expected an importance of gradients, or Static().")
        if isinstance(self.selection, Prune) and self.importance == Magnitude(largest=False):
            problem = f"{self.importance} with {selection} would remove the large weights"
            raise SparsifyError(f"{problem}; take Magnitude(largest=True).")

    @property
    def calibrates(self) -> bool:
        """Whether gradients are needed before training."""
        return isinstance(self.selection, Static) and self.importance is not None and self.importance.uses_gradient

    def to_dict(self) -> dict[str, Any]:
        """Returns the strategy as plain JSON types."""
        return {"importance": _to_dict(self.importance), "selection": _to_dict(self.selection)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Strategy":
        """Builds the strategy that :meth:`to_dict` described."""
        if not isinstance(data, dict) or not {"importance", "selection"} <= data.keys():
            raise SparsifyError(f"{data!r} describes no strategy; expected a dict with `importance` and `selection`.")
        importance = _from_dict(IMPORTANCES, data["importance"], "importance")
        return cls(importance, _from_dict(SELECTIONS, data["selection"], "selection"))


SCHEDULES = {"early": Schedule(until=0.2), **{shape: Schedule(shape) for shape in SHAPES}}
PRESETS: dict[str, Strategy] = {
    "id3": Strategy(D3(exp=2, eps=1), Increment()),
    "d3-repeat": Strategy(D3(exp=2, eps=1), Repeat()),
    "pafi": Strategy(Magnitude(), Static()),
    "fish": Strategy(Fisher(num_samples=1024), Static()),
    "gsnr": Strategy(GSNR(), Static("spread")),
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
    others = "a Strategy(importance=..., selection=...), or entries, {name: tensor of indices}, as delta.support."
    near = did_you_mean(strategy, names)
    raise SparsifyError(f"unknown strategy {strategy!r}; expected one of {', '.join(names)}, {others}{near}")


def _to_dict(part: Any) -> dict[str, Any] | None:
    """The name and settings of an importance or selection; its settings are the fields that are compared."""
    own = {} if part is None else {item.name: getattr(part, item.name) for item in fields(part) if item.compare}
    return None if part is None else {"name": part.name, **own}


def _from_dict(kinds: dict[str, Any], data: dict[str, Any] | None, part: str) -> Any:
    if data is None:
        return None
    settings = dict(data) if isinstance(data, dict) else {"name": data}
    if (name := settings.pop("name", None)) == Given.name:
        raise SparsifyError("a given set is not stored in the config; pass the set itself, such as delta.support.")
    if not isinstance(data, dict) or name not in kinds:
        raise SparsifyError(f"unknown {part} {name!r}; expected one of {', '.join(kinds)}.")
    try:
        return kinds[name](**settings)
    except TypeError:
        expected = ", ".join(inspect.signature(kinds[name]).parameters) or "none"
        raise SparsifyError(f"{part} {name!r} with settings {settings!r}; it has these: {expected}.") from None


def resolve_schedule(schedule: str | Schedule) -> Schedule:
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, str) and schedule in SCHEDULES:
        return SCHEDULES[schedule]
    near = did_you_mean(schedule, SCHEDULES)
    raise SparsifyError(f"schedule={schedule!r}; expected a name ({', '.join(SCHEDULES)}) or a Schedule.{near}")


def own_budgets(strategy: Strategy, candidates: Mapping[str, int]) -> list[tuple[list[str], int]]:
    """The candidates, by name, of each module that has a budget of its own, and the number of its entries."""
    allocation: Any = getattr(strategy.selection, "allocation", "global")
    if isinstance(allocation, str):
        return []
    groups: dict[tuple[str, str], list[str]] = {}
    for name in candidates:
        modules = [*accumulate(name.split(".")[:-1], "{}.{}".format)][::-1]  # the innermost first
        matches = ((m, key) for m in modules for key in allocation if re.match(rf"(.*\.)?({key})$", m))
        if (found := next(matches, None)) is not None:
            groups.setdefault(found, []).append(name)
    if missing := sorted(allocation.keys() - {key for _, key in groups}):
        near = did_you_mean(missing[0], {part for name in candidates for part in name.split(".")[:-1]})
        problem = f"{missing[0]!r} is to have a budget of its own, and matches no module with candidates left to it"
        raise SparsifyError(f"{problem}; expected the end of a module's name.{near}")
    return [
        (names, _resolve(allocation[key], strategy, {name: candidates[name] for name in names}, f"`{module}`: "))
        for (module, key), names in groups.items()
    ]


def divide(budget: int, strategy: Strategy, tensors: Sequence[Any]) -> list[tuple[list[Any], int]]:
    """Divides a budget among the modules with one of their own, which they have already, and all other tensors."""
    others = {tensor.name: tensor for tensor in tensors}
    own = own_budgets(strategy, {name: tensor.num_candidates for name, tensor in others.items()})
    groups = [([others.pop(name) for name in names], number) for names, number in own]
    return [*groups, (list(others.values()), budget - sum(number for _, number in own))]


def resolve_budget(budget: int | float | None, strategy: Strategy, candidates: Mapping[str, int]) -> int:
    """Returns the budget, a number or a share of the candidates (by tensor name), as a number of entries.

    Modules with budgets of their own have them in addition; where these have all candidates, the budget is ``None``.
    """
    own = own_budgets(strategy, candidates)
    number, taken = sum(number for _, number in own), {name for names, _ in own for name in names}
    others = {name: count for name, count in candidates.items() if name not in taken}
    if own and not others and budget is None:
        return number
    return number + _resolve(budget, strategy, others, "all other modules: " if own else "")


def _resolve(budget: int | float | None, strategy: Strategy, candidates: Mapping[str, int], of: str = "") -> int:
    importance: Any = strategy.importance
    available = sum(number for name, number in candidates.items() if importance.covers(name))
    if available == 0:
        raise SparsifyError(f"{of}{importance} finds no entry among the {len(candidates)} candidate tensors.")
    if budget is None and isinstance(importance, Bias):
        return available
    if isinstance(budget, bool) or not isinstance(budget, Real):
        expected = f"expected a number of entries, 1 to {available:,}, or a share of the candidates, a float in (0, 1)."
        raise SparsifyError(f"{of}budget={budget!r} with {importance}; {expected} Only bitfit and full need no budget.")
    if not isinstance(budget, Integral):
        if not 0 < budget < 1 or budget * available < 1:
            least = f"not less than one entry, at least {1 / available:.2g}; an int is a number of entries."
            share = f"{of}budget={budget!r} is a float and so a share: of {available:,} candidates"
            raise SparsifyError(f"{share} it has to be in (0, 1) and {least}")
        budget = int(budget * available)
    if not 1 <= budget <= available:
        raise SparsifyError(f"{of}budget={budget:,} entries; expected 1 to {available:,}, the number of candidates.")
    return int(budget)


def share_out(budget: int, candidates: Sequence[int]) -> list[int]:
    """Divides a budget, at most the sum of ``candidates``, in proportion to them; the largest remainders round up."""
    total = sum(candidates)
    counts = [budget * number // total for number in candidates]
    largest_first = sorted(range(len(candidates)), key=lambda i: -(budget * candidates[i] % total))
    for i in largest_first[: budget - sum(counts)]:
        counts[i] += 1
    return counts


def check_steps(steps: int | None) -> int | None:
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1):
        raise SparsifyError(f"steps={steps!r}; expected the planned number of optimizer steps, an int of at least 1.")
    return None if steps is None else int(steps)


def resolve_capacity(
    budget: int, strategy: Strategy, schedule: Schedule, steps: int | None, candidates: Mapping[str, int]
) -> int:
    """Returns the length of the flat delta: the budget, or for repeat-S all entries that its steps can select."""
    selection = strategy.selection
    if not isinstance(selection, Repeat):
        return budget
    if schedule != Schedule():
        raise SparsifyError(f"{selection} takes no schedule: each step selects the whole budget; leave schedule= out.")
    if selection.capacity is None and steps is None:
        raise SparsifyError(f"{selection} needs room for all that it may select; pass steps=, or Repeat(capacity=...).")
    if (capacity := min(sum(candidates.values()), selection.capacity or budget * (steps or 0))) < budget:
        raise SparsifyError(f"{selection} has less room than the budget of {budget:,} entries; raise its capacity.")
    return capacity
