"""Budgets divided among tensors: exact, within every tensor's size, in proportion."""

from fractions import Fraction
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsify.strategies.allocation import ERDOS_RENYI, UNIFORM, allocate

SHAPES = st.lists(st.lists(st.integers(1, 12), max_size=4).map(tuple), min_size=1, max_size=8)


@st.composite
def problems(draw):
    """Shapes, numbers of candidates (as many as entries, or some less), and a budget for which there is room."""
    shapes = draw(SHAPES)
    candidates = [draw(st.integers(0, prod(shape))) if draw(st.booleans()) else prod(shape) for shape in shapes]
    return shapes, candidates, draw(st.integers(0, sum(candidates)))


def weights_of(shapes, candidates, allocation):
    return list(candidates) if allocation == UNIFORM else [sum(shape) if shape else 1 for shape in shapes]


def exact_shares(budget, weights, candidates):
    """min(candidates, scale x weight), with the scale at which they add up: found by trying every set of full ones."""
    by_ratio = sorted(range(len(weights)), key=lambda i: Fraction(candidates[i], max(weights[i], 1)))
    for number_full in range(len(weights) + 1):
        full, others = by_ratio[:number_full], by_ratio[number_full:]
        left = budget - sum(candidates[i] for i in full)
        total = sum(weights[i] for i in others)
        scale = Fraction(left, total) if total else Fraction(0)
        if left >= 0 and all(scale * weights[i] <= candidates[i] for i in others) and (total or not left):
            return [Fraction(candidates[i]) if i in full else scale * weights[i] for i in range(len(weights))]
    raise AssertionError("there is always a scale")


@settings(max_examples=400)
@given(problem=problems(), allocation=st.sampled_from([UNIFORM, ERDOS_RENYI]))
def test_counts_are_the_exact_shares_rounded_and_keep_their_order(problem, allocation):
    shapes, candidates, budget = problem
    counts, weights = allocate(budget, shapes, candidates, allocation), weights_of(shapes, candidates, allocation)
    assert sum(counts) == budget
    assert all(0 <= count <= number for count, number in zip(counts, candidates, strict=True))
    shares = exact_shares(budget, weights, candidates)
    assert all(abs(count - share) < 1 for count, share in zip(counts, shares, strict=True))
    for i, j in product(range(len(counts)), repeat=2):  # a larger one never gets less while it has room
        assert weights[i] <= weights[j] or counts[i] == candidates[i] or counts[i] >= counts[j]
    if budget < sum(candidates):  # one more entry in all takes at most a rounding from any tensor
        more = allocate(budget + 1, shapes, candidates, allocation)
        assert all(new >= old - 1 for new, old in zip(more, counts, strict=True))


@pytest.mark.parametrize(
    ("budget", "shapes", "candidates", "allocation", "counts"),
    [
        # (3, 2) would get 60 x 5 / 40 = 7.5 of its 6 entries; 54 are left for weights 20 and 15
        (60, [(10, 10), (3, 2), (5, 10)], [100, 6, 50], ERDOS_RENYI, [31, 6, 23]),
        (30, [(10, 10), (10, 20)], [100, 200], UNIFORM, [10, 20]),
        (5, [(2, 2)] * 4, [4] * 4, UNIFORM, [2, 1, 1, 1]),  # equal remainders go to the first
    ],
)
def test_by_hand(budget, shapes, candidates, allocation, counts):
    assert allocate(budget, shapes, candidates, allocation) == counts
