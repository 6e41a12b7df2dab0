"""Masked embeddings: the plain table's rows, and a gradient for no more rows than the batch looked up."""

import copy

import pytest
import torch
from oracle import model_gradients, sparsify_fully
from torch import nn

from sparsify import MaskedEmbedding, get_engine
from sparsify.core.gradients import row_gradient

ROWS, DIM = 9, 4


@pytest.fixture(params=[None, 3, -1], ids="padding {}".format)
def plain(request):
    table = nn.Embedding(ROWS, DIM, padding_idx=request.param)
    with torch.no_grad():
        table.weight.normal_()  # trained tables do not keep a padding row at zero
    return table


@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("strided", [True, False])
def test_the_gradient_is_plain_autograds_for_the_batchs_rows_and_has_no_others(plain, id_dtype, strided):
    table = sparsify_fully(copy.deepcopy(plain.double()))
    assert isinstance(table, MaskedEmbedding)
    table.requires_grad_(True)  # as PEFT's set_adapter does
    ids, grad = torch.tensor([[3, 0, 3], [8, 3, 5]], dtype=id_dtype), torch.randn(2, 3, DIM).double()
    if strided:
        ids, grad = ids.t(), grad[:1, :1].expand(3, 2, DIM)
    table(ids).backward(grad)
    plain(ids).backward(grad)
    assert table.weight.grad is None
    assert row_gradient(ids, grad, ROWS).rows.unique().tolist() == [0, 3, 5, 8]
    torch.testing.assert_close(model_gradients(table)["weight"], plain.weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ids", [[[0, 0, 0]], [[]]], ids=["only padding", "no tokens"])
def test_a_batch_that_looks_nothing_up_gives_no_gradient(ids):
    model = sparsify_fully(nn.Sequential(nn.Embedding(ROWS, DIM, padding_idx=0), nn.Linear(DIM, 2)))
    optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
    model(torch.tensor([[1, 2, 3]])).square().sum().backward()
    optimizer.step()
    (table, *_) = get_engine(model).tensors
    assert table.count == 3 * DIM
    optimizer.zero_grad()
    model(torch.tensor(ids, dtype=torch.int64)).square().sum().backward()
    assert not model.sparse_values.grad[table.slots].any()
    if ids[0]:
        assert model.sparse_values.grad.any()


class OwnTable(nn.Embedding):
    pass


class SharedTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Embedding(ROWS, DIM, padding_idx=row) for row in (1, 4))
        self.second.weight = self.first.weight

    def forward(self, ids):
        return self.first(ids) + self.second(ids).exp()


class TiedTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(ROWS, DIM, padding_idx=1), nn.Linear(DIM, ROWS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids).tanh())


TABLES = {
    "by frequency": lambda: nn.Embedding(ROWS, DIM, padding_idx=1, scale_grad_by_freq=True),
    "sparse, of a class of one's own": lambda: OwnTable(ROWS, DIM, padding_idx=1, sparse=True),
    "shared, with a padding row of each use": SharedTable,
    "tied to an output layer, which trains the padding row": TiedTable,
}


@pytest.mark.parametrize("kind", TABLES)
def test_every_kind_of_table_gets_the_gradient_it_gets_when_plain(kind):
    plain = TABLES[kind]().double()
    masked, ids = sparsify_fully(copy.deepcopy(plain)), torch.tensor([[1, 4, 4, 4, 7]])
    for model in (plain, masked):
        model(ids).pow(3).sum().backward()
    (parameter,), (found,) = plain.parameters(), model_gradients(masked).values()
    torch.testing.assert_close(found, parameter.grad.to_dense(), rtol=1e-12, atol=1e-12)
