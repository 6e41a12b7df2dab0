"""The unmasked entries of many tensors in flat buffers."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparsify import SparsifyError, sparsify
from sparsify.core.entries import BASE, BUFFERS, PER_ENTRY, IndexBuffers, padded, problem_with

CPU, CAPACITY = torch.device("cpu"), 60


def filled(additions):
    """Buffers of three tensors after some additions, each the number of entries for each tensor; and what went in."""
    root = nn.Module()
    buffers, expected = IndexBuffers(root), [[], [], []]
    buffers.register(3, CAPACITY, torch.float32, CPU)
    slot = 0
    for sizes in additions:
        total = sum(sizes)
        slots = torch.arange(slot, slot + total)
        indices = slots * 37 % 100  # all distinct
        base = torch.randn(total)
        buffers.append(sizes, indices, slots, base)
        slot += total
        for own, *parts in zip(expected, *(part.split(sizes) for part in (indices, slots, base)), strict=True):
            own.extend(zip(*(part.tolist() for part in parts), strict=True))
    return root, buffers, expected


@settings(max_examples=50)
@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3).map(list), max_size=5))
def test_each_tensor_keeps_its_entries_in_the_order_in_which_they_came(additions):
    _, buffers, expected = filled(additions)
    assert buffers.total == sum(map(sum, additions)) == buffers.slots().numel()
    for number, own in enumerate(expected):
        assert buffers.count(number) == len(own)
        parts = (buffers.indices(number), buffers.slots(number), buffers.base(number))
        assert list(zip(*(part.tolist() for part in parts), strict=True)) == own
    assert [part.numel() for part in buffers.split(buffers.base())] == [len(own) for own in expected]


def test_the_buffers_are_the_roots_and_go_where_it_goes():
    root, buffers, _ = filled([[1, 0, 2]])
    assert tuple(root.state_dict()) == BUFFERS
    assert buffers.nbytes == 3 * 8 + CAPACITY * (8 + 8 + 4)
    root.to(torch.float64)
    assert buffers.base(0).dtype == torch.float64
    assert buffers.indices(0).dtype == buffers.slots(0).dtype == torch.int64
    assert copy.deepcopy(buffers).base(2).tolist() == buffers.base(2).tolist()
    buffers.remove()
    assert not root.state_dict()


@pytest.mark.parametrize("cut", [False, True])
def test_a_state_dict_with_other_entries_can_be_loaded(cut):
    source, _, expected = filled([[1, 0, 2], [0, 1, 1]])
    root, buffers, _ = filled([[2, 2, 2]])
    state = source.state_dict()
    if cut:  # as in a trained state, or of an older version
        state.update({name: state[name][:5].int() if name != BASE else state[name][:5] for name in PER_ENTRY})
    assert problem_with(state, [100] * 3, capacity=5) is None
    root.load_state_dict(state | padded(state, CAPACITY))
    buffers.loaded()
    assert buffers.indices(2).tolist() == [index for index, _, _ in expected[2]]


def test_buffers_that_were_copied_into_are_noticed():
    source, _, _ = filled([[1, 0, 2]])
    root, buffers, _ = filled([[2, 0, 0]])
    assert not buffers.have_changed()
    for buffer in root.buffers():
        buffer.copy_(buffer.clone())
    assert not buffers.have_changed()
    for own, other in zip(root.buffers(), source.buffers(), strict=True):
        own.copy_(other)
    assert buffers.have_changed()
    buffers.loaded()
    assert not buffers.have_changed()
    assert [buffers.count(number) for number in range(3)] == [1, 0, 2]


def check(state, sizes=(100, 100, 100), capacity=9):
    return problem_with(state, sizes, capacity)


def test_an_index_is_checked_against_its_own_tensor():
    root, buffers, _ = filled([[1, 1, 0]])
    buffers.indices(0).fill_(50)
    buffers.indices(1).fill_(3)
    assert check(root.state_dict(), [51, 4, 1]) is None
    for sizes in ([51, 3, 1], [50, 4, 1]):
        assert "point beyond their tensors" in check(root.state_dict(), sizes)


def test_counts_that_do_not_fit_the_entries_are_refused():
    state = filled([[1, 1, 0]])[0].state_dict()
    for counts in ([-1, 1, 0], [CAPACITY, 1, 0], [2**62, 2**62, 2**63 - 1], [2**62, 2**62, 3]):
        assert "do not agree" in check(state | {"sparse_counts": torch.tensor(counts)})
    assert "are not all of whole numbers" in check(state | {"sparse_counts": torch.tensor([1.0, 1.0, 1.0])})


@pytest.mark.parametrize("slots", [[0, 1, 2, 2], [0, 1, 2, 4], [-1, 0, 1, 2], [0, 0, 0, 0], [1, 2, 3, 4]])
def test_each_entry_is_there_once_and_has_a_slot_of_its_own_and_none_is_left_for_a_later_one(slots):
    root, buffers, _ = filled([[2, 2, 0]])
    buffers.indices().copy_(torch.tensor([7, 3, 3, 7]))
    buffers.slots().copy_(torch.tensor([3, 0, 2, 1]))
    assert check(root.state_dict()) is None
    assert "has room for" in check(root.state_dict(), capacity=3)
    buffers.slots().copy_(torch.tensor(slots))
    assert "hold one slot of the flat delta twice, or leave one out" in check(root.state_dict())
    buffers.indices(1).fill_(3)
    assert "the same entry of a tensor twice" in check(root.state_dict())


@pytest.mark.parametrize("name", BUFFERS)
def test_all_buffers_or_none(name):
    state = filled([[1, 1, 0]])[0].state_dict()
    del state[name]
    assert check(state).startswith(f"index buffers are missing: {name}; expected")


@pytest.mark.parametrize("name", ["sparse_slots", "sparse_indices"])
def test_a_damaged_state_dict_is_refused_and_the_model_stays_as_it_is(name):
    model = sparsify(nn.Linear(4, 3), 5, strategy="pafi")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = copy.deepcopy(before)
    state[name][1] = state[name][0]
    state["weight"] += 1
    with pytest.raises(SparsifyError, match=r"the state dict is damaged, load another one"):
        model.load_state_dict(state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model.load_state_dict(before)
