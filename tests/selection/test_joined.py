"""Small tensors' gradients are kept to the end; tensors that get none, small ones and large ones, unmask no entry."""

import pytest
import torch
from models import descend
from products import seeded
from torch import nn

from sparsify import D3, Increment, Magnitude, Repeat, Strategy, get_engine, sparsify
from sparsify.core.gradients import DenseGradient
from sparsify.selection.joined import JoiningPass, Span

pytestmark = pytest.mark.usefixtures("device")
SELECTIONS = [Increment(), Increment(select="first"), Increment(allocation={"0": 9}), Repeat()]


def test_a_gradient_that_waits_has_memory_of_its_own():
    waiting, span = JoiningPass(None), Span()
    near, _ = get_engine(sparsify(nn.Linear(3, 2), 4, "random")).tensors
    model = sparsify(nn.LayerNorm(4), 8, "random")
    grads = {tensor: torch.ones(4) for tensor in get_engine(model).tensors}
    waiting.hold(grads)  # of one node
    for tensor, grad in grads.items():  # of a node each
        waiting.hold({tensor: grad})
    grads[near] = torch.ones(2, 3)
    span.take(near, DenseGradient(grads[near], owned=False))
    for grad in grads.values():
        grad.zero_()  # as another backward may, or a compiled graph, which uses its buffers again
    waiting.settle_rest()
    assert torch.cat([values for _, values in waiting.taken]).tolist() == [2.0] * 8
    assert span.values.all()


def test_neighbours_are_joined_in_order_with_zeros_for_what_lies_between_them(monkeypatch):
    monkeypatch.setattr("sparsify.selection.joined.AT_ONCE", 20)
    model = sparsify(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4), nn.Linear(4, 9)), 30, "random")
    first, bias, second, *_, far, _ = get_engine(model).tensors
    span, values = Span(), {tensor: torch.randn(tensor.shape) for tensor in (second, first)}
    for tensor, own in values.items():  # as in backward, from the last one on
        assert span.take(tensor, DenseGradient(own))
    assert not span.take(far, DenseGradient(torch.ones(9, 4)))
    assert span.values.equal(torch.cat([values[first].flatten(), torch.zeros(2), values[second].flatten()]))
    weights, grads, start, ids = span.entries(torch.empty(0, dtype=torch.int64))
    assert ids is None
    assert grads.equal(span.values)
    for tensor in (first, second):
        assert weights[tensor.offset - start :][: tensor.numel].equal(tensor.weight.flatten())
    slots, places = span.unmasked
    expected = {slot: int(id) for slot, id in enumerate(get_engine(model).entries.ids) if id < span.values.numel()}
    assert dict(zip(slots.tolist(), (places + start).tolist(), strict=True)) == expected
    assert any(bias.offset <= id < second.offset for id in expected.values()), "a test of what lies between"


class Routed(nn.ModuleList):
    """Two experts, the second of which gets no tokens."""

    def forward(self, x):
        return sum(expert(tokens).sum() for expert, tokens in zip(self, (x, x[:0]), strict=True))


@pytest.mark.parametrize("cols", [4, 200], ids=["small tensors", "large tensors"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_of_an_expert_that_gets_no_tokens_nothing_is_unmasked(selection, cols):
    model = sparsify(Routed([nn.Linear(cols, 100), nn.Linear(cols, 100)]), 40, Strategy(D3(), selection), steps=2)
    descend(model, [torch.randn(3, cols, generator=seeded(seed)) for seed in range(2)])
    counts = {tensor.name: tensor.count for tensor in get_engine(model).tensors}
    assert counts["1.weight"] == counts["1.bias"] == 0
    assert sum(counts.values()) >= 9


def test_an_expert_that_gets_no_tokens_keeps_its_values_where_the_weights_alone_choose():
    model = sparsify(Routed([nn.Linear(4, 9), nn.Linear(4, 9)]), 40, Strategy(Magnitude(), Increment()), steps=1)
    before = model[1].weight.detach().clone()
    descend(model, [torch.ones(3, 4)])
    assert model[1].indices.numel()
    assert model[1].weight.equal(before)
