"""Entries: in order of unmasking in the state, by tensor and index in the view, and what is wrong with damaged ones."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparsify import SparsifyError, sparsify
from sparsify.core.entries import count_by_tensor
from sparsify.training.entries import BUFFERS
from sparsify.training.entries import ModelEntries as Entries

SIZES, CAPACITY = [5, 7, 1, 6], 12


def filled(*groups):
    """Entries of a root, added group by group of global ids; the base value of an id is the id."""
    entries = Entries(nn.Module(), SIZES)
    entries.register(CAPACITY, torch.float32, torch.float32, torch.device("cpu"))
    for group in groups:
        ids = torch.tensor(group, dtype=torch.int64)
        entries.append(ids, ids.float(), count_by_tensor(ids, entries.ends).tolist())
    return entries


@given(st.permutations(range(sum(SIZES))), st.lists(st.integers(0, 4), max_size=3))
def test_the_slot_of_an_entry_is_its_position_and_the_view_is_by_tensor_and_index(order, numbers):
    groups, start = [], 0
    for number in numbers:
        groups.append(order[start : start + number])
        start += number
    entries = filled(*groups)
    assert entries.ids.tolist() == order[:start]
    assert entries.base.tolist() == order[:start]
    for number, (offset, size) in enumerate(zip(entries.offsets, SIZES, strict=True)):
        slots, indices = entries.of(number)
        own = sorted(id for id in order[:start] if offset <= id < offset + size)
        assert (indices + offset).tolist() == own
        assert entries.ids[slots].tolist() == own
        assert entries.counts[number] == len(own)
    assert entries.count == start
    assert entries.problem() is None


def test_what_else_writes_into_the_buffers_is_seen():
    entries, other = filled([3, 17]), filled([3, 17, 9])
    assert not entries.catch_up()
    for own, new in zip(entries.root.buffers(), filled([3, 17]).root.buffers(), strict=True):
        own.copy_(new)
    assert not entries.catch_up(), "they are the same"
    for own, new in zip(entries.root.buffers(), filled([3, 9]).root.buffers(), strict=True):
        own.copy_(new)
    assert entries.catch_up(), "as many, and others"
    for own, new in zip(entries.root.buffers(), other.root.buffers(), strict=True):
        own.copy_(new)
    assert entries.catch_up()
    entries.read()
    assert entries.ids.tolist() == [3, 17, 9]
    assert not copy.deepcopy(entries).catch_up()


def write_ids(state, *ids):
    state["sparse_ids"], state["sparse_base"] = torch.tensor(ids), torch.zeros(len(ids))
    state["sparse_position"][2:4] = torch.tensor([len(ids), sum(place * id**2 for place, id in enumerate(ids, 1))])


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda state: state["sparse_ids"].copy_(torch.tensor([4, 9])), "not those that were saved"),
        (lambda state: state["sparse_position"].__setitem__(2, 3), "do not agree"),
        (lambda state: state.update(sparse_base=torch.zeros(3)), "do not agree"),
        (lambda state: state.update(sparse_ids=torch.zeros(2)), "whole numbers"),
        (lambda state: state.update(sparse_position=torch.zeros(3).long()), "whole numbers"),
        (lambda state: write_ids(state, 2, 2), "the same one twice.*load another one"),
        (lambda state: write_ids(state, 2, 15), "lie beyond this model's candidates"),
        (lambda state: write_ids(state, 0, 1, 2), "more than 2 unmasked entries"),
        *((lambda state, name=name: state.pop(name), f"lacks `{name}`") for name in BUFFERS),
        (lambda state: state.update(sparse_slots=torch.zeros(2)), "saved by an earlier version.*go on from it"),
    ],
)
def test_entries_that_make_no_sense_are_refused_and_the_model_stays_as_it_is(write, problem):
    model = sparsify(nn.Linear(4, 3), 2, strategy="pafi")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = copy.deepcopy(before)
    write(state)
    state["weight"] += 1
    with pytest.raises(SparsifyError, match=problem):
        model.load_state_dict(state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model.load_state_dict(before)
