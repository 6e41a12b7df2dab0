"""Strategies: the table importance x selection, with the presets as rows (``PRESETS``).

A strategy is a frozen dataclass that round-trips through JSON.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch import Tensor

from sparsify.core.importance import D3, IMPORTANCES, SNIP, Bias, Fisher, Importance, Magnitude, Random
from sparsify.errors import SparsifyError, did_you_mean

ALLOCATIONS = ("global", "uniform")


@dataclass(frozen=True)
class Static:
    """static-S: select once, before training. A gradient importance needs a calibration.

    Args:
        allocation: how the budget is divided among the tensors: ``"global"``, the best entries of the whole model;
            ``"uniform"``, the same density in each tensor.
    """

    allocation: str = "global"
    name: ClassVar[str] = "static"

    def __post_init__(self) -> None:
        if self.allocation not in ALLOCATIONS:
            raise SparsifyError(
                f"{type(self).__name__} got allocation={self.allocation!r}; expected one of "
                f"{', '.join(ALLOCATIONS)}.{did_you_mean(self.allocation, ALLOCATIONS)}"
            )


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
    name: ClassVar[str] = "prune"

    def removes_from(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape is pruned."""
        return len(shape) > 1


@dataclass(frozen=True)
class Increment:
    """increment-S: each step unmasks more entries, and none is ever masked again (the paper's Algorithm 1)."""

    name: ClassVar[str] = "increment"


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
    name: ClassVar[str] = "repeat"

    def __post_init__(self) -> None:
        if self.capacity is not None and (type(self.capacity) is not int or self.capacity < 1):
            raise SparsifyError(f"Repeat got capacity={self.capacity!r}; expected an int of at least 1, or None.")


@dataclass(frozen=True, eq=False)
class Given:
    """A given set of entries: an earlier delta's support, or a mask.

    Args:
        support: the entries by tensor name: a bool mask in the tensor's shape, or flat indices (n,) int64.
    """

    support: Mapping[str, Tensor] = field(compare=False)  # not a setting: the delta's file holds it
    name: ClassVar[str] = "given"


Selection = Static | Increment | Repeat | Given
SELECTIONS: dict[str, type[Selection]] = {kind.name: kind for kind in (Static, Prune, Increment, Repeat, Given)}


@dataclass(frozen=True)
class Strategy:
    """An importance and a selection, in any combination.

    Args:
        importance: the score of an entry: :class:`D3`, :class:`Fisher`, :class:`SNIP`, :class:`Magnitude`,
            :class:`Random`, :class:`Bias`, or one of your own (:func:`register_importance`); ``None`` only with
            ``Given``.
        selection: when entries are selected: :class:`Static`, :class:`Prune`, :class:`Increment`, :class:`Repeat`.

    Raises:
        SparsifyError: when a part has the wrong type, or they would prune all but the smallest weights.

    Example:
        >>> strategy = Strategy(D3(exp=1, eps=1e-3), Increment())
        >>> Strategy.from_dict(strategy.to_dict()) == strategy
        True
    """

    importance: Importance | None
    selection: Selection

    def __post_init__(self) -> None:
        if not isinstance(self.selection, Selection):
            raise SparsifyError(f"selection={self.selection!r}; expected an object such as Increment() or Static().")
        if isinstance(self.selection, Given):
            return
        if not isinstance(self.importance, Importance):
            raise SparsifyError(
                f"importance={self.importance!r} with {self.selection}; expected an object such as D3() or "
                "Magnitude(), or what register_importance(name) makes of a function of (weight, grad)."
            )
        if isinstance(self.selection, Prune) and self.importance == Magnitude(largest=False):
            raise SparsifyError(
                f"{self.importance} with {self.selection} would keep the smallest weights and remove the large ones; "
                "magnitude pruning is Magnitude(largest=True)."
            )

    @property
    def calibrates(self) -> bool:
        """Whether gradients are needed before training."""
        return isinstance(self.selection, Static) and self.importance is not None and self.importance.uses_gradient

    def to_dict(self) -> dict[str, Any]:
        """Returns the strategy as plain JSON types."""
        return {
            "importance": None if self.importance is None else _to_dict(self.importance),
            "selection": _to_dict(self.selection),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Strategy:
        """Builds the strategy that :meth:`to_dict` described."""
        if not isinstance(data, dict) or not {"importance", "selection"} <= data.keys():
            raise SparsifyError(f"{data!r} describes no strategy; expected a dict with `importance` and `selection`.")
        importance = data["importance"]
        return cls(
            None if importance is None else _from_dict(IMPORTANCES, importance, "importance"),
            _from_dict(SELECTIONS, data["selection"], "selection"),
        )


def _to_dict(part: Any) -> dict[str, Any]:
    """The name and settings of an importance or selection; its settings are the fields that are compared."""
    return {"name": part.name, **{item.name: getattr(part, item.name) for item in fields(part) if item.compare}}


def _from_dict(kinds: dict[str, Any], data: dict[str, Any], part: str) -> Any:
    if not isinstance(data, dict) or data.get("name") not in kinds:
        name = data.get("name") if isinstance(data, dict) else data
        raise SparsifyError(f"unknown {part} {name!r}; expected one of {', '.join(kinds)}.")
    kind = kinds[data["name"]]
    if kind is Given:
        raise SparsifyError("a given set is not stored in the config; pass the set itself, such as delta.support.")
    settings = {key: value for key, value in data.items() if key != "name"}
    try:
        return kind(**settings)
    except TypeError:
        expected = ", ".join(inspect.signature(kind).parameters) or "none"
        raise SparsifyError(f"{part} {data['name']!r} with settings {settings!r}; it has these: {expected}.") from None


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
