"""Entries: in order of unmasking in the state, by tensor and index in the view, and what is wrong with damaged ones."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparsify import SparsifyError, sparsify
from sparsify.core.entries import BUFFERS, count_by_tensor
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


def state_of(entries):
    return {name: buffer.clone() for name, buffer in entries.root.named_buffers()}


def write_ids(state, first, second):
    state["sparse_ids"][:2] = torch.tensor([first, second])
    state["sparse_position"][3] = first**2 + 2 * second**2


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda state: state["sparse_ids"].__setitem__(0, 4), "not those that were saved"),
        (lambda state: state["sparse_position"].__setitem__(2, 13), "do not agree"),
        (lambda state: state["sparse_position"].__setitem__(2, -1), "do not agree"),
        (lambda state: state.update(sparse_base=torch.zeros(3)), "do not agree"),
        (lambda state: state.update(sparse_ids=torch.zeros(CAPACITY)), "whole numbers"),
        (lambda state: state.update(sparse_position=torch.zeros(3).long()), "whole numbers"),
        (lambda state: write_ids(state, 2, 2), "the same one twice"),
        (lambda state: write_ids(state, -1, 2), "lie beyond this model's candidates"),
        (lambda state: write_ids(state, 2, sum(SIZES)), "lie beyond this model's candidates"),
    ],
)
def test_entries_that_make_no_sense_are_refused(write, problem):
    entries = filled([3, 17])
    state = state_of(entries)
    assert entries.problem(state) is None
    write(state)
    assert problem in entries.problem(state)


def test_entries_without_room_for_them_are_refused():
    state = state_of(filled(list(range(10))))
    small = Entries(nn.Module(), SIZES)
    small.register(4, torch.float32, torch.float32, torch.device("cpu"))
    assert "more than 4 unmasked entries" in small.problem(state)


@pytest.mark.parametrize("name", [*BUFFERS, None])
def test_a_damaged_state_dict_is_refused_and_the_model_stays_as_it_is(name):
    model = sparsify(nn.Linear(4, 3), 5, strategy="pafi")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = copy.deepcopy(before)
    if name is None:
        state["sparse_ids"][1] = state["sparse_ids"][0]
    else:
        del state[name]
    state["weight"] += 1
    with pytest.raises(SparsifyError, match=r"load another state dict|lacks `sparse_"):
        model.load_state_dict(state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model.load_state_dict(before)


def test_a_state_of_an_earlier_version_is_refused_with_what_to_do():
    model = sparsify(nn.Linear(4, 3), 5, strategy="pafi")
    with pytest.raises(SparsifyError, match=r"saved by an earlier version.*go on from it"):
        model.load_state_dict({**model.state_dict(), "sparse_slots": torch.zeros(5).long()})
