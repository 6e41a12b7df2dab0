"""Some of the attacks of ``fuzz_attacks.py``, and that a broken promise is noticed."""

import mmap
import os
import time
from collections import Counter

import fuzz_format
import fuzzing
import pytest
import torch
from fuzz_attacks import ATTACKS, attacked
from fuzz_format import TARGETS, make_world, valid_files
from fuzzing import examine, run_alone
from limits import needs_limits

from sparsify.delta.patch_plan import PlannedWrite
from sparsify.delta.sparse_delta import SparseDelta

ROUND = 5 * len(ATTACKS)  # files until every target has seen every kind of attack, and the quick ones five times


@needs_limits
def test_attacks_end_well_or_in_an_error_of_ours():
    counts, failures = fuzz_format.fuzz(ROUND, seed=4)
    assert failures == []
    assert set(counts) == {attack.__name__.removeprefix("attack_") for attack in ATTACKS}
    outcomes = sum(counts.values(), start=Counter())
    assert outcomes.total() == ROUND
    assert outcomes["refused"] > ROUND / 4
    passed = Counter(target for outcome in outcomes.elements() for target in outcome.split())
    assert passed["load"] > ROUND / 8
    assert set(passed) - {"refused"} == set(TARGETS)


@needs_limits
@pytest.mark.slow
def test_thousands_of_attacks():
    run_alone(fuzz_format, 72 * ROUND, seed=2)


@pytest.fixture
def world(tmp_path):
    return make_world(tmp_path)


@pytest.fixture
def valid(world):
    """A valid file in the world's folder, and the bytes of all."""
    files = valid_files(world.folder)
    (world.folder / "attack.safetensors").write_bytes(files[0])
    return world.folder / "attack.safetensors", files


def test_a_number_and_a_seed_give_the_same_attack(valid):
    for number in range(len(ATTACKS)):
        assert attacked(number, 7, valid[1]) == attacked(number, 7, list(valid[1]))


@needs_limits
def test_a_changed_model_and_a_delta_that_does_not_survive_saving_are_noticed(world, valid, monkeypatch):
    path, save = valid[0], SparseDelta.save
    assert examine(path, TARGETS, world, 400) == " ".join(TARGETS)
    with monkeypatch.context() as patched:
        patched.setattr(PlannedWrite, "inverse", lambda patch: patch)
        outcome = examine(path, {"apply": TARGETS["apply"]}, world)
    assert "BROKEN" in outcome
    assert "the model has changed" in outcome
    monkeypatch.setattr(SparseDelta, "save", lambda delta, to: save(SparseDelta({}, {"x": torch.ones(1)}), to))
    outcome = examine(path, {"load": TARGETS["load"]}, world)
    assert "BROKEN" in outcome
    assert "saved and loaded again, the delta is another" in outcome


@needs_limits
@pytest.mark.parametrize(
    ("attack", "seconds", "outcome"),
    [
        (lambda *_: mmap.mmap(-1, 2**29), 20, "Cannot allocate memory"),  # a bytearray may fit into what malloc keeps
        (lambda *_: os._exit(1), 20, "killed: it took more than 20 s, or died"),
        (lambda *_: time.sleep(60), 1, "killed: it took more than 1 s, or died"),
    ],
)
def test_a_target_that_dies_or_takes_too_much_is_a_failure(world, valid, monkeypatch, attack, seconds, outcome):
    monkeypatch.setattr(fuzzing, "SECONDS", seconds)
    assert outcome in examine(valid[0], {"attack": attack}, world)
