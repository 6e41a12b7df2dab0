"""The core alone trains what the dense oracle trains: no engine, no ranks, no kernels."""

import copy

import pytest
import torch
from oracle import DenseOracle
from torch import nn
from torch.nn import functional as F

from sparsify.core.importance import D3
from sparsify.core.install import train
from sparsify.core.policy import IncrementPolicy
from sparsify.core.schedule import Schedule

STEPS, BUDGET = 8, 61


class Net(nn.Module):
    """A tied table, a layer that is used twice, a norm, a frozen scale."""

    def __init__(self):
        super().__init__()
        self.table, self.first, self.norm = nn.Embedding(20, 8), nn.Linear(8, 12), nn.LayerNorm(12)
        self.shared, self.last, self.head = nn.Linear(12, 12), nn.Linear(12, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, ids):
        hidden = F.gelu(self.norm(self.first(self.table(ids))))
        hidden = self.shared(torch.tanh(self.shared(hidden))) + hidden
        return self.head(self.scale * self.last(hidden).mean(1))


def trained_by_core(model):
    def policy(tensors, entries):
        return IncrementPolicy(D3(), Schedule(), tensors, entries, BUDGET, STEPS)

    return train(model, BUDGET, policy)


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        yield torch.randint(20, (6, 5), generator=generator), torch.randint(20, (6,), generator=generator)


@pytest.mark.parametrize("forwards", [1, 2, 3])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("seed", range(3))
def test_the_core_alone_equals_the_dense_oracle(seed, make, forwards):
    torch.manual_seed(seed)
    dense = Net().double()
    sparse = copy.deepcopy(dense)
    names = [name for name, parameter in dense.named_parameters() if parameter.requires_grad]
    oracle = DenseOracle(
        dense, make([dense.get_parameter(name) for name in names], 1e-2, weight_decay=0.0), BUDGET, STEPS, names=names
    )
    step = trained_by_core(sparse)
    optimizer = make([sparse.sparse_values], 1e-2, weight_decay=0.0)
    kept = []
    for number, (ids, labels) in enumerate(batches(seed)):
        with torch.no_grad():
            sparse(ids)  # a validation pass
        if number % 2:
            kept.append(sparse(ids))  # a graph that never runs backward
        else:
            kept.clear()
        losses = []
        for model in (dense, sparse):
            parts = zip(ids.chunk(forwards), labels.chunk(forwards), strict=True)
            losses.append(sum(F.cross_entropy(model(own), target) for own, target in parts) / forwards)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=1e-10)
        oracle.step(losses[0])
        optimizer.zero_grad()
        losses[1].backward()
        optimizer.step()
        found = {tensor.name: tensor.indices.tolist() for tensor in step.tensors}
        expected = oracle.unmasked_sets()
        assert found == {name: expected[name] for name in found}
        for name, parameter in dense.named_parameters():
            torch.testing.assert_close(sparse.get_parameter(name), parameter, rtol=1e-8, atol=1e-8, check_stride=False)
    assert (step.entries.count, step.entries.step) == (BUDGET, STEPS)


def test_a_kept_graph_makes_sums_wait_for_the_commit_and_gives_its_uses_back():
    torch.manual_seed(0)
    model = Net().double()
    step = trained_by_core(model)
    (ids, labels), *_ = batches(0)
    loss = F.cross_entropy(model(ids), labels)
    assert all(tensor.waiting for tensor in step.tensors)
    loss.backward(retain_graph=True)
    assert all(tensor.waiting for tensor in step.tensors), "the graph may run again"
    loss.backward()
    assert not any(tensor.waiting for tensor in step.tensors)
    kept = model(ids)
    assert all(tensor.waiting for tensor in step.tensors)
    del kept
    assert not any(tensor.waiting for tensor in step.tensors)
