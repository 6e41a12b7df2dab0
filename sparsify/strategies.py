"""Which entries are trained: a strategy is a row of the table importance x selection.

``PRESETS`` is that table with the paper's settings. A strategy is a frozen dataclass and round-trips through JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar

from sparsify.errors import SparsifyError
from sparsify.importance import D3, IMPORTANCES, Bias, Importance, Magnitude, Random


@dataclass(frozen=True)
class Static:
    """static-S: choose once, before training; needs an importance of the weights alone."""

    name: ClassVar[str] = "static"


@dataclass(frozen=True)
class Increment:
    """increment-S: each step unmasks some more entries and never masks one again (the paper's Algorithm 1)."""

    name: ClassVar[str] = "increment"


@dataclass(frozen=True)
class Dense:
    """No selection at all: every candidate is trained, the model stays dense. The baseline."""

    name: ClassVar[str] = "dense"


Selection = Static | Increment | Dense
SELECTIONS: dict[str, type[Selection]] = {kind.name: kind for kind in (Static, Increment, Dense)}


@dataclass(frozen=True)
class Strategy:
    """An importance with a selection.

    Args:
        importance: which entries matter: :class:`D3`, :class:`Magnitude`, :class:`Random`, :class:`Bias`; ``None``
            only where nothing is selected.
        selection: when they are chosen: :class:`Static` or :class:`Increment`.

    Raises:
        SparsifyError: when the two cannot work together.

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
        if isinstance(self.selection, Dense):
            return
        if self.importance is None:
            raise SparsifyError(f"{self.selection} without an importance; expected one, such as D3().")
        if isinstance(self.importance, type) or not callable(getattr(self.importance, "score", None)):
            raise SparsifyError(f"importance={self.importance!r}; expected an object such as D3() or Magnitude().")
        if isinstance(self.selection, Increment) and not self.importance.uses_gradient:
            raise SparsifyError(
                f"Increment() with {self.importance} is not supported; it needs an importance that uses the "
                "gradient, such as D3(). Use Static() to choose by the weights alone."
            )
        if isinstance(self.selection, Static) and self.importance.uses_gradient:
            raise SparsifyError(
                f"Static() with {self.importance} needs gradients before training, which is not supported; "
                "use Increment(), or an importance of the weights alone: Magnitude(), Random(), Bias()."
            )

    def to_dict(self) -> dict[str, Any]:
        """The strategy as plain JSON types."""
        importance = self.importance
        return {
            "importance": importance and {"name": importance.name, **asdict(importance)},  # type: ignore[call-overload]
            "selection": {"name": self.selection.name, **asdict(self.selection)},
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


def _named(kinds: dict[str, Any], data: dict[str, Any], what: str) -> Any:
    if not isinstance(data, dict) or data.get("name") not in kinds:
        name = data.get("name") if isinstance(data, dict) else data
        raise SparsifyError(f"unknown {what} {name!r}; expected one of {', '.join(kinds)}.")
    kind = kinds[data["name"]]
    settings = {key: value for key, value in data.items() if key != "name"}
    try:
        return kind(**settings)
    except TypeError:
        expected = ", ".join(field.name for field in fields(kind)) or "none"
        raise SparsifyError(f"{what} {kind.name!r} with settings {settings!r}; it has these: {expected}.") from None


PRESETS: dict[str, Strategy] = {
    "id3": Strategy(D3(exp=2, eps=1), Increment()),
    "pafi": Strategy(Magnitude(), Static()),
    "random": Strategy(Random(), Static()),
    "bitfit": Strategy(Bias(), Static()),
    "full": Strategy(None, Dense()),
}


def resolve_strategy(strategy: str | Strategy) -> Strategy:
    """The strategy itself, or the preset of that name.

    Raises:
        SparsifyError: for an unknown name (the nearest is suggested) or another type.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if isinstance(strategy, str) and strategy in PRESETS:
        return PRESETS[strategy]
    near = get_close_matches(str(strategy), PRESETS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise SparsifyError(
        f"unknown strategy {strategy!r}; expected one of {', '.join(PRESETS)}, "
        f"or a Strategy(importance=..., selection=...).{hint}"
    )
