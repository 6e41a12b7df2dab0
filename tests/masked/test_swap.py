"""Swapping in place: identity, hooks, aliases and class stay or come back; what cannot work is refused by name."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from sparsify import MaskedEmbedding, MaskedLinear, desparsify, get_engine, optimizer_stepped, sparsify
from sparsify import summary as summary_of
from sparsify.masked.conv1d import MaskedConv1D
from sparsify.masked.recompute import MaskedLayerNorm
from sparsify.masked.swap import MaskedParameterList

DIM = 4


class OwnLinear(nn.Linear):
    pass


MODULES = {
    "Linear": (lambda: nn.Linear(DIM, 3), MaskedLinear),
    "Conv1D": (lambda: Conv1D(3, DIM), MaskedConv1D),
    "Embedding": (lambda: nn.Embedding(6, DIM), MaskedEmbedding),
    "Embedding by frequency": (lambda: nn.Embedding(6, DIM, scale_grad_by_freq=True), nn.Embedding),
    "LayerNorm": (lambda: nn.LayerNorm(DIM), MaskedLayerNorm),
    "subclass": (lambda: OwnLinear(DIM, 3), OwnLinear),
}


def held_by(module):
    """What a module holds, one level deep: parameters, buffers, hooks, attributes."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()}


@pytest.mark.parametrize(("make", "masked_class"), MODULES.values(), ids=MODULES)
def test_a_swapped_module_has_its_masked_class_and_unswapping_leaves_nothing_behind(make, masked_class):
    module = make()
    plain_class, x, before, model = type(module), torch.randn(2, DIM), held_by(module), nn.Sequential(module)
    x = torch.tensor([1, 2]) if isinstance(module, nn.Embedding) else x
    expected, parameters = module(x), dict(module.named_parameters())
    sparsify(model, 1, "pafi")
    assert type(module) is masked_class
    assert isinstance(module, plain_class)
    assert all(module.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert torch.equal(model(x), expected)
    desparsify(model)
    assert type(module) is plain_class
    assert held_by(module) == before
    assert torch.equal(module(x), expected)


def test_a_list_of_parameters_is_swapped_in_place():
    model = nn.Sequential(nn.ParameterList([torch.randn(DIM), torch.randn(DIM)]))
    parameters = list(model.parameters())
    sparsify(model, 5, "random")
    assert type(model[0]) is MaskedParameterList
    assert [id(parameter) for parameter in model[0][:]] == [id(parameter) for parameter in parameters]
    model[0].append(torch.zeros(DIM))
    assert type(model[0][2]) is nn.Parameter
    desparsify(model)
    assert type(model[0]) is nn.ParameterList


def test_a_parameter_that_the_model_gives_up_is_plain_if_it_comes_back():
    model = nn.Sequential(nn.ParameterDict({"a": torch.randn(DIM), "b": torch.randn(DIM)}))
    sparsify(model, 2 * DIM, "random")
    given_up = model[0]["a"]
    del model[0]["a"]
    model[0]["a"] = torch.ones(DIM)
    model.sparse_values.data += 1
    optimizer_stepped(model)
    assert torch.equal(model[0]["a"], torch.ones(DIM))
    assert [tensor.parameter for tensor in get_engine(model).tensors] == [given_up, model[0]["b"]]
    assert summary_of(model, verify=True).verification.unmasked == 2 * DIM
