"""Masked linear layers: the plain layer's output and input gradient, the weight's gradient for the collector alone."""

import copy

import pytest
import torch
from oracle import model_gradients, sparsify_fully
from torch import nn
from transformers.pytorch_utils import Conv1D
from twins import assert_close

from sparsify import MaskedLinear, sparsify
from sparsify.masked.conv1d import MaskedConv1D

IN, OUT = 5, 7
SHAPES = [(IN,), (4, IN), (2, 3, IN), (0, IN)]
LAYERS = {
    "linear": lambda: nn.Linear(IN, OUT),
    "no bias": lambda: nn.Linear(IN, OUT, bias=False),
    "conv1d": lambda: Conv1D(OUT, IN),
}


@pytest.fixture(params=LAYERS)
def plain(request):
    layer = LAYERS[request.param]()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def masked_copy(plain, frozen=()):
    layer = copy.deepcopy(plain)
    for attribute in frozen:
        layer.get_parameter(attribute).requires_grad_(False)
    assert isinstance(sparsify_fully(layer), (MaskedLinear, MaskedConv1D))
    return layer


def run(layer, x, autocast=False):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    y.square().sum().backward()
    return y.detach(), x.grad


def assert_collected(layer, plain, tolerance=1e-12):
    """The flat delta has the gradients that the plain layer's parameters have."""
    for name, gradient in model_gradients(layer).items():
        expected = plain.get_parameter(name).grad
        assert_close(gradient.to(expected), expected, tolerance)


@pytest.mark.parametrize(("dtype", "x_dtype", "autocast", "tolerance"), [
    (torch.float64, torch.float64, False, 1e-12), (torch.float64, torch.float64, True, 1e-12),
    (torch.float32, torch.float32, False, 1e-5), (torch.float32, torch.float32, True, 1e-2),
    (torch.bfloat16, torch.bfloat16, False, 1e-1), (torch.float32, torch.bfloat16, True, 1e-2),
])  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_input_gradient_are_the_plain_layers_bit_for_bit(plain, dtype, x_dtype, autocast, tolerance, shape):
    layer = masked_copy(plain.to(dtype))
    layer.requires_grad_(True)  # as PEFT's set_adapter does
    x = torch.randn(shape, dtype=x_dtype)
    assert_close(run(layer, x, autocast), run(plain, x, autocast), 0)
    assert all(parameter.grad is None for parameter in layer.parameters() if parameter is not layer.sparse_values)
    assert_collected(layer, plain, tolerance)


@pytest.mark.parametrize("dense", ["weight", "bias"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_weight_or_bias_is_trained_dense_beside_a_masked_one(dense, autocast):
    plain, x = nn.Linear(IN, OUT), torch.randn(4, IN)
    layer = masked_copy(plain, frozen=[dense])
    layer.requires_grad_(True)
    assert_close(run(layer, x, autocast), run(plain, x, autocast), 0)
    assert layer.get_parameter(dense).grad.dtype == torch.float32
    assert torch.equal(layer.get_parameter(dense).grad, plain.get_parameter(dense).grad)
    assert_collected(layer, plain, 1e-2)


@pytest.mark.parametrize(("kind", "frozen"), [*((kind, []) for kind in LAYERS), ("linear", ["weight"])], ids=str)
def test_a_graph_keeps_the_input_if_it_is_needed_and_the_weight_itself_and_no_copy(kind, frozen):
    layer = masked_copy(LAYERS[kind](), frozen)
    x, saved = torch.randn(4, IN, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.data_ptr()), lambda _: None):
        layer(x)
    assert set(saved) == {layer.weight.data_ptr()} | (set() if frozen else {x.data_ptr()})


def test_a_layer_shows_what_of_its_weight_is_trained(plain):
    layer = masked_copy(plain)
    assert layer.indices.tolist() == layer.delta.tolist() == layer.base_values.tolist() == []
    assert layer.density == 0
    layer = sparsify(copy.deepcopy(plain), None, {"weight": torch.tensor([9, 2])})
    layer.sparse_values.data += torch.tensor([-0.25, 0.5])
    assert layer.indices.tolist() == [2, 9]
    assert torch.equal(layer.base_values, plain.weight.detach().take(torch.tensor([2, 9])))
    assert layer.delta.tolist() == [-0.25, 0.5]
    assert layer.density == 2 / (IN * OUT)
