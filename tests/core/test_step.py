"""The core alone trains what the dense oracle trains: no engine, no ranks, no kernels."""

import copy
from collections import defaultdict

import pytest
import torch
from oracle import DenseOracle
from rank_models import BUDGET, STEPS, own_part, words
from twins import trainable

from sparsify.core.entries import Entries
from sparsify.core.importance import D3
from sparsify.core.install import frozen_row, install
from sparsify.core.policy import IncrementPolicy
from sparsify.core.schedule import Schedule
from sparsify.core.step import TrainingStep
from sparsify.core.tensor import MaskedTensor


def trained_by_core(model):
    """Makes a plain model train, in place; the parameters that require grad are the candidates."""
    owners = defaultdict(list)
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            owners[parameter].append((module, attribute))
    tensors, offset = {}, 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            held = owners[parameter]
            tensors[MaskedTensor(len(tensors), *held[0], name, offset, frozen_row(held))] = held
            offset += parameter.numel()
    entries = Entries(model, [tensor.numel for tensor in tensors])
    step = TrainingStep([*tensors], entries, IncrementPolicy(D3(), Schedule(), [*tensors], entries, BUDGET, STEPS))
    install(step, tensors, BUDGET)
    return step


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_the_core_alone_equals_the_dense_oracle(make, forwards):
    dense, batches = words()  # a tied table, and a layer that is used twice
    dense.narrow.bias.requires_grad_(False)
    sparse = copy.deepcopy(dense)
    names = [name for name, parameter in dense.named_parameters() if parameter.requires_grad]
    oracle = DenseOracle(dense, make(trainable(dense), 1e-2, weight_decay=0.0), BUDGET, STEPS, names=names)
    step = trained_by_core(sparse)
    optimizer = make([sparse.sparse_values], 1e-2, weight_decay=0.0)
    kept = []
    for number, batch in enumerate(batches):
        with torch.no_grad():
            sparse(**batch)  # a validation pass
        if number % 2:
            kept.append(sparse(**batch))  # a graph that never runs backward
        else:
            kept.clear()
        parts = [own_part(batch, part, forwards) for part in range(forwards)]
        losses = [sum(model(**part) for part in parts) / forwards for model in (dense, sparse)]
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
