"""Which entries are trained: a strategy is a row of the table importance x selection.

``PRESETS`` is that table with the paper's settings. A strategy is a frozen dataclass and round-trips through JSON.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, ClassVar

from torch import Tensor

from sparsify.errors import SparsifyError
from sparsify.strategies.allocation import ALLOCATIONS, GLOBAL
from sparsify.strategies.importance import D3, IMPORTANCES, SNIP, Bias, Fisher, GraSP, Importance, Magnitude, Random


@dataclass(frozen=True)
class Static:
    """static-S: choose once, before training; by gradients only if there is a calibration pass for them.

    Args:
        allocation: how many of the entries each tensor gets: ``"global"``, as many as are among the best of the whole
            model; ``"uniform"``, the same density in each; ``"erdos-renyi"``, a density in proportion to
            (n_in + n_out) / (n_in n_out), so that small tensors stay denser (Mocanu et al. 2018).
    """

    allocation: str = GLOBAL
    name: ClassVar[str] = "static"

    def __post_init__(self) -> None:
        if self.allocation not in ALLOCATIONS:
            raise SparsifyError(
                f"{type(self).__name__} got allocation={self.allocation!r}; expected one of "
                f"{', '.join(ALLOCATIONS)}.{_hint(self.allocation, ALLOCATIONS)}"
            )


@dataclass(frozen=True)
class Prune(Static):
    """Pruning at initialisation: choose once, set every entry that is not chosen to zero, train those that are.

    For modules that are new, such as adapters: a pretrained matrix loses what is not chosen, and ``sparsify`` refuses
    to prune one unless ``pretrained`` is set. Matrices, and tensors of more dimensions, are pruned; biases, norms and
    other vectors are trained whole. The budget counts both, so that it is the number of entries that are trained, and
    has to leave some to the matrices.

    ``desparsify()`` leaves the zeros where they are; the base, for ``base_weights()``, is the pruned model.

    Args:
        allocation: as for :class:`Static`.
        pretrained: also prune matrices that are not known to be new. New are those that PEFT and adapters add, those
            that the model's checkpoint lacks, and those in ``fresh_modules``.

    Example:
        >>> Strategy(SNIP(), Prune())  # SparseAdapter's choice: strategy="sparseadapter"
        Strategy(importance=SNIP(), selection=Prune(allocation='global', pretrained=False))

    Source: He et al. 2022, "SparseAdapter: An easy approach for improving the parameter-efficiency of adapters", where
    biases and norms are not pruned either, and come on top of the budget.
    """

    pretrained: bool = False
    name: ClassVar[str] = "prune"

    def removes_from(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape is pruned."""
        return len(shape) > 1


@dataclass(frozen=True)
class Increment:
    """increment-S: each step unmasks some more entries and never masks one again (the paper's Algorithm 1)."""

    name: ClassVar[str] = "increment"


@dataclass(frozen=True)
class Repeat:
    """repeat-S: each step chooses the whole budget afresh, among all entries. A baseline, for small models.

    An entry that is no longer chosen keeps its value and its optimizer state and gets no gradient, so the flat delta
    has a place for every entry that was ever chosen.

    Args:
        capacity: how many entries can be touched in all; beyond it, a step goes without those that would be new.
            ``None``: as many as budget x steps can touch.
    """

    capacity: int | None = None
    name: ClassVar[str] = "repeat"

    def __post_init__(self) -> None:
        number = self.capacity
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise SparsifyError(f"Repeat got capacity={number!r}; expected an int of at least 1, or None.")


@dataclass(frozen=True, eq=False)
class Given:
    """A set of entries that is known already: an earlier delta's support, or a mask.

    Args:
        support: the entries by tensor name: a bool mask in the tensor's shape, or flat indices (n,) int64.
    """

    support: Mapping[str, Tensor] = field(compare=False)  # no setting: it is what a delta's file is made of
    name: ClassVar[str] = "given"


@dataclass(frozen=True)
class Dense:
    """No selection at all: every candidate is trained, the model stays dense. The baseline."""

    name: ClassVar[str] = "dense"


Selection = Static | Increment | Repeat | Given | Dense
SELECTIONS: dict[str, type[Selection]] = {kind.name: kind for kind in (Static, Prune, Increment, Repeat, Given, Dense)}


@dataclass(frozen=True)
class Strategy:
    """An importance with a selection; any goes with any.

    Args:
        importance: which entries matter: :class:`D3`, :class:`Fisher`, :class:`SNIP`, :class:`GraSP`,
            :class:`Magnitude`, :class:`Random`, :class:`Bias`, or one of your own (:func:`register_importance`);
            ``None`` only with ``Given`` and ``Dense``.
        selection: when they are chosen: :class:`Static`, :class:`Prune`, :class:`Increment`, :class:`Repeat`.

    Raises:
        SparsifyError: when one of the two is no importance or selection, or they make no sense together: GraSP while
            training, or pruning that keeps the smallest weights.

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
        if isinstance(self.selection, (Dense, Given)):
            return
        if self.importance is None:
            raise SparsifyError(f"{self.selection} without an importance; expected one, such as D3().")
        if isinstance(self.importance, type) or not callable(getattr(self.importance, "score", None)):
            raise SparsifyError(
                f"importance={self.importance!r}; expected an object such as D3() or Magnitude(), or what "
                "register_importance(name) makes of a function of (weight, grad)."
            )
        if isinstance(self.importance, GraSP) and not isinstance(self.selection, Static):
            raise SparsifyError(
                f"{self.importance} with {self.selection}: a training step has no Hessian, which GraSP is made of; "
                "expected Prune() or Static(), with calibration batches."
            )
        if isinstance(self.selection, Prune) and self.importance == Magnitude(largest=False):
            raise SparsifyError(
                f"{self.importance} with {self.selection} would keep the smallest weights and remove the large ones; "
                "magnitude pruning is Magnitude(largest=True)."
            )

    @property
    def calibrates(self) -> bool:
        """Whether gradients are needed before training."""
        return (
            isinstance(self.selection, Static) and self.importance is not None and bool(self.importance.uses_gradient)
        )

    def to_dict(self) -> dict[str, Any]:
        """The strategy as plain JSON types."""
        return {
            "importance": None if self.importance is None else _described(self.importance),
            "selection": _described(self.selection),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Strategy:
        """The strategy that :meth:`to_dict` described."""
        if not isinstance(data, dict) or not {"importance", "selection"} <= data.keys():
            raise SparsifyError(f"{data!r} describes no strategy; expected a dict with `importance` and `selection`.")
        importance = data["importance"]
        return cls(
            None if importance is None else _named(IMPORTANCES, importance, "importance"),
            _named(SELECTIONS, data["selection"], "selection"),
        )


def _described(part: Any) -> dict[str, Any]:
    """An importance or selection as its name and settings; what is compared is what counts as a setting."""
    settings = {setting.name: getattr(part, setting.name) for setting in fields(part) if setting.compare}
    return {"name": part.name, **settings}


def _named(kinds: dict[str, Any], data: dict[str, Any], what: str) -> Any:
    if not isinstance(data, dict) or data.get("name") not in kinds:
        name = data.get("name") if isinstance(data, dict) else data
        raise SparsifyError(f"unknown {what} {name!r}; expected one of {', '.join(kinds)}.")
    kind = kinds[data["name"]]
    settings = {key: value for key, value in data.items() if key != "name"}
    if kind is Given:
        raise SparsifyError("a given set is not described by its name; pass the set itself, such as delta.support.")
    try:
        return kind(**settings)
    except TypeError:
        expected = ", ".join(inspect.signature(kind).parameters) or "none"
        raise SparsifyError(f"{what} {data['name']!r} with settings {settings!r}; it has these: {expected}.") from None


PRESETS: dict[str, Strategy] = {
    "id3": Strategy(D3(exp=2, eps=1), Increment()),
    "d3-repeat": Strategy(D3(exp=2, eps=1), Repeat()),
    "pafi": Strategy(Magnitude(), Static()),
    "fish": Strategy(Fisher(num_samples=1024), Static()),
    "random": Strategy(Random(), Static()),
    "sparseadapter": Strategy(SNIP(), Prune()),
    "bitfit": Strategy(Bias(), Static()),
    "full": Strategy(None, Dense()),
}


def resolve_strategy(strategy: str | Strategy | Mapping[str, Tensor]) -> Strategy:
    """The strategy itself, the preset of that name, or the one that trains a given set.

    Raises:
        SparsifyError: for an unknown name (the nearest is suggested) or another type.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if isinstance(strategy, Mapping) and all(isinstance(entries, Tensor) for entries in strategy.values()):
        return Strategy(None, Given(strategy))
    if isinstance(strategy, str) and strategy in PRESETS:
        return PRESETS[strategy]
    raise SparsifyError(
        f"unknown strategy {strategy!r}; expected one of {', '.join(PRESETS)}, a Strategy(importance=..., "
        f"selection=...), or a set of entries such as delta.support.{_hint(strategy, PRESETS)}"
    )


def _hint(value: Any, names: Iterable[str]) -> str:
    """A sentence with the name that is nearest to a value, whatever its case; empty where none is near."""
    near = get_close_matches(str(value).lower().replace("_", "-"), names, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
