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


def selected(form, importance, weight, grad, threshold=-math.inf, start=0, stop=None):
    """The candidates among the entries of a part, as {id: (score, gradient, weight)}."""
    candidates = Candidates(1, 1, 3000, TOTAL, torch.float32, torch.get_default_device())
    candidates.threshold.fill_(threshold)
    form[0](candidates, importance, Part(weight, grad, None, OFFSET, None, start, stop or grad.numel()))
    return held(candidates)


@pytest.mark.parametrize("importance", EXACT, ids=repr)
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1.0, 1e30, 3e38])
def test_entries_whose_score_is_the_threshold_are_kept_of_any_size(fused, importance, size):
    weight, grad = torch.randn(1, 40), torch.rand(1, 40).double().mul(size).float()
    for threshold in importance.score(weight, grad).flatten()[:4].tolist():
        plain, kernel = (selected(form, importance, weight, grad, threshold) for form in ((plain_select,), fused))
        assert plain == kernel
        assert threshold in (0, math.inf) or threshold in {score for score, *_ in plain.values()}


@pytest.mark.parametrize("importance", [*OTHERS, D3(exp=1, eps=1e-3)], ids=repr)
@pytest.mark.parametrize("dtypes", TYPES, ids=str)
def test_a_kernels_score_is_torchs_in_float32_but_for_the_rounding_of_powers(fused, importance, dtypes):
    weight, grad = torch.randn(9, 33).to(dtypes[0]), torch.randn(9, 33).to(dtypes[1])
    plain, kernel = (selected(form, importance, weight, grad) for form in ((plain_select,), fused))
    assert plain.keys() == kernel.keys()
    for entry, (score, *rest) in plain.items():
        assert kernel[entry][0] == (score if importance.exp == 1 else pytest.approx(score, rel=3e-7))
        assert list(kernel[entry][1:]) == rest


@pytest.mark.parametrize("start", [0, 1023, 1024, 1500])
def test_only_a_part_is_looked_at(form, start):
    grad = torch.ones(3, 700)
    entries = selected(form, D3(), torch.zeros(3, 700), grad, start=start, stop=1700)
    assert sorted(entries) == list(range(start + OFFSET, 1700 + OFFSET))


def assert_cut(form, scores, ids, size, slack=0, total=TOTAL):
    """A cut keeps the best by score, then id, of more than ``size + slack`` candidates."""
    number, scores = len(scores), torch.tensor(scores)
    candidates = Candidates(size, 1, number + 30, total, torch.float32, torch.get_default_device())
    candidates.scores[:number], candidates.ids[:number] = scores, torch.tensor(ids)
    candidates.grads[:number], candidates.weights[:number] = -scores, scores
    candidates.scores[number:], candidates.ids[number:] = 99.0, 4  # what was there before
    candidates.count[0] = number
    form[1](candidates, size + slack)
    best, threshold = sorted(zip((-scores).tolist(), ids, strict=True)), -torch.inf
    if number > size + slack:
        best, threshold = best[:size], -best[size - 1][0]
    assert held(candidates) == {entry: (-score, score, -score) for score, entry in best}
    assert candidates.threshold == threshold


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([1e-45, 1e-40, 0.5, 1.0, 1.0000001, 3e38]), min_size=1, max_size=30),
    st.randoms(use_true_random=False), st.integers(1, 12), st.integers(0, 12),
)  # fmt: skip
def test_a_cut_keeps_the_best_by_score_then_id(form, scores, random, size, slack):
    assert_cut(form, scores, random.sample(range(TOTAL), len(scores)), size, slack)


def test_a_cut_of_more_candidates_than_a_block_has(form):
    ids = torch.randperm(TOTAL, generator=seeded(0))[:4500].tolist()
    scores = torch.randint(1, 40, (4500,), generator=seeded(1)).float().tolist()  # about 115 of each
    assert_cut(form, scores, ids, 2111)


def test_equal_scores_are_cut_by_ids_of_any_length(form):
    ids = (torch.randperm(300, generator=seeded(1)) * 0x1234567 + 2**33).tolist()
    assert_cut(form, [2.0] * 100 + [1.0] * 200, ids, 217, total=2**36)
