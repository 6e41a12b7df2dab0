"""Masked linear layers: the plain layer's output and input gradient, the weight's gradient for the collector alone."""

import copy

import pytest
import torch
from recorder import mask, unmask
from torch import nn
from transformers.pytorch_utils import Conv1D

from sparsify import MaskedLinear
from sparsify.masked.conv1d import MaskedConv1D

IN, OUT = 5, 7
SHAPES = [(IN,), (4, IN), (2, 3, IN), (2, 2, 2, IN), (0, IN)]
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


def masked_copy(plain, *attributes):
    layer = copy.deepcopy(plain)
    recorder, tensors = mask(layer, *attributes)
    assert isinstance(layer, (MaskedLinear, MaskedConv1D))
    return layer, recorder, tensors


def run(layer, x, grad_y=None):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y) if grad_y is None else grad_y)
    return y.detach(), x.grad


def assert_same(ours, theirs):
    for own, their in zip(ours, theirs, strict=True):
        assert own.dtype == their.dtype
        assert own.shape == their.shape
        assert torch.equal(own, their)


def assert_collected(recorder, tensors, plain, tolerance=1e-12):
    """The collector has the gradients that the plain layer's parameters have."""
    assert set(recorder.gradients) == set(tensors)
    for name, tensor in tensors.items():
        expected = plain.get_parameter(name).grad
        torch.testing.assert_close(recorder.dense(tensor), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_input_gradient_are_the_plain_layers_bit_for_bit(plain, dtype, shape):
    layer, recorder, tensors = masked_copy(plain.to(dtype))
    layer.requires_grad_(True)  # as PEFT's set_adapter does
    x, grad_y = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], OUT, dtype=dtype)
    assert_same(run(layer, x, grad_y), run(plain, x, grad_y))
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert_collected(recorder, tensors, plain, {torch.float32: 1e-5, torch.bfloat16: 1e-1}.get(dtype, 1e-12))


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_computes_what_it_does_in_the_plain_layer(plain, x_dtype):
    if x_dtype == torch.float64:
        plain.double()  # autocast leaves float64 alone
    layer, recorder, tensors = masked_copy(plain)
    x, results = torch.randn(4, 3, IN, dtype=x_dtype), []
    for module in (layer, plain):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = module(leaf)
        y.float().square().sum().backward()
        results.append((y.detach(), leaf.grad))
    assert_same(*results)
    assert_collected(recorder, tensors, plain, 1e-2)


@pytest.mark.parametrize("masked", ["weight", "bias"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_weight_or_bias_is_trained_dense_beside_a_masked_one(masked, autocast):
    plain = nn.Linear(IN, OUT)
    layer, recorder, tensors = masked_copy(plain, masked)
    layer.requires_grad_(True)
    x, dense = torch.randn(4, IN), "bias" if masked == "weight" else "weight"
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_same(run(layer, x), run(plain, x))
    assert layer.get_parameter(dense).grad.dtype == torch.float32
    assert torch.equal(layer.get_parameter(dense).grad, plain.get_parameter(dense).grad)
    assert_collected(recorder, tensors, plain, 1e-2)


@pytest.mark.parametrize("attributes", [[], ["bias"]], ids=["all", "bias alone"])
def test_a_graph_keeps_the_input_if_it_is_needed_and_the_weight_itself_and_no_copy(plain, attributes):
    if attributes and plain.bias is None:
        pytest.skip("no bias")
    layer, _, _ = masked_copy(plain, *attributes)
    x, saved = torch.randn(4, IN, requires_grad=True), []
    layer.weight.requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.data_ptr()), lambda _: None):
        layer(x)
    assert set(saved) == {layer.weight.data_ptr()} | (set() if attributes else {x.data_ptr()})


def test_a_layer_shows_what_of_its_weight_is_trained(plain):
    layer, recorder, tensors = masked_copy(plain)
    assert layer.indices.tolist() == layer.delta.tolist() == layer.base_values.tolist() == []
    assert layer.density == 0
    indices = torch.tensor([9, 2])
    unmask(tensors["weight"], indices, plain.weight.detach().take(indices))
    recorder.entries.values.data[:2] = torch.tensor([0.5, -0.25])
    assert layer.indices.tolist() == [2, 9]
    assert torch.equal(layer.base_values, plain.weight.detach().take(torch.tensor([2, 9])))
    torch.testing.assert_close(layer.delta, torch.tensor([-0.25, 0.5], dtype=torch.float64))
    assert layer.density == 2 / (IN * OUT)
