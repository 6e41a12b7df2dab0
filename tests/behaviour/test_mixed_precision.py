"""Short types for weights and activations: the float32 delta is the master copy, scaled gradients choose as ever."""

import copy

import pytest
import torch
from models import build, loss_of
from torch import nn
from twins import sgd, trainable

from sparsify import get_unmasker, sparsify, summary
from sparsify.masked.gradients import Product

BUDGET, STEPS = 40, 8


def optimizer_of(model, lr=0.01):
    return torch.optim.AdamW(trainable(model), lr=lr, weight_decay=0)


def train(model, batches, optimizer, scaler=None):
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for batch in batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


def in_dtype(batches, dtype):
    return [{name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()} for batch in batches]


def everything(model):
    """The set of all entries, so that the same ones are trained in every type."""
    return {name: torch.ones_like(parameter, dtype=torch.bool) for name, parameter in model.named_parameters()}


def test_updates_too_small_for_bfloat16_add_up_in_the_delta():
    def layer():
        layer = nn.Linear(4, 1, bias=False).bfloat16()
        nn.init.ones_(layer.weight)
        return layer

    dense, sparse = layer(), sparsify(layer(), 4, "pafi")
    for model in (dense, sparse):
        optimizer = sgd(trainable(model), lr=1e-3)
        for _ in range(100):
            optimizer.zero_grad()
            model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
    assert torch.equal(dense.weight, torch.ones(1, 4, dtype=torch.bfloat16)), "a step of 0.001 is lost beside 1"
    torch.testing.assert_close(sparse.sparse_values, torch.full((4,), -0.1), check_dtype=True)
    assert torch.equal(sparse.weight, torch.full((1, 4), 0.9).bfloat16())


@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_sparse_training_in_bfloat16_follows_float32_where_dense_training_does_not(name):
    plain, batches = build(name)
    batches = batches * 5

    def change(model, dtype, sparse):
        """How far the weights have gone, in training at a rate that is small beside them."""
        model = copy.deepcopy(model).to(dtype)
        start = [parameter.detach().double() for parameter in model.parameters()]
        weights = list(model.parameters())
        if sparse:
            sparsify(model, None, everything(model))
        model = train(model, in_dtype(batches, dtype), optimizer_of(model, lr=2e-5))
        if sparse:  # the weights are its rounded form
            tensors = get_unmasker(model).tensors
            return torch.cat([tensor.delta.double()[tensor.indices.argsort()] for tensor in tensors])
        return torch.cat([(w.detach().double() - s).flatten() for w, s in zip(weights, start, strict=True)])

    def similarity(sparse):
        changes = [change(plain, dtype, sparse) for dtype in (torch.float32, torch.bfloat16)]
        return float(torch.nn.functional.cosine_similarity(*changes, dim=0))

    assert similarity(sparse=True) > 0.9
    assert similarity(sparse=False) < 0.6


def test_tiny_gradients_of_float16_weights_are_chosen_once_the_scaler_lifts_them():
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            return (self.layer(x).float() * 1e-9).square().sum()

    torch.manual_seed(0)
    plain, batch = Tiny().half(), {"x": torch.randn(3, 8).half()}
    unscaled, scaled = sparsify(copy.deepcopy(plain), 4, steps=1), sparsify(plain, 4, steps=1)
    train(unscaled, [batch], optimizer_of(unscaled))
    train(scaled, [batch], optimizer_of(scaled), torch.amp.GradScaler("cpu", init_scale=2.0**60))
    assert summary(unscaled).unmasked == 0
    assert summary(scaled).unmasked == 4
    assert scaled.sparse_values.dtype == torch.float32


class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.linear = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.linear(self.linear(self.table(ids)).tanh()))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("strategy", ["id3", "random"])
def test_a_backward_called_in_autocast_multiplies_in_the_dtypes_of_the_factors(monkeypatch, strategy, compiled):
    torch.manual_seed(0)
    dense, dtypes = Product.dense, []

    def watched(product):
        found = dense(product)
        dtypes.append((found.values.dtype, product.left.dtype))
        return found

    monkeypatch.setattr(Product, "dense", watched)
    model = sparsify(UsedTwice(), 100, strategy, steps=1)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    loss = run(torch.arange(20)).square().mean()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    assert dtypes
    assert all(multiplied == given for multiplied, given in dtypes)


class Table(nn.Module):
    """A table of its own kind, of which a batch uses some rows."""

    def __init__(self, sparse):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(4, 3))
        self.sparse = sparse

    def forward(self, ids):
        return nn.functional.embedding(ids, self.weight, sparse=self.sparse) @ self.out


class Experts(nn.Module):
    """One tensor of experts, each of which takes some rows of a batch and adds to the output there."""

    def __init__(self):
        super().__init__()
        self.table, self.weights = nn.Embedding(9, 4), nn.Parameter(torch.randn(3, 4, 4))
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        y = torch.zeros_like(x)
        for number, weight in enumerate(self.weights):
            rows = torch.arange(number, len(ids), 3)
            y.index_add_(0, rows, (x[rows] @ weight).to(y.dtype))
        return self.head(torch.tanh(y))


ROW_USERS = {"table": lambda: Table(sparse=False), "sparse table": lambda: Table(sparse=True), "experts": Experts}


@pytest.mark.parametrize("name", ROW_USERS)
@pytest.mark.parametrize("inside", [False, True], ids=["backward after autocast", "backward inside autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("checked", [False, True])
def test_a_module_that_is_used_by_rows_trains_in_autocast(name, inside, dtype, checked):
    if inside and (name, dtype) == ("experts", torch.float16):
        pytest.skip("autograd's own stack() of the experts' gradients fails there, in plain torch too")
    torch.manual_seed(0)
    model = sparsify(ROW_USERS[name]().to(dtype), 12, steps=3)
    get_unmasker(model).check = checked
    optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.tensor([1, 2, 2, 4, 4, 8])).float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        optimizer.step()
    assert get_unmasker(model).unmasked == 12
    assert model.sparse_values.isfinite().all()


def test_rows_that_come_often_are_summed_in_float32():
    torch.manual_seed(0)
    model = sparsify(nn.Sequential(nn.Embedding(3, 2)).bfloat16(), 6, "pafi")
    model(torch.zeros(1001, dtype=torch.int64)).sum().backward()
    (table,) = get_unmasker(model).tensors
    own = model.sparse_values.grad[table.slots[table.indices < 2]]
    assert own.tolist() == [1001, 1001], "in bfloat16 it would be 1000"
