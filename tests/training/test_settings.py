"""A state of other settings is refused before anything has changed, and a run is extended on purpose, exactly."""

import copy
import json

import numpy as np
import pytest
import torch
from deltas import unchanged
from models import build, loss_of
from models import run_steps as run
from oracle import unmasked_sets
from torch import nn

from sparsify import SparseDelta, SparsifyError, extend, get_engine, sparsify, summary, trained_state
from sparsify.common.names import SETTINGS
from sparsify.core.importance import D3
from sparsify.core.schedule import Schedule
from sparsify.strategies.importance import Magnitude, Random
from sparsify.strategies.strategy import Increment, Repeat, Strategy

BUDGET, STEPS = 40, 8
PLAIN, BATCHES = build("mlp", seed=0)
RANDOM_STEPS, ROOM = Strategy(Random(), Increment()), Strategy(D3(), Repeat(capacity=60))


def made(budget=BUDGET, strategy="id3", steps=STEPS, **options):
    return sparsify(copy.deepcopy(PLAIN), budget, strategy, steps=steps, **options)


OTHERS = {
    "strategy": ({}, {"strategy": "pafi"}, "'d3', 'exp': 2, 'eps': 1}, selection=.*, and .* importance={'name': 'mag"),
    "schedule": ({}, {"schedule": Schedule(every=2)}, "'every': 1, 'until': 1.0}, and .*'uniform', 'every': 2"),
    "steps": ({}, {"steps": 16}, r"steps=8, and .* steps=16; nothing was loaded.*extend\(model, \.\.\.\) gives more"),
    "static": ({"strategy": "pafi"}, {"strategy": "pafi", "budget": 50}, r"budget=40, and .* budget=50; "),
    "candidates": (
        {"target_modules": ["first", "head"]}, {"target_modules": ["second", "head"]},
        r"candidates=4 tensors of 97 entries, digest \w+, and .*=4 tensors of 115 .* target_modules and",
    ),
    "repeat's room": (
        {"budget": 5, "strategy": "d3-repeat", "steps": 4}, {"budget": 5, "strategy": "d3-repeat"},
        r"capacity=20, and .*capacity=40",
    ),
    "seed": ({"strategy": RANDOM_STEPS}, {"strategy": RANDOM_STEPS, "seed": 1}, "seed=0, and .* seed=1"),
    "given set": (
        {"budget": None, "strategy": {"head.weight": torch.arange(5)}},
        {"budget": None, "strategy": {"head.weight": torch.arange(1, 6)}},
        r"entries=5 given ones, digest \w+, and",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kept", [trained_state, nn.Module.state_dict], ids=["trained", "whole"])
@pytest.mark.parametrize("case", OTHERS)
def test_a_state_of_other_settings_is_refused_and_nothing_is_loaded(case, kept):
    options, others, message = OTHERS[case]
    saved, model = made(**options), made(**others)
    run(saved, BATCHES[:2])
    run(model, BATCHES[2:3])
    with unchanged(model), pytest.raises(SparsifyError, match=message):
        model.load_state_dict(copy.deepcopy(dict(kept(saved))), strict=False)
    run(model, BATCHES[3:4])


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({}, {"seed": 1}),
        ({"strategy": "random"}, {"strategy": "random", "seed": 1, "steps": None, "schedule": "cubic"}),
        ({"strategy": Strategy(Magnitude(), Increment())}, {"strategy": Strategy(Magnitude(), Increment()), "seed": 1}),
        ({"budget": 5, "strategy": ROOM, "steps": 4}, {"budget": 5, "strategy": ROOM, "steps": None}),
    ],
)
def test_settings_that_do_not_matter_to_what_follows_are_not_compared(options, others):
    saved, model = made(**options), made(**others)
    run(saved, BATCHES[:2])
    model.load_state_dict(copy.deepcopy(trained_state(saved)))
    assert unmasked_sets(model) == unmasked_sets(saved)


def test_steps_that_are_not_known_are_those_of_the_saved_run():
    saved, model = made(steps=None), made(steps=None)
    get_engine(saved).steps = STEPS  # known late
    run(saved, BATCHES[:2])
    model.load_state_dict(copy.deepcopy(trained_state(saved)))
    assert get_engine(model).steps == STEPS
    made(steps=4).load_state_dict(made(steps=None).state_dict())  # and the other way
    assert model.state_dict()[SETTINGS].shape == made(steps=None).state_dict()[SETTINGS].shape  # an EMA copies it


@pytest.mark.parametrize("text", [b"", b"\xff", b"[]", b"{", b'{"steps": "8"}', b'{"budget": -1}', b"[" * 100_000])
def test_damaged_settings_are_refused(text):
    model = made()
    state = {**model.state_dict(), SETTINGS: torch.tensor(list(text), dtype=torch.uint8)}
    with pytest.raises(SparsifyError, match="`sparse_settings` of the state dict is damaged"):
        model.load_state_dict(state)


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_extended_run_is_the_one_that_had_the_larger_budget_from_the_start(name, resumed):
    batches = [*BATCHES, *BATCHES][: 2 * STEPS]
    straight = made(2 * BUDGET, steps=2 * STEPS)  # as many entries a step
    losses, optimizer = run(straight, batches, OPTIMIZERS[name]([straight.sparse_values]))

    model = made()
    head, optimizer = run(model, batches[:4], OPTIMIZERS[name]([model.sparse_values]))
    if resumed:
        state, moments = copy.deepcopy((trained_state(model), optimizer.state_dict()))
        model = made()
        model.load_state_dict(state)
        optimizer = OPTIMIZERS[name]([model.sparse_values])
        optimizer.load_state_dict(moments)
    extend(model, budget=2 * BUDGET, steps=np.int64(2 * STEPS), optimizer=optimizer)
    json.dumps(SparseDelta.from_model(model).config)
    assert model.sparse_values.numel() == 2 * BUDGET
    assert head + run(model, batches[4:], optimizer)[0] == losses
    assert unmasked_sets(model) == unmasked_sets(straight)
    assert summary(model, verify=True).verification.ok
    assert SparseDelta.from_model(model).config["budget"] == 2 * BUDGET


def test_a_run_with_more_steps_keeps_what_is_unmasked_and_is_verified_all_along():
    model = made()
    _, optimizer = run(model, BATCHES[:4])
    extend(model, steps=2 * STEPS)
    counts = []
    for batch in [*BATCHES[4:], *BATCHES][:12]:
        run(model, [batch], optimizer)
        counts.append(get_engine(model).unmasked)
        assert summary(model, verify=True).verification.ok
        copied = made(steps=2 * STEPS)
        copied.load_state_dict(copy.deepcopy(trained_state(model)))
        assert summary(copied, verify=True).verification.ok
    assert counts == [20, 20, 20, 20, 22, 25, 27, 30, 32, 35, 37, 40]


def test_a_run_whose_room_is_used_up_gets_more():
    model = made(5, "d3-repeat", steps=2)
    _, optimizer = run(model, BATCHES[:2])
    extend(model, steps=4, optimizer=optimizer)
    assert model.sparse_values.numel() == 20
    run(model, BATCHES[2:4], optimizer)
    assert summary(model, verify=True).verification.ok


@pytest.mark.parametrize(
    ("options", "extension", "message"),
    [
        ({}, {"budget": 30}, r"extend\(budget=30, steps=None\) of a run with budget=40 and steps=8; expected no less"),
        ({}, {"steps": 9.5}, r"steps=9.5; expected the planned number"),
        ({"steps": None}, {"steps": 0}, "steps=0; expected"),
        ({}, {"budget": 10_000}, "the number of candidates"),
        ({"strategy": "pafi"}, {"budget": 50}, r"extend\(budget=50\) with Static.*chosen before training"),
        ({}, {"budget": 50, "optimizer": torch.optim.SGD([nn.Linear(1, 1).weight])}, "does not hold `sparse_values"),
    ],
)
def test_what_is_no_extension_is_refused_and_changes_nothing(options, extension, message):
    model = made(**options)
    with unchanged(model), pytest.raises(SparsifyError, match=message):
        extend(model, **extension)


def test_more_budget_for_a_run_that_has_done_its_steps_wants_more_steps_too():
    model = made()
    run(model, BATCHES)
    with unchanged(model), pytest.raises(SparsifyError, match=r"after the last of \d+ steps: give more steps too"):
        extend(model, budget=2 * BUDGET)


def test_a_run_is_extended_between_steps_only():
    model = made()
    loss_of(model, BATCHES[0]).backward()
    with pytest.raises(SparsifyError, match="between a backward pass and its optimizer step"):
        extend(model, steps=9)
