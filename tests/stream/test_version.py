"""Two versions of a model in training: what changed from one to the other, as a stream and as patches send it."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from sparsify.stream.version import TrainedEntries, Version, changed_entries, difference

SIZE = 40  # of each tensor
FIXED = (SIZE,), torch.bfloat16, "replace", None


def make_version(order, values, unmasked):
    """The first ``unmasked`` entries of an order of (tensor, position), with their values; all are 0 in the base."""
    tensors = {}
    for name in sorted({name for name, _ in order[:unmasked]}):
        slots = torch.tensor([slot for slot, (owner, _) in enumerate(order[:unmasked]) if owner == name])
        indices, by_position = torch.tensor([order[slot][1] for slot in slots]).sort()
        base, own = torch.zeros(len(slots)), torch.tensor(values)[slots[by_position]]
        tensors[name] = TrainedEntries(*FIXED, indices, base.bfloat16(), own.bfloat16())
    return Version(tensors, {}, {})


def as_dense(version, tensors=()):
    dense = {name: torch.zeros(SIZE, dtype=torch.bfloat16) for name in "ab"}
    for parts in (version.tensors, dict(tensors)):
        for name, part in parts.items():
            dense[name][part.indices] = part.values
    return dense


places = st.tuples(st.sampled_from("ab"), st.integers(0, SIZE - 1))


@given(st.lists(places, min_size=1, max_size=30, unique=True), st.data())
def test_a_difference_has_new_entries_once_and_otherwise_values(order, data):
    before, after = sorted(data.draw(st.lists(st.integers(0, len(order)), min_size=2, max_size=2)))
    old_values, new_values = (data.draw(st.lists(st.integers(1, 3), min_size=30, max_size=30)) for _ in range(2))
    old, new = make_version(order, old_values, before), make_version(order, new_values, after)
    changes = difference(old, new)
    found = {(name, index) for name, part in changes.tensors.items() for index in part.indices.tolist()}
    assert found == set(order[before:after])
    known = [(name, index) for name, part in old.tensors.items() for index in part.indices.tolist()]
    expected = [new_values[order.index(place)] for place in known]
    differ = [place for place in known if old_values[order.index(place)] != new_values[order.index(place)]]
    if changes.known:
        sent = changes.known[torch.bfloat16]
        where = range(len(known)) if sent.places is None else sent.places.tolist()
        assert sent.values.tolist() == [expected[number] for number in where]
        assert {known[number] for number in where} >= set(differ)
    else:
        assert not differ
    patches = changed_entries(old, new)
    assert {(name, index) for name, part in patches.items() for index in part.indices.tolist()} == found | set(differ)
    assert_equal(as_dense(old, patches), as_dense(new))


@given(*[st.lists(places, min_size=1, max_size=20, unique=True)] * 2)
def test_where_an_entry_left_there_is_no_difference_and_patches_revert_it(first, second):
    old = make_version(first, [1] * 20, len(first))
    new = make_version(second, [2] * 20, len(second))
    assert (difference(old, new) is None) == (not set(first) <= set(second))
    assert_equal(as_dense(old, changed_entries(old, new)), as_dense(new))


def assert_equal(one, other):
    assert all(torch.equal(one[name], other[name]) for name in one)
