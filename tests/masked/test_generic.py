"""The generic form: any module that owns parameters trains as it would when plain, and keeps its class."""

import copy
import types

import pytest
import torch
from oracle import model_gradients, sparsify_fully
from torch import nn
from torch.nn import functional as F

from sparsify import get_engine, sparsify

DIM = 4


class Own(nn.Module):
    def __init__(self, forward, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self.run = forward

    def forward(self, x, *args):
        return self.run(self, x, *args)


def scaled(module, x):
    return x * module.weight


def recursive(module, x, depth=2):
    return torch.tanh(module(x * module.weight, depth - 1) + module.weight) if depth else x * module.weight


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Lists(nn.Module):
    """Parameters that are held by modules which are never called, and read in every way that there is."""

    def __init__(self):
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(DIM) for _ in range(5)])
        self.named = nn.ParameterDict({name: torch.randn(DIM) for name in "abcde"})

    def forward(self, x):
        first, *_ = self.listed
        x = torch.tanh(x * first + self.listed[1] + self.listed[-1]) + sum(self.listed[2:4])
        x = torch.tanh(x * self.named["a"] + self.named.get("b")) * self.named.c
        return x + next(value for key, value in self.named.items() if key == "d") * list(self.named.values())[4]


MODULES = {
    "LayerNorm": lambda: nn.LayerNorm(DIM),
    "BatchNorm1d": lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3 * DIM)),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(3, 2, 2),
    "GRUCell": lambda: nn.Sequential(nn.Flatten(), nn.GRUCell(3 * DIM, 2)),
    "subclass of Linear": lambda: ScaledLinear(DIM, 2),
    "encoder layer": lambda: nn.TransformerEncoderLayer(DIM, 2, 6, dropout=0.0, batch_first=True),
    "lists": Lists,
    "scalar": lambda: Own(scaled, weight=()),
    "recursive": lambda: Own(recursive, weight=DIM),
}


def assert_gradients(masked, plain, tolerance=1e-12):
    """The gradients of a sparsified model are those of its plain twin, zero where that has none."""
    for name, gradient in model_gradients(masked).items():
        expected = plain.get_parameter(name).grad
        expected = torch.zeros_like(gradient) if expected is None else expected
        torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MODULES)
def test_output_input_gradient_and_gradients_are_the_plain_modules(name):
    plain = nn.Sequential(MODULES[name]())
    masked = sparsify_fully(copy.deepcopy(plain))
    x, results = torch.randn(2, 3, DIM), []
    for model in (masked, plain):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.pow(3).sum().backward()
        results.append((y.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-6, atol=1e-6)
    trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    assert list(model_gradients(masked)) == trained
    assert_gradients(masked, plain, 1e-6)
    assert any(plain.get_parameter(name).grad.any() for name in trained)


def replace_forward(layer):
    def doubled(self, x):
        is_table = isinstance(self, nn.Embedding)
        return 2 * (F.embedding(x, self.weight) if is_table else F.linear(x, self.weight, self.bias))

    layer.forward = types.MethodType(doubled, layer)


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_a_module_whose_forward_was_replaced_on_the_instance_still_trains(kind):
    plain = nn.Sequential(nn.Linear(DIM, DIM) if kind == "linear" else nn.Embedding(6, DIM), nn.Linear(DIM, 2)).double()
    masked = copy.deepcopy(plain)
    for model in (plain, masked):
        replace_forward(model[0])
    sparsify_fully(masked)
    assert type(masked[0]) is type(plain[0])
    x = torch.randn(3, DIM).double() if kind == "linear" else torch.tensor([1, 1, 4])
    for model in (plain, masked):
        model(x).square().sum().backward()
    assert_gradients(masked, plain)


@pytest.mark.parametrize("change", ["values", "dtype"])
def test_a_root_with_parameters_of_its_own_is_brought_in_step_before_they_are_tapped(change):
    model = sparsify(Own(scaled, weight=()), 1, "pafi")
    before = model.weight.item()
    if change == "values":
        model.sparse_values.data.add_(0.5)  # behind the optimizer's back
    else:
        model.bfloat16()
    model(torch.ones(3, dtype=model.weight.dtype)).sum().backward()
    expected = torch.tensor(before + 0.5) if change == "values" else torch.tensor(before).bfloat16()
    assert model.weight.item() == expected.item()
    assert model.sparse_values.grad.item() == 3.0


@pytest.mark.parametrize("strategy", ["pafi", "random"])
def test_the_padding_row_of_a_bag_is_no_candidate(strategy):
    (tensor,) = get_engine(sparsify(nn.EmbeddingBag(6, 4, padding_idx=2), 20, strategy)).tensors
    assert sorted(set((tensor.indices // 4).tolist())) == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_graph_network_with_sparse_features_and_a_sparse_buffer_trains(layout):
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)
            self.register_buffer("edges", torch.eye(4).to_sparse(layout=layout))

        def forward(self, x):
            return self.edges @ self.layer(x)

    x = torch.eye(4, 5)
    plain, model = Graph(), Graph()
    model.load_state_dict(plain.state_dict())
    sparsify(model, 18, "pafi")  # all entries
    plain(x.to_sparse(layout=layout)).square().sum().backward()
    model(x.to_sparse(layout=layout)).square().sum().backward()
    grads = torch.cat([plain.layer.weight.grad.flatten(), plain.layer.bias.grad])
    torch.testing.assert_close(model.sparse_values.grad.sort().values, grads.sort().values)
