"""A selection counts the entries that it looked at by the way it took."""

import copy
import pickle

import pytest
import torch
from models import descend
from products import FREE
from torch import nn

from sparsify import Schedule, get_unmasker, sparsify, summary
from sparsify.selection import screening as screen
from sparsify.selection import topk as selection
from sparsify.selection.context import Work

SIZES = {"first": 64 * 32, "second": 64 * 64, "last": 32 * 64}
BIASES = 64 + 64 + 32
DENSE = Work(dense=sum(SIZES.values()) + BIASES)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))


def work_of(model, steps=1):
    return summary(descend(model, torch.randn(steps, 16, 32))).last_work


@pytest.fixture
def screened(monkeypatch):
    """Any layer is worth a screen."""
    monkeypatch.setattr(screen, "SMALLEST_SCREENED", 1)
    monkeypatch.setattr(screen, "costs_of", lambda *_: FREE)
    monkeypatch.setattr("sparsify.selection.small_tensors.LARGEST", 64)


def test_small_tensors_are_computed_densely_and_copies_count_for_themselves(model):
    sparsify(model, 30, steps=3, schedule=Schedule(every=2))
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert work_of(model) == DENSE
    assert work_of(model) == DENSE, "a step without a selection leaves the last one's"
    assert all(get_unmasker(other).work == Work() for other in others)


def test_the_first_gradient_of_a_step_is_dense_and_the_others_are_screened_or_skipped(model, screened):
    work = work_of(sparsify(model, 30, steps=3))
    assert work.dense == SIZES["last"] + BIASES
    assert work.screened + work.skipped == SIZES["first"] + SIZES["second"]
    assert work.screened > 0
    assert 0 < work.verified < 500
    assert work.wasted == 0


def test_a_screen_that_found_too_many_is_wasted(model, screened, monkeypatch):
    monkeypatch.setattr(screen, "costs_of", lambda *_: FREE._replace(entry=0.4))
    monkeypatch.setattr(selection, "SMALLEST_CUT", 1 << 12)  # the threshold stays that of the step's first gradient
    work = work_of(sparsify(model, 30, steps=3))
    assert work == Work(dense=DENSE.dense, wasted=SIZES["first"] + SIZES["second"])
    assert str(work) == "8,352 entries dense, 6,144 entries wasted"


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (Work(), "no entry was looked at"),
        (Work(screened=99_999, verified=1_234), "99,999 entries screened, 1,234 entries verified"),
        (Work(screened=2_100_000_000, dense=1), "2,100.0 M entries screened, 1 entries dense"),
    ],
)
def test_work_is_described_in_words(work, text):
    assert str(work) == text
