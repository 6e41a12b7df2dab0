"""Small tensors' gradients, looked at together, show the topk what each by itself would have."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import seeded
from recorder import mask, unmask
from torch import nn

from sparsify import D3
from sparsify.core.gradients import DenseGradient
from sparsify.core.topk import TopK
from sparsify.selection.screening import StreamingSelector, Work
from sparsify.selection.small import SmallGradients

pytestmark = pytest.mark.usefixtures("device")
IMPORTANCE = D3(exp=1)


def small_tensors(unmasked):
    """A weight (2, 3) with global ids from 100, a bias (5,) from 200 and a table (4, 2) from 300 with a padding row."""
    modules = [nn.Linear(3, 2, bias=False), nn.BatchNorm1d(5), nn.Embedding(4, 2, padding_idx=1)]
    tensors = []
    for module, attribute, indices in zip(modules, ["weight", "bias", "weight"], unmasked, strict=True):
        tensor = mask(module, attribute)[1][attribute]
        tensor.offset = 100 * len(tensors) + 100
        unmask(tensor, torch.tensor(indices).long(), torch.zeros(len(indices)))
        tensors.append(tensor)
    return tensors


def gradients(tensors, seed=0):
    generator = seeded(seed)
    return [DenseGradient(torch.randn(tensor.matrix.shape, generator=generator)) for tensor in tensors]


def kept(tensors, grads):
    small = SmallGradients()
    for tensor, gradient in zip(tensors, grads, strict=True):
        small.add(tensor, gradient)
    return small


def topk_of(size):
    return TopK(size, torch.float32, torch.get_default_device())


def offer(small, topk, masked_only=True):
    work = Work()
    StreamingSelector(topk, IMPORTANCE, work, masked_only).offer_small(small)
    assert work == Work(dense=sum(small.sizes))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 999), size=st.integers(1, 12), masked_only=st.booleans(),
    unmasked=st.tuples(*(st.lists(st.integers(0, n - 1), unique=True) for n in (6, 5, 8))),
)  # fmt: skip
def test_the_topk_sees_what_each_tensor_by_itself_would_have_shown_it(seed, size, masked_only, unmasked):
    tensors, alone, together = small_tensors(unmasked), topk_of(size), topk_of(size)
    offer(kept(tensors, gradients(tensors, seed)), together, masked_only)
    for tensor, gradient in zip(tensors, gradients(tensors, seed), strict=True):
        gradient.clear(tensor.not_candidates if masked_only else tensor.never_candidates)
        alone.offer(IMPORTANCE, tensor.matrix, gradient.values, None, tensor.offset)
    assert together.finite
    assert together.winners().ids.tolist() == alone.winners().ids.tolist()
    assert torch.equal(together.winners().grads, alone.winners().grads)


def test_gradients_are_not_written_to_and_are_kept_when_others_write_into_them():
    tensors, memory = small_tensors([[1], [0], [2]]), gradients(small_tensors([[1], [0], [2]]))
    small = kept(tensors, [DenseGradient(own.values, owned=False) for own in memory])
    offer(small, topk_of(3))
    assert all(torch.equal(*(one.values for one in pair)) for pair in zip(memory, gradients(tensors), strict=True))
    for own in memory:
        own.values.zero_()
    assert torch.equal(small.take(), kept(tensors, gradients(tensors)).take())
