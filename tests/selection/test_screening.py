"""Screening shows the top-k exactly what the full float32 product would have."""

import copy
import pickle
from collections import Counter
from functools import partial

import pytest
import torch
from models import descend
from oracle import unmasked_sets
from torch import nn
from twins import Twins, sgd

from sparsify import D3, Increment, Schedule, Strategy, sparsify, summary

pytestmark = pytest.mark.usefixtures("screened")  # whatever a layer's size


HARD = {
    "ties": lambda model, x: (model, x),
    "equal scores": lambda model, x: (fill(model, 0.5), torch.ones_like(x)),
    "zeros": lambda model, x: (fill(model, 0.0), x),
    "one huge row": lambda model, x: (times_column(model[2].weight, 1024.0), x),
    "one huge column": lambda model, x: (model, times_column(x, 2.0**40)),
    "huge numbers": lambda model, x: (model, x * 2.0**50),
    "tiny numbers": lambda model, x: (model, x * 2.0**-90),
    "denormals": lambda model, x: (model, x * 2.0**-130),
}


def fill(model, number):
    for parameter in model.parameters():
        parameter.data.fill_(number)
    return model


def times_column(tensor, number):
    tensor.data[:, 3] *= number
    return tensor


@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("exp", [0, 1, 2, -1])
def test_hard_cases_are_the_oracles_to_the_last_entry(monkeypatch, case, exp):
    """All numbers are multiples of powers of two, and few, so that no sum is rounded in any order."""
    monkeypatch.setattr("sparsify.selection.joined.LARGEST", 0)
    torch.manual_seed(exp)
    dense = nn.Sequential(nn.Linear(20, 17), nn.ReLU(), nn.Linear(17, 33), nn.ReLU(), nn.Linear(33, 5))
    for parameter in dense.parameters():
        parameter.data = torch.randint(-4, 5, parameter.shape) / 4
    batches = [torch.randint(-1, 2, (12, 20)).float() for _ in range(4)]
    HARD[case](dense, batches[0])
    sparse = sparsify(copy.deepcopy(dense), 60, Strategy(D3(exp=exp), Increment()), steps=4)
    ways = torch.randint(-1, 2, (12, 5)).float()
    batches = [HARD[case](copy.deepcopy(dense), x)[1] for x in batches]
    options = {"make_optimizer": partial(sgd, lr=0.0), "loss_of": lambda model, x: (model(x) * ways).sum(), "exp": exp}
    twins = Twins(dense, sparse, 60, 4, **options).train(batches)
    assert unmasked_sets(sparse) == twins.oracle.unmasked_sets()


def work_of(model, steps=1):
    return summary(descend(model, torch.randn(steps, 16, 32))).last_work


def test_the_work_is_counted_by_the_way_it_took_and_copies_count_for_themselves(monkeypatch):
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
    biases = 64 + 64 + 32
    monkeypatch.setattr("sparsify.selection.joined.LARGEST", 64)
    work = work_of(
        sparsify(copy.deepcopy(plain), 30, "id3", steps=3), steps=2
    )  # the first step keeps all of the candidates
    assert work["dense"] == 64 * 32 + biases, "the first gradient of a step, without a threshold to compare it with"
    assert work["screened"] + work["skipped"] == 64 * 64 + 32 * 64
    assert work["screened"] > 0
    monkeypatch.setattr("sparsify.selection.joined.LARGEST", 1 << 14)
    model = sparsify(plain, 30, "id3", steps=3, schedule=Schedule(every=2))
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    dense = Counter(dense=64 * 64 + 2 * 64 * 32 + biases)
    assert work_of(model) == work_of(model) == dense, "a step without a selection leaves the last one's"
    assert all(summary(other).last_work == Counter() for other in others)
