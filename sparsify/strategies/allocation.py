"""Allocation: how a static selection divides its budget among the tensors."""

from __future__ import annotations

from collections.abc import Sequence

GLOBAL, UNIFORM, ERDOS_RENYI = "global", "uniform", "erdos-renyi"
ALLOCATIONS = (GLOBAL, UNIFORM, ERDOS_RENYI)


def allocate(budget: int, shapes: Sequence[Sequence[int]], candidates: Sequence[int], allocation: str) -> list[int]:
    """Divides a budget, at most the sum of ``candidates``, among tensors; returns the number of entries of each.

    ``"uniform"``: the same density in each. ``"erdos-renyi"``: a density in proportion to the sum of the dimensions
    over their product, for a matrix (n_in + n_out) / (n_in n_out), so that small tensors stay denser. What exceeds a
    tensor's candidates is divided among the others; what rounding down leaves goes to the largest remainders.

    Example:
        >>> allocate(30, [(10, 10), (2, 10), (3, 2)], [100, 20, 6], "erdos-renyi")
        [16, 10, 4]

    Source: Mocanu et al. 2018, "Scalable training of artificial neural networks with adaptive sparse connectivity
    inspired by network science"; for more than two dimensions Evci et al. 2020, "Rigging the lottery".
    """
    weights = list(candidates) if allocation == UNIFORM else [sum(shape) if shape else 1 for shape in shapes]
    counts, rest = [0] * len(weights), [i for i, number in enumerate(candidates) if number]
    left, total = budget, sum(weights[i] for i in rest)
    while full := [i for i in rest if left * weights[i] >= candidates[i] * total]:  # in whole numbers: exact
        for i in full:
            counts[i] = candidates[i]
            left -= candidates[i]
        rest = [i for i in rest if i not in full]
        total = sum(weights[i] for i in rest)
    for i in rest:
        counts[i] = left * weights[i] // total
    largest_first = sorted(rest, key=lambda i: -(left * weights[i] % total))  # equal remainders by position
    for i in largest_first[: budget - sum(counts)]:
        counts[i] += 1
    return counts
