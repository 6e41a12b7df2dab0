"""The forward passes of the root: small vectors share a node, and on a GPU so do neighbouring small matrices."""

import copy

import pytest
import torch
from models import run_steps
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


BATCH = torch.randn(5, 8, generator=seeded(1))
GPU = ("cpu",)  # the CPU is treated as a GPU is


def nodes(output, kind="Taps"):
    """How many nodes of a kind a graph has."""
    waiting, found = [output.grad_fn], {output.grad_fn}
    for node in waiting:
        new = {each for each, _ in node.next_functions if each is not None} - found
        found |= new
        waiting += new
    return sum(kind in node.name() for node in found)


@pytest.mark.parametrize(("ahead", "limits", "shared", "own"), [
    ((), {}, 1, 3),  # all biases and norms have one node, each layer has its own
    ((), {"LARGEST": 7}, 6, 3),  # and so has a norm's vector that is long; a long bias has it with its weight
    (GPU, {"AT_ONCE": 2 * 64 + 24}, 1 + 2, 0),  # on a GPU two neighbouring matrices, and the third
    (GPU, {"LARGEST_AHEAD": 63}, 1, 3),
])  # fmt: skip
def test_small_tensors_share_nodes_and_on_a_gpu_matrices_that_are_near(ahead, limits, shared, own, monkeypatch):
    monkeypatch.setattr("sparsify.core.devices.AHEAD", ahead)
    for name, limit in limits.items():
        monkeypatch.setattr(f"sparsify.selection.joined.{name}", limit)
    model = sparsify(Blocks(), 40, "id3", steps=4)
    output = model(BATCH)
    assert (nodes(output), nodes(output, "_Linear")) == (shared, own)
    assert nodes(output + model(BATCH)) == 2 * shared


@pytest.mark.parametrize("largest", [0, 45], ids=["an input made again", "an input that is kept"])
def test_on_a_gpu_a_weight_that_was_written_to_after_forward_is_refused_as_elsewhere(largest, monkeypatch):
    monkeypatch.setattr("sparsify.core.devices.AHEAD", GPU)
    monkeypatch.setattr("sparsify.masked.recompute.LARGEST_KEPT", largest)
    model = sparsify(nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 4)), 20, "id3", steps=4)
    loss = model(torch.randn(5, 4, generator=seeded(1))).sum()
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|has been modified inplace"):
        loss.backward()


def checkpointed(block, x):
    return checkpoint(block, x, use_reentrant=False)


RUNS = {
    "checkpointed": checkpointed,
    "and checkpointed": lambda block, x: checkpointed(block, block(x)),
    "checkpointed first": lambda block, x: block(checkpointed(block, x)),
    "twice": lambda block, x: block(block(x)),
    "without gradients": torch.no_grad()(lambda block, x: block(x)),
    "functional": lambda block, x: torch.func.functional_call(block, {"1.bias": torch.zeros(8)}, (x,)),
    "in half of the dtype": lambda block, x: torch.autocast("cpu", torch.bfloat16)(block)(x).float(),
}


def assert_trains_as_with_own_nodes(blocks, inputs, monkeypatch, ahead, largest):
    """Three steps, of a loss over a forward pass for each of the inputs (n, 5, 8), in both ways."""
    monkeypatch.setattr("sparsify.core.devices.AHEAD", ahead)
    monkeypatch.setattr("sparsify.selection.joined.LARGEST", largest)  # entries of a tensor that waits for the end
    outcomes = []
    for own_nodes in (False, True):
        model = sparsify(copy.deepcopy(blocks), 60, "id3", steps=4)
        if own_nodes:
            get_engine(model).shared_tap = lambda tensor: None
        run_steps(
            model, [inputs] * 3, loss_of=lambda model, inputs: sum(model(x).float().square().mean() for x in inputs)
        )
        outcomes.append((unmasked_sets(model), model.state_dict()))
    assert outcomes[0][0] == outcomes[1][0]
    torch.testing.assert_close(outcomes[0][1], outcomes[1][1])


ways = pytest.mark.parametrize(("ahead", "largest"), [((), 64), (GPU, 64), (GPU, 8)], ids=["CPU", "GPU", "large"])


@ways
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_however_a_part_runs_its_parameters_train_as_with_nodes_of_their_own(run, ahead, largest, monkeypatch):
    assert_trains_as_with_own_nodes(Blocks(run), BATCH[None], monkeypatch, ahead, largest)


@ways
def test_forward_passes_of_one_loss_train_as_with_nodes_of_their_own(ahead, largest, monkeypatch):
    assert_trains_as_with_own_nodes(Blocks(), torch.stack([BATCH, -2 * BATCH]), monkeypatch, ahead, largest)


@ways
def test_matrices_alone_train_as_with_nodes_of_their_own(ahead, largest, monkeypatch):
    blocks = Blocks()
    for block in blocks:
        block[0].bias, block[1] = None, nn.Tanh()  # the pass has nothing that waits for its end
    assert_trains_as_with_own_nodes(blocks, BATCH[None], monkeypatch, ahead, largest)


def test_a_part_that_is_called_by_itself_has_nodes_of_its_own():
    model = sparsify(Blocks(), 40, "id3", steps=4)
    loss = model[1](torch.ones(2, 8)).square().sum()
    assert nodes(loss) == 2  # the norm's weight and bias
    loss.backward()
    assert get_engine(model).unmasked == 10
