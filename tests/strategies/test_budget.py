"""Budgets: a number, a share, or none; shared out among tensors; and the length of the flat delta."""

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsify import D3, Increment, Random, SparsifyError, Static, Strategy
from sparsify.strategies.strategy import resolve_budget, share_out

# 5 rows of 4 less a padding row, and a bias of 3: 19 candidates
CANDIDATES = {"table.weight": 16, "head.bias": 3}


@pytest.mark.parametrize(("budget", "entries"), [(1, 1), (19, 19), (0.5, 9), (0.99, 18)])
def test_numbers_and_shares_are_of_the_candidates(budget, entries):
    assert resolve_budget(budget, Strategy(D3(), Increment()), CANDIDATES) == entries


def test_a_budget_that_gives_no_entries_is_an_error_that_names_the_limits():
    with pytest.raises(SparsifyError, match=r"budget=None with Random\(\); expected a number of entries, 1 to 19"):
        resolve_budget(None, Strategy(Random(), Static()), CANDIDATES)
    with pytest.raises(SparsifyError, match=r"budget=1e-09 is .* 19 candidates .* less than one entry.* least 0\.053"):
        resolve_budget(1e-9, Strategy(D3(), Increment()), CANDIDATES)


def test_modules_have_their_budgets_in_addition_and_what_cannot_be_is_refused():
    for allocation, budget, expected in [
        ({"head": 2}, 0.5, 10), ({"h.*": 0.7, "table|head": 7}, None, 9),  # the first key that matches counts
        ({"ead": 2}, 5, "'ead' is to have a budget of its own, and matches no module"), ({"hed": 2}, 5, "mean 'head'"),
        ({"head": 4}, 5, "`head`: budget=4 entries; expected 1 to 3"), ({"head": 0.01}, 5, "`head`: budget=0.01 is a"),
        ({"head": 1, "table": 2}, 5, "all other modules: D3.* finds no entry among the 0 candidate tensors"),
        ({"head": 1}, 17, "all other modules: budget=17 entries; expected 1 to 16"),
    ]:  # fmt: skip
        for selection in (Static(allocation), Increment(allocation=allocation)):
            if isinstance(expected, int):
                assert resolve_budget(budget, Strategy(D3(), selection), CANDIDATES) == expected
            else:
                with pytest.raises(SparsifyError, match=expected):
                    resolve_budget(budget, Strategy(D3(), selection), CANDIDATES)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any), st.data())
def test_counts_are_the_exact_shares_rounded_and_keep_their_order(candidates, data):
    budget, total = data.draw(st.integers(1, sum(candidates))), sum(candidates)
    counts = share_out(budget, candidates)
    assert sum(counts) == budget
    assert all(0 <= count <= number for count, number in zip(counts, candidates, strict=True))
    assert all(abs(c - Fraction(budget * n, total)) < 1 for c, n in zip(counts, candidates, strict=True))
    for i, j in product(range(len(counts)), repeat=2):
        assert candidates[i] <= candidates[j] or counts[i] >= counts[j]


def test_equal_remainders_go_to_the_first():
    assert share_out(30, [100, 200]) == [10, 20]
    assert share_out(5, [4] * 4) == [2, 1, 1, 1]
