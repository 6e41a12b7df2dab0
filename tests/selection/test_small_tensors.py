"""Small tensors' gradients are kept to the end; tensors that get none, small ones and large ones, unmask no entry."""

import pytest
import torch
from models import descend
from products import seeded
from torch import nn

from sparsify import D3, Increment, Magnitude, Repeat, Strategy, get_engine, sparsify
from sparsify.core.gradients import DenseGradient
from sparsify.selection.small import SmallGradients

pytestmark = pytest.mark.usefixtures("device")
SELECTIONS = [Increment(), Increment(select="first"), Increment(allocation={"0": 9}), Repeat()]


def test_a_gradient_is_kept_in_memory_of_its_own():
    (tensor, _), values = get_engine(sparsify(nn.Linear(3, 2), 4, "random")).tensors, torch.ones(2, 3)
    small = SmallGradients()
    small.add([(tensor, DenseGradient(values, owned=False))])
    values.zero_()  # as another backward may
    assert small.joined.all()


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
