"""Strategies: importance x selection, in any combination.

A strategy is a frozen dataclass that round-trips through JSON.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from sparsify.core.importance import Importance
from sparsify.errors import SparsifyError, did_you_mean
from sparsify.strategies.importance import IMPORTANCES

ALLOCATIONS = ("global", "uniform")


class Selection:
    """When entries are selected.

    Attributes:
        name: the name in a delta's config.
        scored: whether it needs an importance.
    """

    name: ClassVar[str]
    scored: ClassVar[bool] = True

    def check(self, importance: Importance) -> None:
        """Raises ``SparsifyError`` where it cannot be combined with an importance."""


@dataclass(frozen=True)
class Static(Selection):
    """static-S: select once, before training. A gradient importance needs a calibration.

    Args:
        allocation: how the budget is divided among the tensors: ``"global"``, the best entries of the whole model;
            ``"uniform"``, the same density in each tensor.
    """

    allocation: str = "global"
    name = "static"

    def __post_init__(self) -> None:
        if self.allocation not in ALLOCATIONS:
            raise SparsifyError(
                f"{type(self).__name__} got allocation={self.allocation!r}; expected one of "
                f"{', '.join(ALLOCATIONS)}.{did_you_mean(self.allocation, ALLOCATIONS)}"
            )


@dataclass(frozen=True)
class Increment(Selection):
    """increment-S: each step unmasks more entries, and none is ever masked again (the paper's Algorithm 1)."""

    name = "increment"


@dataclass(frozen=True)
class Repeat(Selection):
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


SELECTIONS: dict[str, Callable[..., Selection]] = {kind.name: kind for kind in (Static, Increment, Repeat)}


@dataclass(frozen=True)
class Strategy:
    """An importance and a selection, in any combination.

    Args:
        importance: the score of an entry: :class:`D3`, :class:`Fisher`, :class:`SNIP`, :class:`Magnitude`,
            :class:`Random`, :class:`Bias`, or one of your own (:func:`register_importance`).
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
        if not self.selection.scored:
            return
        if not isinstance(self.importance, Importance):
            raise SparsifyError(
                f"importance={self.importance!r} with {self.selection}; expected an object such as D3() or "
                "Magnitude(), or what register_importance(name) makes of a function of (weight, grad)."
            )
        self.selection.check(self.importance)

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
    settings = {key: value for key, value in data.items() if key != "name"}
    try:
        return kind(**settings)
    except TypeError:
        expected = ", ".join(inspect.signature(kind).parameters) or "none"
        raise SparsifyError(f"{part} {data['name']!r} with settings {settings!r}; it has these: {expected}.") from None
