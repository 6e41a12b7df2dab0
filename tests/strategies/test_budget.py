"""Budgets: a number, a share, or none; and the length of the flat delta."""

import pytest

from sparsify import D3, Bias, Increment, Random, Repeat, Schedule, SparsifyError, Static, Strategy
from sparsify.strategies.budget import resolve_budget, resolve_capacity

# 5 rows of 4 less a padding row, and a bias of 3: 19 candidates
CANDIDATES = {"table.weight": 16, "head.bias": 3}


@pytest.mark.parametrize(("budget", "entries"), [(1, 1), (19, 19), (0.5, 9), (0.99, 18)])
def test_numbers_and_shares_are_of_the_candidates(budget, entries):
    assert resolve_budget(budget, Strategy(D3(), Increment()), CANDIDATES) == entries


@pytest.mark.parametrize("selection", [Static(), Increment(), Repeat()])
def test_biases_say_themselves_how_many_they_are(selection):
    assert resolve_budget(None, Strategy(Bias(), selection), CANDIDATES) == 3


def test_a_budget_that_gives_no_entries_is_an_error_that_names_the_limits():
    with pytest.raises(SparsifyError, match=r"budget=None with Random\(\); expected a number of entries, 1 to 19"):
        resolve_budget(None, Strategy(Random(), Static()), CANDIDATES)
    with pytest.raises(SparsifyError, match=r"budget=1e-09 is .* 19 candidates .* less than one entry.* least 0\.053"):
        resolve_budget(1e-9, Strategy(D3(), Increment()), CANDIDATES)


CAPACITIES = [
    (Static(), None, 6), (Increment(), 100, 6), (Repeat(), 2, 12), (Repeat(), 100, 19), (Repeat(7), None, 7),
    (Repeat(10**9), None, 19),
]  # fmt: skip


@pytest.mark.parametrize(("selection", "steps", "capacity"), CAPACITIES)
def test_only_repeat_needs_more_room_than_the_budget(selection, steps, capacity):
    assert resolve_capacity(6, Strategy(D3(), selection), Schedule(), steps, CANDIDATES) == capacity
