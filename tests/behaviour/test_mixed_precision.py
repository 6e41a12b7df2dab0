"""Short types for weights and activations: the float32 delta is the master copy, scaled gradients choose as ever."""

import pytest
import torch
from rank_models import words
from torch import nn
from twins import sgd, trainable

from sparsify import get_engine, sparsify, summary
from sparsify.core.gradients import Product


def of_ones(width):
    layer = nn.Linear(width, 1, bias=False).bfloat16()
    nn.init.ones_(layer.weight)
    return layer


def test_updates_too_small_for_bfloat16_add_up_in_the_delta_and_base_plus_delta_is_rounded_once():
    dense, sparse = of_ones(4), sparsify(of_ones(4), 4, "pafi")
    for model in (dense, sparse):
        optimizer = sgd(trainable(model), lr=1e-3)
        for _ in range(100):
            optimizer.zero_grad()
            model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
    assert torch.equal(dense.weight, torch.ones(1, 4, dtype=torch.bfloat16)), "a step of 0.001 is lost beside 1"
    torch.testing.assert_close(sparse.sparse_values, torch.full((4,), -0.1), check_dtype=True)
    assert torch.equal(sparse.weight, torch.full((1, 4), 0.9).bfloat16())
    sparse.sparse_values.data.fill_(2.0**-8 + 2.0**-12)  # base + delta is rounded once: 2^-8 alone would be a tie
    get_engine(sparse).refresh()
    assert sparse.weight.tolist() == [[1 + 2.0**-7] * 4]


def test_tiny_gradients_of_float16_weights_are_chosen_once_the_scaler_lifts_them():
    for scale, unmasked in ((1.0, 0), (2.0**60, 4)):
        model = sparsify(nn.Linear(8, 4).half(), 4, steps=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale((model(torch.randn(3, 8).half()).float() * 1e-9).square().sum()).backward()
        scaler.step(torch.optim.AdamW([model.sparse_values]))
        assert summary(model).unmasked == unmasked
        assert model.sparse_values.dtype == torch.float32


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("strategy", ["id3", "random"])
def test_a_backward_called_in_autocast_multiplies_in_the_dtypes_of_the_factors(monkeypatch, strategy, compiled):
    dense, seen = Product.dense, []
    monkeypatch.setattr(Product, "dense", lambda product: seen.append((product, dense(product))) or seen[-1][1])
    model, (batch, *_) = words(torch.float32)  # with a tied table, and a layer that is used twice
    model.norm = nn.Identity()  # plain torch compiles no layer norm whose backward is called in autocast
    sparsify(model, 100, strategy, steps=1)
    loss = (torch.compile(model, backend="aot_eager") if compiled else model)(**batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    assert {(product.left.dtype, found.values.dtype) for product, found in seen} == {(torch.float32, torch.float32)}


class Table(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(4, 3))
        self.sparse = sparse

    def forward(self, ids):
        return nn.functional.embedding(ids, self.weight, sparse=self.sparse) @ self.out


class Experts(nn.Module):
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
def test_a_module_that_is_used_by_rows_trains_in_autocast(name, inside, dtype):
    if inside and (name, dtype) == ("experts", torch.float16):
        pytest.skip("autograd's own stack() of the experts' gradients fails there, in plain torch too")
    model = sparsify(ROW_USERS[name]().to(dtype), 12, steps=3)
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
    assert get_engine(model).unmasked == 12
    assert model.sparse_values.isfinite().all()
