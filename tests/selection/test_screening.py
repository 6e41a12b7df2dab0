"""Screening shows the top-k exactly what the full float32 product would have."""

import copy
import pickle
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import descend
from oracle import unmasked_sets
from recorder import mask, unmask
from torch import nn
from twins import Twins, sgd

from sparsify import D3, SNIP, Increment, Schedule, Strategy, get_engine, sparsify, summary
from sparsify.core.gradients import Product
from sparsify.core.topk import TopK
from sparsify.selection.screening import StreamingSelector, Work

ROWS, COLS, TOKENS = 48, 40, 24
NOTHING = torch.empty(0, dtype=torch.int64)


def a_tensor(weight, unmasked=NOTHING):
    """A masked weight (ROWS, COLS) at offset 100 with some unmasked entries, flat indices."""
    layer = nn.Linear(COLS, ROWS, bias=False)
    layer.weight.data = weight
    _, tensors = mask(layer)
    tensor = tensors["weight"]
    tensor.offset = 100
    unmask(tensor, unmasked, torch.zeros(unmasked.numel()))
    return tensor


pytestmark = pytest.mark.usefixtures("screened")  # whatever a layer's size


def screen(topk, tensor, gradient, excluded=NOTHING, importance=D3()):  # noqa: B008 - frozen
    return StreamingSelector(topk, importance, Work(), True).screen(tensor, gradient, excluded)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    importance=st.one_of(
        st.builds(D3, exp=st.sampled_from([0.0, 1.0, 2.0, -1.0]), eps=st.sampled_from([1.0, 1e-3])), st.just(SNIP())
    ),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    shape=st.sampled_from(["normal", "one huge row", "low rank", "equal"]),
)
def test_screening_finds_the_winners_of_the_full_product(seed, importance, scale, shape):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(TOKENS, ROWS, generator=generator) * scale
    right = torch.randn(TOKENS, COLS, generator=generator)
    if shape == "one huge row":
        left[:, 3] *= 1e3
    if shape == "low rank":
        left = left[:, :1].expand(-1, ROWS).contiguous()
    if shape == "equal":
        left, right = torch.full_like(left, scale), torch.ones_like(right)
    weight = torch.randn(ROWS, COLS, generator=generator)
    unmasked = torch.randperm(ROWS * COLS, generator=generator)[:15].sort().values
    product = Product(left, right)
    gradient = product.dense()
    scores = importance.score(weight, gradient.values).flatten()
    # the other tensors' entries beat most of this one's: only a few are left to find
    others = torch.full((20,), scores.kthvalue(scores.numel() - 12).values.item())
    screened, dense = TopK(20, torch.float32, "cpu"), TopK(20, torch.float32, "cpu")
    for topk in (screened, dense):
        topk.add(torch.arange(20), others, others, others)
    found = screen(screened, a_tensor(weight, unmasked), product, unmasked, importance)
    size = gradient.values.abs().max()
    torch.testing.assert_close(found, gradient.take(unmasked), rtol=1e-4, atol=1e-5 * size)
    gradient.clear(unmasked)
    dense.offer(importance, weight, gradient.values, None, 100)
    ids = [topk.winners().ids for topk in (screened, dense)]
    scores = torch.cat([others, scores])
    # a dot product and a matrix product round differently: at the cut either entry is right
    torch.testing.assert_close(*(scores[own.where(own < 20, own - 80)] for own in ids), rtol=1e-5, atol=0)
    assert not torch.isin(ids[0], unmasked + 100).any()


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
    monkeypatch.setattr("sparsify.selection.small.LARGEST", 0)
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
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
    biases = 64 + 64 + 32
    monkeypatch.setattr("sparsify.selection.small.LARGEST", 64)
    work = work_of(sparsify(copy.deepcopy(plain), 30, steps=3), steps=2)  # the first step keeps all of the candidates
    assert work.dense == 64 * 32 + biases, "the first gradient of a step, without a threshold to compare it with"
    assert work.screened + work.skipped == 64 * 64 + 32 * 64
    assert work.screened > 0
    monkeypatch.setattr("sparsify.selection.small.LARGEST", 1 << 14)
    model = sparsify(plain, 30, steps=3, schedule=Schedule(every=2))
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    dense = Work(dense=64 * 64 + 2 * 64 * 32 + biases)
    assert work_of(model) == work_of(model) == dense, "a step without a selection leaves the last one's"
    assert all(get_engine(other).work == Work() for other in others)
    assert (str(dense), str(Work())) == ("8,352 entries dense", "no entry was looked at")
