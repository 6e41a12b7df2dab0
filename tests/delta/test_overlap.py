"""What two deltas have in common, against the same on dense vectors."""

import math

import pytest
import torch
from deltas import make_base, task
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsify import SparseDelta, overlap
from sparsify.errors import BaseMismatchError, SparsifyError

PROPERTY = settings(max_examples=40)


def dense(base, delta):
    before = torch.nn.utils.parameters_to_vector(base.parameters()).detach()
    with delta.applied(base):
        change = torch.nn.utils.parameters_to_vector(base.parameters()).detach() - before
    masks = {name: torch.zeros(parameter.numel(), dtype=torch.bool) for name, parameter in base.named_parameters()}
    for name, part in delta.tensors.items():
        masks[name][part.indices] = True
    return change, torch.cat([*masks.values()])


@PROPERTY
@given(st.integers(0, 20), st.floats(0.2, 0.9))
def test_counts_and_cosine_are_those_of_the_dense_changes(seed, share):
    base = make_base(torch.float64)
    a, b = task(base, 2 * seed, share), task(base, 2 * seed + 1, share)
    (left, in_a), (right, in_b) = dense(base, a), dense(base, b)
    both = in_a & in_b
    found = overlap(a, b, base)
    assert found.shared == int(both.sum()) == sum(found.by_tensor.values())
    assert found.union == int((in_a | in_b).sum())
    assert found.jaccard == pytest.approx(found.shared / found.union)
    assert found.opposed == int((left * right < 0)[both].sum())
    expected = torch.nn.functional.cosine_similarity(left[both], right[both], dim=0) if found.shared else math.nan
    assert found.cosine == pytest.approx(float(expected), nan_ok=True)


def test_without_a_base_only_places_are_compared():
    base = make_base()
    found = overlap(task(base, 1), task(base, 1))
    assert (found.jaccard, found.cosine, found.opposed) == (1.0, None, None)
    assert str(found) == f"{found.shared} of {found.shared} entries shared (Jaccard 1.0000)"


def test_heads_that_disagree_are_named():
    base = make_base()
    a, same, b = (SparseDelta({}, {"2.weight": torch.full((3, 5), value)}) for value in (1.0, 1.0, 2.0))
    assert overlap(a, same).conflicting_whole == ()
    found = overlap(a, b, base)
    assert found.conflicting_whole == ("2.weight",)
    assert found.jaccard == 0.0
    assert "stored whole by both, and different: 2.weight" in str(found)
    biases = torch.zeros(3), torch.zeros(3).half(), torch.full((3,), math.nan)
    zero, other, nan = (SparseDelta({}, {"2.bias": bias}) for bias in biases)
    assert overlap(zero, other).conflicting_whole == ("2.bias",)
    assert overlap(nan, nan).conflicting_whole == ()
    assert str(overlap(zero, zero, base)) == "0 of 0 entries shared (Jaccard 0.0000)"


def test_deltas_of_different_models_are_refused():
    base, other = make_base(), torch.nn.Sequential(torch.nn.Linear(2, 5))
    with pytest.raises(SparsifyError, match=r"`0.weight` has shape \(5, 6\) in one delta and \(5, 2\) in the other"):
        overlap(task(base, 1), task(other, 1, 0.9))
    with pytest.raises(BaseMismatchError, match="does not hold the values"):
        overlap(task(base, 1), task(base, 2), make_base(seed=3))
    with pytest.raises(BaseMismatchError, match=r"the model has no tensor `0.weight`"):
        overlap(task(base, 1), task(base, 1), torch.nn.Linear(1, 1))
