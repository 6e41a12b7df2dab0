"""The forward passes of the root: small vectors are tapped by one node, which gives each of them its own gradient."""

import pytest
import torch
from models import descend
from oracle import unmasked_sets
from products import seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

from sparsify import get_engine, sparsify


class Blocks(nn.ModuleList):
    """Layers and norms, three of each; the second ``part`` is run as the caller says."""

    def __init__(self, run=lambda block, x: block(x)):
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))
        self.run = run

    def forward(self, x):
        return self[2](self.run(self[1], self[0](x)))


def taps(output):
    """How many nodes of taps a graph has."""
    nodes, found = [output.grad_fn], set()
    for node in nodes:
        new = [each for each, _ in node.next_functions if each is not None and each not in found]
        found.update(new)
        nodes += new
    return sum("Tap" in node.name() for node in found)


def test_all_biases_and_norms_of_a_forward_have_one_node():
    model = sparsify(Blocks(), 40, "id3", steps=4)
    x = torch.randn(5, 8, generator=seeded(1))
    assert taps(model(x)) == 1
    assert taps(model(x) + model(x)) == 2


RUNS = {
    "checkpointed": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "twice": lambda block, x: block(block(x)),
    "without gradients": torch.no_grad()(lambda block, x: block(x)),
    "functional": lambda block, x: torch.func.functional_call(block, {"1.bias": torch.zeros(8)}, (x,)),
    "in half of the dtype": lambda block, x: torch.autocast("cpu", torch.bfloat16)(block)(x).float(),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_however_a_part_runs_its_vectors_train_as_with_nodes_of_their_own(run, monkeypatch):
    outcomes = []
    for own_nodes in (False, True):
        model = sparsify(Blocks(run), 60, "id3", steps=4)
        if own_nodes:
            monkeypatch.setattr(type(get_engine(model)), "shared_tap", lambda self, tensor: None)
        descend(model, [torch.randn(5, 8, generator=seeded(seed)) for seed in range(4)])
        outcomes.append((unmasked_sets(model), model.state_dict()))
    assert outcomes[0][0] == outcomes[1][0]
    torch.testing.assert_close(outcomes[0][1], outcomes[1][1])


def test_a_vector_of_odd_size_leaves_the_others_aligned():
    model = sparsify(nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8), nn.LayerNorm(8)), 9, "id3", steps=4)
    assert [tensor.name for tensor in get_engine(model).vectors] == ["1.bias", "2.weight", "2.bias", "0.bias"]


def test_a_part_that_is_called_by_itself_has_nodes_of_its_own():
    model = sparsify(Blocks(), 40, "id3", steps=4)
    loss = model[1](torch.ones(2, 8)).square().sum()
    assert taps(loss) == 2  # the norm's weight and bias
    loss.backward()
    assert get_engine(model).unmasked == 10
