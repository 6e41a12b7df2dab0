"""Some of the attacks of ``fuzz_attacks.py``, and that a broken promise is noticed."""

import os
import sys
import time
from collections import Counter

import fuzz_format
import pytest
import torch
from fuzz_attacks import ATTACKS, attacked
from fuzz_format import TARGETS, examine, make_world, valid_files

from sparsify.delta.patch_plan import TensorPatch
from sparsify.delta.sparse_delta import SparseDelta

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and an address-space limit")
ROUND = 5 * len(ATTACKS)  # files until every target has seen every kind of attack


@linux_only
@pytest.mark.parametrize(
    ("files", "seed"), [(2 * ROUND, 1), pytest.param(72 * ROUND, 2, marks=pytest.mark.slow)], ids=["quick", "long"]
)
def test_attacks_end_well_or_in_an_error_of_ours(files, seed):
    counts, failures = fuzz_format.fuzz(files, seed)
    assert failures == [], f"seed {seed}"
    assert set(counts) == {attack.__name__.removeprefix("attack_") for attack in ATTACKS}
    outcomes = sum(counts.values(), start=Counter())
    assert outcomes.total() == files
    assert outcomes["refused"] > files / 4
    passed = Counter(target for outcome in outcomes.elements() for target in outcome.split())
    assert passed["load"] > files / 8
    assert set(passed) - {"refused"} == set(TARGETS)


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


@linux_only
def test_a_changed_model_and_a_delta_that_does_not_survive_saving_are_noticed(world, valid, monkeypatch):
    path, save = valid[0], SparseDelta.save
    assert all(examine(path, target, world, 2**40) is None for target in TARGETS.values())
    with monkeypatch.context() as patched:
        patched.setattr(TensorPatch, "inverse", lambda patch: patch)
        outcome = examine(path, TARGETS["apply"], world, 2**40)
    assert outcome == "BROKEN: AssertionError: 'the model has changed'"
    monkeypatch.setattr(SparseDelta, "save", lambda delta, to: save(SparseDelta({}, {"x": torch.ones(1)}), to))
    outcome = examine(path, TARGETS["load"], world, 2**40)
    assert outcome == "BROKEN: AssertionError: 'saved and loaded again, the delta is another'"


@linux_only
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_worker_that_dies_or_takes_too_much_is_a_failure(monkeypatch):
    def outcome_of(worker):
        return fuzz_format.run_batch([3], 0, {}, worker, "fork")

    assert outcome_of(take_too_much) == (3, "BROKEN: MemoryError: ''")
    assert outcome_of(die) == (3, "BROKEN: the worker died")
    monkeypatch.setattr(fuzz_format, "SECONDS", 1)
    assert outcome_of(hang) == (3, "BROKEN: it takes more than 1 seconds (merge after labels)")


def hang(numbers, seed, folder, results):
    results.send((numbers[0], "started", "merge after labels"))
    time.sleep(60)


def take_too_much(numbers, seed, folder, results):
    allowance = fuzz_format.ALLOWANCE
    outcome = examine(fuzz_format.Path(__file__), lambda path, world: bytearray(64 * allowance), None, allowance)
    results.send((numbers[0], outcome, ""))


def die(numbers, seed, folder, results):
    os._exit(1)
