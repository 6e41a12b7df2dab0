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
    assert work == Work(dense=small.numel)


def test_the_unmasked_entries_come_tensor_by_tensor_by_index_in_the_longest_dtype():
    tensors = small_tensors([[5, 0], [4], [2]])
    grads = gradients(tensors)
    grads[1] = DenseGradient(grads[1].values.bfloat16())
    weight, bias, table = (gradient.values.reshape(-1) for gradient in grads)
    taken = kept(tensors, grads).take()
    assert taken.tolist() == [weight[0], weight[5], bias[4], table[2]]
    assert taken.dtype == torch.float32


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


def test_a_number_that_is_not_finite_is_noticed():
    tensors = small_tensors([[], [3], []])
    grads = gradients(tensors)
    grads[1].values.view(-1)[0] = torch.nan
    topk = topk_of(3)
    offer(kept(tensors, grads), topk)
    assert not topk.finite


def test_rows_that_a_batch_used_are_taken_as_a_whole_gradient():
    tensors = small_tensors([[], [], [6, 1]])
    rows = DenseGradient(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 3]))
    small = kept(tensors[2:], [rows])
    assert small.take().tolist() == [2.0, 3.0]
    weight, grad, ids = small.entries([tensors[2].never_candidates])
    assert grad.tolist() == [1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 3.0, 4.0]
    assert torch.equal(weight, tensors[2].weight.flatten())
    assert ids.tolist() == list(range(300, 308))
