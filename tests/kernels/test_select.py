"""Selecting on a device: both forms find the best entries by score, then id."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import seeded, triton_kernels

from sparsify.core.importance import D3
from sparsify.kernels.select import Candidates, Part, plain_cut, plain_select

pytestmark = pytest.mark.usefixtures("device")
EXACT = [D3(), D3(exp=1, eps=1e-3), D3(exp=0)]  # both forms round their scores alike
OTHERS = [D3(exp=-1), D3(exp=-2, eps=0.1), D3(exp=1.5), D3(exp=0.3, eps=1e-6), D3(exp=40)]
NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-3, -3.5, 1e-40, 1e30, -1e38]  # few, so that there are ties
FULL, SHORT, HALF = torch.float32, torch.bfloat16, torch.float16
TYPES = [(FULL, FULL), (SHORT, SHORT), (FULL, SHORT), (HALF, HALF)]
OFFSET, TOTAL = 7, 5000


@pytest.fixture(scope="module")
def fused(device):
    """The Triton forms, in place of the plain ones."""
    kernels = triton_kernels(device)
    return kernels.select_d3, kernels.cut


@pytest.fixture(scope="module", params=["plain", "triton"])
def form(request):
    return (plain_select, plain_cut) if request.param == "plain" else request.getfixturevalue("fused")


def held(candidates):
    """The candidates as {id: (score, gradient, weight)}."""
    ids, *parts = (array[: candidates.count[0]].tolist() for array in candidates.arrays)
    return dict(zip(ids, zip(*parts, strict=True), strict=True))


def empty(capacity=200, size=1, limit=1):
    return Candidates(size, limit, capacity, TOTAL, torch.float32, torch.get_default_device())


def select(form, candidates, importance, weight, grad, rows=None, ids=None, start=0, stop=None):
    part = Part(weight, grad, rows, OFFSET, ids, start, grad.numel() if stop is None else stop)
    form[0](candidates, importance, part)


def selected(form, importance, weight, grad, rows=None, capacity=1000, start=0, stop=None):
    candidates = empty(capacity)
    select(form, candidates, importance, weight, grad, rows, start=start, stop=stop)
    return candidates


def some(rows, cols, seed, dtype=torch.float32):
    generator = seeded(seed)
    return torch.tensor(NUMBERS)[torch.randint(len(NUMBERS), (rows, cols), generator=generator)].to(dtype)


@settings(max_examples=25)
@given(
    st.integers(0, 1000), st.sampled_from(EXACT), st.integers(1, 4), st.sampled_from([1, 3, 31]), st.booleans(),
    st.sampled_from([-math.inf, 0.0, 0.5, 1.0, 1.3]),
)  # fmt: skip
def test_the_kernel_keeps_what_the_plain_form_keeps(fused, seed, importance, rows, cols, part, threshold):
    weight, grad = some(rows, cols, seed), some(rows, cols, seed + 1)
    some_rows = torch.arange(rows)[::2] if part else None
    grad = grad if some_rows is None else grad[::2]
    kept = []
    for form in ((plain_select, None), fused):
        candidates = empty()
        candidates.threshold.fill_(threshold)
        select(form, candidates, importance, weight, grad, some_rows)
        kept.append(held(candidates))
    assert kept[0] == kept[1]


@pytest.mark.parametrize("importance", EXACT, ids=repr)
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1.0, 1e30, 3e38])
def test_entries_whose_score_is_the_threshold_are_kept_of_any_size(fused, importance, size):
    weight, grad = torch.randn(1, 40), torch.rand(1, 40).double().mul(size).float()
    for threshold in importance.score(weight, grad).flatten()[:8]:
        kept = []
        for form in ((plain_select, None), fused):
            candidates = empty()
            candidates.threshold.copy_(threshold)
            select(form, candidates, importance, weight, grad)
            kept.append(held(candidates))
        assert kept[0] == kept[1]
        assert threshold.isinf() or threshold == 0 or threshold.item() in {score for score, *_ in kept[0].values()}


@pytest.mark.parametrize("importance", [*OTHERS, D3(exp=1, eps=1e-3)], ids=repr)
@pytest.mark.parametrize("dtypes", TYPES, ids=str)
def test_a_kernels_score_is_torchs_in_float32_but_for_the_rounding_of_powers(fused, importance, dtypes):
    weight, grad = torch.randn(9, 33).to(dtypes[0]), torch.randn(9, 33).to(dtypes[1])
    plain, kernel = (held(selected(form, importance, weight, grad)) for form in ((plain_select, None), fused))
    assert plain.keys() == kernel.keys()
    for entry, (score, *rest) in plain.items():
        assert kernel[entry][0] == (score if importance.exp == 1 else pytest.approx(score, rel=3e-7))
        assert list(kernel[entry][1:]) == rest


@pytest.mark.parametrize("start", [0, 1, 1023, 1024, 1500])
def test_only_a_part_is_looked_at(form, start):
    grad = torch.ones(3, 700)
    entries = held(selected(form, D3(), torch.zeros(3, 700), grad, capacity=3000, start=start, stop=1700))
    assert sorted(entries) == list(range(start + OFFSET, 1700 + OFFSET))


def filled(scores, ids, capacity, size):
    candidates, number = empty(capacity, size), len(scores)
    candidates.scores[:number] = torch.tensor(scores)
    candidates.ids[:number] = torch.tensor(ids)
    candidates.grads[:number], candidates.weights[:number] = -torch.tensor(scores), torch.tensor(scores)
    candidates.scores[number:], candidates.ids[number:] = 99.0, 4  # what was there before
    candidates.count[0] = number
    return candidates


SCORES = st.lists(st.sampled_from([1e-45, 1e-40, 0.5, 1.0, 1.0000001, 3e38]), min_size=1, max_size=30)


def test_a_cut_of_more_candidates_than_a_block_has(form):
    generator = seeded(0)
    ids = torch.randperm(TOTAL, generator=generator)[:4500].tolist()
    scores = torch.randint(1, 40, (4500,), generator=generator).float().tolist()  # about 115 of each
    candidates = filled(scores, ids, capacity=4600, size=2111)
    form[1](candidates, 2111)
    best = sorted(zip([-score for score in scores], ids, strict=True))[:2111]
    assert sorted(held(candidates)) == sorted(entry for _, entry in best)


def test_equal_scores_are_cut_by_ids_of_any_length(form):
    ids = (torch.randperm(300, generator=seeded(1)) * 0x1234567 + 2**33).tolist()
    candidates = filled([2.0] * 100 + [1.0] * 200, ids, capacity=400, size=217)
    candidates.total = 2**36
    form[1](candidates, 217)
    assert sorted(held(candidates)) == sorted(ids[:100] + sorted(ids[100:])[:117])


@settings(max_examples=40)
@given(SCORES, st.randoms(use_true_random=False), st.integers(1, 12), st.integers(0, 12))
def test_a_cut_keeps_the_best_by_score_then_id(form, scores, random, size, slack):
    ids = random.sample(range(TOTAL), len(scores))
    candidates = filled(scores, ids, capacity=60, size=size)
    form[1](candidates, size + slack)
    entries = sorted(zip((-torch.tensor(scores)).tolist(), ids, strict=True))
    if len(scores) <= size + slack:
        assert set(held(candidates)) == set(ids)
        assert candidates.threshold == -torch.inf
    else:
        best = entries[:size]
        assert held(candidates) == {entry: (-score, score, -score) for score, entry in best}
        assert candidates.threshold == -best[-1][0]
