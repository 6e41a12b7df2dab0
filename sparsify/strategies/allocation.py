"""How a budget is shared out among the tensors of a selection that is made once.

In: the budget, and the tensors' shapes and numbers of candidates. Out: whole numbers that add up to the budget.
"""

from __future__ import annotations

from collections.abc import Sequence

GLOBAL, UNIFORM, ERDOS_RENYI = "global", "uniform", "erdos-renyi"
ALLOCATIONS = (GLOBAL, UNIFORM, ERDOS_RENYI)


def allocate(budget: int, shapes: Sequence[Sequence[int]], candidates: Sequence[int], allocation: str) -> list[int]:
    """How many entries each tensor gets.

    ``"uniform"``: the same density in each. ``"erdos-renyi"``: a density in proportion to the sum of the dimensions
    over their product, for a matrix (n_in + n_out) / (n_in n_out), so that small tensors stay denser. What goes beyond
    a tensor's candidates is shared out among the others; what rounding down leaves goes to the largest remainders.

    Args:
        budget: entries in all, from 0 to the sum of ``candidates``.
        shapes: of the tensors.
        candidates: entries that each tensor can get at most.
        allocation: ``"uniform"`` or ``"erdos-renyi"``.

    Returns:
        A number for each tensor; their sum is the budget.

    Example:
        >>> allocate(30, [(10, 10), (2, 10), (3, 2)], [100, 20, 6], "erdos-renyi")
        [16, 10, 4]

    Source: Mocanu et al. 2018, "Scalable training of artificial neural networks with adaptive sparse connectivity
    inspired by network science"; for more than two dimensions Evci et al. 2020, "Rigging the lottery".
    """
    weights = list(candidates) if allocation == UNIFORM else [sum(shape) if shape else 1 for shape in shapes]
    counts, open_ = [0] * len(weights), [i for i, number in enumerate(candidates) if number]
    left = budget
    while True:
        total = sum(weights[i] for i in open_)
        full = [i for i in open_ if left * weights[i] >= candidates[i] * total]  # in whole numbers: exact
        if not full:
            break
        for i in full:
            counts[i] = candidates[i]
            left -= candidates[i]
        open_ = [i for i in open_ if i not in full]
    if left:
        _share_out(left, weights, open_, counts)
    return counts


def _share_out(left: int, weights: Sequence[int], among: Sequence[int], counts: list[int]) -> None:
    """Writes the shares of those for whom there is room, by largest remainder; equal remainders by position."""
    total = sum(weights[i] for i in among)
    for i in among:
        counts[i] = left * weights[i] // total
    missing = left - sum(counts[i] for i in among)
    for i in sorted(among, key=lambda i: -(left * weights[i] % total))[:missing]:
        counts[i] += 1
