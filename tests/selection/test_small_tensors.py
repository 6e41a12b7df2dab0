"""Small tensors' gradients, looked at together, show the topk what each by itself would have."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import seeded
from recorder import mask, unmask
from torch import nn

from sparsify import D3, Increment, Magnitude, Repeat, Strategy, get_engine, sparsify
from sparsify.core.gradients import DenseGradient
from sparsify.core.topk import TopK
from sparsify.selection.screening import StreamingSelector, Work
from sparsify.selection.small import SmallGradients

pytestmark = pytest.mark.usefixtures("device")
IMPORTANCE = D3(exp=1)
SELECTIONS = [Increment(), Increment(select="first"), Increment(allocation={"0": 9}), Repeat()]


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


def gradients(tensors, seed):
    generator = seeded(seed)
    return [DenseGradient(torch.randn(tensor.matrix.shape, generator=generator)) for tensor in tensors]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 999), size=st.integers(1, 12), masked_only=st.booleans(),
    unmasked=st.tuples(*(st.lists(st.integers(0, n - 1), unique=True) for n in (6, 5, 8))),
)  # fmt: skip
def test_the_topk_sees_what_each_tensor_by_itself_would_have_shown_it(seed, size, masked_only, unmasked):
    tensors = small_tensors(unmasked)
    shared, grads, small, work = gradients(tensors, seed), gradients(tensors, seed), SmallGradients(), Work()
    alone, together = (TopK(size, torch.float32, torch.get_default_device()) for _ in range(2))
    for tensor, gradient in zip(tensors, shared, strict=True):
        small.add(tensor, DenseGradient(gradient.values, owned=False))
    StreamingSelector(together, IMPORTANCE, work, masked_only).offer_small([small])
    assert work == Work(dense=small.numel)
    assert all(torch.equal(own.values, one.values) for own, one in zip(shared, grads, strict=True)), "not written to"
    for gradient in shared:
        gradient.values.zero_()  # as another backward may
    taken = [gradient.take(tensor.indices) for tensor, gradient in zip(tensors, grads, strict=True)]
    assert torch.equal(small.take([tensor.indices for tensor in tensors]), torch.cat(taken))
    for tensor, gradient in zip(tensors, grads, strict=True):
        gradient.clear(tensor.not_candidates if masked_only else tensor.never_candidates)
        alone.offer(IMPORTANCE, tensor.matrix, gradient.values, None, tensor.offset)
    assert together.finite
    assert together.winners().ids.tolist() == alone.winners().ids.tolist()
    assert torch.equal(together.winners().grads, alone.winners().grads)


class Routed(nn.ModuleList):
    """Two experts, the second of which gets no tokens."""

    def forward(self, x):
        return sum(expert(tokens).sum() for expert, tokens in zip(self, (x, x[:0]), strict=True))


@pytest.mark.parametrize("cols", [4, 200], ids=["small tensors", "large tensors"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_of_an_expert_that_gets_no_tokens_nothing_is_unmasked(selection, cols):
    model = sparsify(Routed([nn.Linear(cols, 100), nn.Linear(cols, 100)]), 40, Strategy(D3(), selection), steps=2)
    optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
    for seed in range(2):
        model(torch.randn(3, cols, generator=seeded(seed))).backward()
        optimizer.step()
        optimizer.zero_grad()
    counts = {tensor.name: tensor.count for tensor in get_engine(model).tensors}
    assert counts["1.weight"] == counts["1.bias"] == 0
    assert sum(counts.values()) >= 9


def test_an_expert_that_gets_no_tokens_keeps_its_values_where_the_weights_alone_choose():
    model = sparsify(Routed([nn.Linear(4, 9), nn.Linear(4, 9)]), 40, Strategy(Magnitude(), Increment()), steps=1)
    before = model[1].weight.detach().clone()
    model(torch.ones(3, 4)).backward()
    torch.optim.SGD([model.sparse_values], lr=0.1).step()
    assert model[1].indices.numel()
    assert model[1].weight.equal(before)
