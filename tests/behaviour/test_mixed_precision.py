"""Training in autocast, with backward called in it or after it."""

import pytest
import torch
from rank_models import words
from torch import nn

from sparsify import get_engine, sparsify
from sparsify.core.gradients import Product


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
@pytest.mark.parametrize(
    ("dtype", "inside"),  # whether backward is called in autocast, where plain torch trains no experts in float16
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True), (torch.float16, False)],
)
def test_a_module_that_is_used_by_rows_trains_in_autocast(name, dtype, inside):
    model = sparsify(ROW_USERS[name]().to(dtype), 12, "id3", steps=3)
    optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.tensor([1, 2, 2, 4, 4, 8])).float().square().mean()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss.backward()
        optimizer.step()
    assert get_engine(model).unmasked == 12
    assert model.sparse_values.isfinite().all()
