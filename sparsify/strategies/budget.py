"""The budget as a number of entries, its division among tensors, and the length of the flat delta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from sparsify.core.schedule import Schedule
from sparsify.errors import SparsifyError
from sparsify.strategies.importance import Bias
from sparsify.strategies.strategy import Repeat, Strategy


def resolve_budget(budget: int | float | None, strategy: Strategy, candidates: Mapping[str, int]) -> int:
    """Returns the budget, a number or a share of the candidates (by tensor name), as a number of entries."""
    importance: Any = strategy.importance
    available = sum(number for name, number in candidates.items() if importance.covers(name))
    if available == 0:
        raise SparsifyError(f"{importance} finds no entry among the {len(candidates)} candidate tensors.")
    if budget is None and isinstance(importance, Bias):
        return available
    if isinstance(budget, bool) or not isinstance(budget, Real):
        raise SparsifyError(
            f"budget={budget!r} with {importance}; expected a number of entries, 1 to {available:,}, or a share of "
            "the candidates, a float in (0, 1). Only bitfit and full need no budget."
        )
    if not isinstance(budget, Integral):
        if not 0 < budget < 1 or budget * available < 1:
            raise SparsifyError(
                f"budget={budget!r} is a float and so a share: of {available:,} candidates it has to be in (0, 1) and "
                f"not less than one entry, at least {1 / available:.2g}; an int is a number of entries."
            )
        budget = int(budget * available)
    if not 1 <= budget <= available:
        raise SparsifyError(f"budget={budget:,} entries; expected 1 to {available:,}, the number of candidates.")
    return int(budget)


def share_out(budget: int, candidates: Sequence[int]) -> list[int]:
    """Divides a budget, at most the sum of ``candidates``, in proportion to them; the largest remainders round up."""
    total = sum(candidates)
    counts = [budget * number // total for number in candidates]
    largest_first = sorted(range(len(candidates)), key=lambda i: -(budget * candidates[i] % total))
    for i in largest_first[: budget - sum(counts)]:
        counts[i] += 1
    return counts


def check_steps(steps: int | None) -> None:
    """Raises ``SparsifyError`` for a planned number of steps that is none."""
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1):
        raise SparsifyError(f"steps={steps!r}; expected the planned number of optimizer steps, an int of at least 1.")


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
    capacity = min(sum(candidates.values()), selection.capacity or budget * (steps or 0))
    if capacity < budget:
        raise SparsifyError(f"{selection} has less room than the budget of {budget:,} entries; raise its capacity.")
    return capacity
