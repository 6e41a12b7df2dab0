"""One tensor's indices, slots and base values."""

import copy

import pytest
import torch
from recorder import Recorder
from torch import nn

from sparsify.masked.tensor import MaskedTensor, tensor_of

ROWS, COLS = 5, 3


@pytest.fixture
def tensor():
    """The weight of a linear layer with two unmasked entries."""
    torch.manual_seed(0)
    owner, collector = nn.Linear(COLS, ROWS), Recorder()
    collector.buffers.register(1, 10, owner.weight.dtype, owner.weight.device)
    tensor = MaskedTensor(0, owner, "weight", "layer.weight", 0, collector)
    assert tensor.count == 0
    indices = torch.tensor([7, 2])
    collector.buffers.append([2], indices, torch.tensor([1, 0]), owner.weight.detach().take(indices))
    collector.values = torch.tensor([0.5, -0.25])
    return tensor


def test_values_are_written_at_the_indices_and_nowhere_else(tensor):
    expected = tensor.owner.to(torch.bfloat16).weight.detach().clone()
    tensor.write(torch.tensor([1 + 2.0**-8 + 2.0**-12, 3.0]))  # rounded once: 1 + 2^-8 alone would be a tie
    expected.view(-1)[7], expected.view(-1)[2] = 1 + 2.0**-7, 3
    assert torch.equal(tensor.parameter, expected)


def test_a_handle_is_that_of_one_living_tensor(tensor):
    twin = copy.deepcopy(tensor)
    assert tensor_of(tensor.handle) is tensor
    assert tensor_of(twin.handle) is twin
    handle = twin.handle
    del twin
    with pytest.raises(KeyError):
        tensor_of(handle)
