"""Budgets: a number, a share, or what the strategy says; and the room they take."""

import pytest
import torch
from recorder import mask
from torch import nn

from sparsify import D3, Bias, Increment, Random, Repeat, Schedule, SparsifyError, Static, Strategy
from sparsify.strategies.budget import resolve_budget, resolve_capacity


@pytest.fixture
def tensors():
    """A table of 5 rows of 4 with a padding row, and a bias of 3: 19 candidates."""
    _, table = mask(nn.Embedding(5, 4, padding_idx=0))
    _, layer = mask(nn.Linear(2, 3), "bias")
    layer["bias"].name = "head.bias"
    return [table["weight"], layer["bias"]]


@pytest.mark.parametrize(("budget", "entries"), [(1, 1), (19, 19), (0.5, 9), (0.99, 18)])
def test_numbers_and_shares_are_of_the_candidates(tensors, budget, entries):
    assert resolve_budget(budget, Strategy(D3(), Increment()), tensors) == entries


@pytest.mark.parametrize("selection", [Static(), Increment(), Repeat()])
def test_biases_say_themselves_how_many_they_are(tensors, selection):
    assert resolve_budget(None, Strategy(Bias(), selection), tensors) == 3


def test_others_do_not(tensors):
    with pytest.raises(SparsifyError, match=r"budget=None with Random\(\); expected a number of entries, 1 to 19"):
        resolve_budget(None, Strategy(Random(), Static()), tensors)


def test_a_share_of_less_than_one_entry_is_an_error_that_names_the_smallest(tensors):
    with pytest.raises(
        SparsifyError,
        match=r"budget=1e-09 is a share of the 19 candidates that comes to less than one entry; .* least 0\.053",
    ):
        resolve_budget(1e-9, Strategy(D3(), Increment()), tensors)


@pytest.mark.parametrize(
    ("selection", "steps", "capacity"),
    [(Static(), None, 6), (Increment(), 100, 6), (Repeat(), 2, 12), (Repeat(), 100, 19), (Repeat(7), None, 7)],
)
def test_only_repeat_needs_more_room_than_the_budget(tensors, selection, steps, capacity):
    assert resolve_capacity(6, Strategy(D3(), selection), Schedule(), steps, tensors) == capacity


def test_room_is_never_for_more_than_all_candidates(tensors):
    assert resolve_capacity(6, Strategy(D3(), Repeat(capacity=10**9)), Schedule(), None, tensors) == 19
    assert torch.tensor([t.num_candidates for t in tensors]).sum() == 19
