"""What choosing took is counted by the way it went, for the last step and in total."""

import copy
import pickle

import pytest
import torch
from products import FREE
from torch import nn

from sparsify import Schedule, get_unmasker, sparsify, summary
from sparsify.selection import screening as screen
from sparsify.selection import topk as selection
from sparsify.selection.counters import Counters, Work

SIZES = {"first": 64 * 32, "second": 64 * 64, "last": 32 * 64}
BIASES = 64 + 64 + 32


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))


def train(model, steps=1):
    optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
    return summary(model)


@pytest.fixture
def screened(monkeypatch):
    """Any layer is worth a screen."""
    monkeypatch.setattr(screen, "SMALLEST_SCREENED", 1)
    monkeypatch.setattr(screen, "costs_of", lambda *_: FREE)
    monkeypatch.setattr("sparsify.selection.small_tensors.LARGEST", 64)


def test_small_tensors_are_all_multiplied_out(model):
    found = train(sparsify(model, 30, steps=3))
    assert found.last_work == found.total_work == Work(multiplied=sum(SIZES.values()) + BIASES)


def test_the_first_gradient_of_a_step_is_whole_and_the_others_are_screened_or_skipped(model, screened):
    found = train(sparsify(model, 30, steps=3))
    assert found.last_work.multiplied == SIZES["last"] + BIASES
    assert found.last_work.screened + found.last_work.skipped == SIZES["first"] + SIZES["second"]
    assert found.last_work.screened > 0
    assert 0 < found.last_work.verified < 500
    assert found.last_work.vain == 0


def test_a_screen_that_found_too_many_is_in_vain(model, screened, monkeypatch):
    monkeypatch.setattr(screen, "costs_of", lambda *_: FREE._replace(entry=0.4))
    monkeypatch.setattr(selection, "SMALLEST_CUT", 1 << 12)  # the threshold stays that of the step's first gradient
    found = train(sparsify(model, 30, steps=3))
    assert found.last_work == Work(multiplied=sum(SIZES.values()) + BIASES, vain=SIZES["first"] + SIZES["second"])
    assert str(found.last_work) == "8,352 entries multiplied out, 6,144 screened in vain"


def test_steps_add_up_and_one_that_chooses_nothing_looks_at_nothing(model):
    sparsify(model, 30, steps=4, schedule=Schedule(every=2))
    one = sum(SIZES.values()) + BIASES
    assert [train(model).last_work.multiplied for _ in range(5)] == [one, 0, one, 0, 0]
    assert summary(model).total_work == Work(multiplied=2 * one)


def test_a_total_that_was_read_stays_as_it_was(model):
    before = train(sparsify(model, 30, steps=3)).total_work
    train(model)
    assert before.multiplied * 2 == summary(model).total_work.multiplied


def test_copies_count_for_themselves(model):
    train(sparsify(model, 30, steps=3))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        train(other)
        assert summary(other).total_work.multiplied == 2 * summary(model).total_work.multiplied
        assert get_unmasker(other).counters is not get_unmasker(model).counters


def test_a_step_in_progress_is_not_the_last_one_yet():
    counters = Counters()
    counters.current.screened += 5
    assert counters.last == counters.total == Work()
    counters.step_done()
    assert counters.last == counters.total == Work(screened=5)
    assert counters.current == Work()


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (Work(), "nothing was looked at"),
        (Work(multiplied=512), "512 entries multiplied out"),
        (Work(screened=99_999, verified=1_234), "99,999 entries screened, 1,234 verified"),
        (Work(screened=2_100_000_000, multiplied=1), "2,100.0 M entries screened, 0 verified, 1 multiplied out"),
    ],
)  # fmt: skip
def test_words(work, text):
    assert str(work) == text
