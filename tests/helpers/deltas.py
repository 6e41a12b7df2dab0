"""Small models, fine-tunings of them, and what a model holds to the bit: shared by the tests of deltas."""

import copy
from contextlib import contextmanager

import torch
from torch import nn

from sparsify.common.raw_bits import digest
from sparsify.delta.sparse_delta import SparseDelta


def make_base(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(dtype)


def fine_tuned(base, seed, share=0.3):
    generator = torch.Generator().manual_seed(seed)
    tuned = copy.deepcopy(base)
    for parameter in tuned.parameters():
        chosen = torch.rand(parameter.shape, generator=generator) < share
        change = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.data[chosen] += change[chosen]
    return tuned


def task(base, seed, share=0.3):
    return SparseDelta.diff(base, fine_tuned(base, seed, share), progress=False)


def bits(model):
    return {name: (tensor.dtype, tensor.shape, digest(tensor)) for name, tensor in model.state_dict().items()}


@contextmanager
def unchanged(model):
    """Fails unless the model is, at the end, bit for bit what it was."""
    before = bits(model)
    yield
    assert bits(model) == before


def close(model, expected, tolerance):
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=tolerance, atol=tolerance)
