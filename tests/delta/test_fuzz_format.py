"""A few hundred of the damaged files of ``fuzz_format.py`` and of the attacks of ``fuzz_grammar.py``.

And that a broken promise is noticed.
"""

import sys
import time
from collections import Counter

import fuzz_format
import fuzz_targets
import pytest
import torch
from fuzz_format import MUTATIONS, damaged, examine, fuzz, good_files, make_model
from fuzz_grammar import ATTACKS, attacked
from fuzz_targets import valid_files

from sparsify.delta.patch_plan import TensorPatch
from sparsify.delta.sparse_delta import SparseDelta

QUICK, SLOW = ("load", "info", "apply", "verify"), ("merge", "load_model")  # targets
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and an address-space limit")


@linux_only
def test_damaged_files_are_refused_or_valid():
    counts, failure = fuzz(files=300, seed=1)
    assert failure is None
    assert set(counts) == {mutation.__name__ for mutation in MUTATIONS}
    total = sum(counts.values(), start=Counter())
    assert total.total() == 300
    assert total["refused"] > 150
    assert total["valid, applied"] > 10


def test_a_number_and_a_seed_give_the_same_file():
    good = good_files()
    for number in range(len(MUTATIONS)):
        assert damaged(number, 7, good) == damaged(number, 7, good_files())


def check_attacks(files, seed, targets, step=1):
    counts, failures = fuzz_targets.fuzz(files, seed, targets=targets, step=step)
    assert failures == [], f"seed {seed}"
    assert set(counts) == {attack.__name__.removeprefix("attack_") for attack in ATTACKS}
    outcomes = sum(counts.values(), start=Counter())
    assert outcomes.total() == files
    assert outcomes["refused"] > files / 10
    for target in targets:
        assert sum(number for outcome, number in outcomes.items() if target in outcome.split()) > files / 50


@linux_only
@pytest.mark.parametrize("targets", [QUICK, SLOW], ids="-".join)
def test_attacks_from_the_formats_grammar_end_well_or_in_an_error_of_ours(targets):
    check_attacks(120, 1, targets)


@linux_only
@pytest.mark.slow
def test_thousands_of_attacks_end_well_or_in_an_error_of_ours():
    """All files through what is fast; every fifth, of all kinds of attack, through what loads the base each time."""
    check_attacks(5000, 2, QUICK)
    check_attacks(1000, 2, SLOW, step=5)


def test_a_number_and_a_seed_give_the_same_attack(tmp_path):
    valid = valid_files(tmp_path)
    for number in range(len(ATTACKS)):
        assert attacked(number, 7, valid) == attacked(number, 7, list(valid))


@linux_only
def test_a_worker_that_dies_or_takes_too_much_is_a_failure(monkeypatch):
    monkeypatch.setattr(fuzz_format, "work", take_too_much)
    assert fuzz_format.run_batch([3], 0, {}) == (3, "BROKEN: MemoryError")
    monkeypatch.setattr(fuzz_format, "work", die)
    assert fuzz_format.run_batch([3], 0, {}) == (3, "BROKEN: the worker died")
    monkeypatch.setattr(fuzz_format, "SECONDS", 1)
    assert fuzz_format.run_batch([3], 0, {}, hang) == (3, "BROKEN: it takes more than 1 seconds (merge after labels)")


def hang(numbers, seed, folder, results):
    results.send((numbers[0], "started", "merge after labels"))
    time.sleep(60)


def take_too_much(numbers, seed, folder, results):
    fuzz_format.limit_address_space(fuzz_format.address_space() + fuzz_format.ALLOWANCE)
    try:
        bytearray(2 * fuzz_format.ALLOWANCE)
    except MemoryError:
        results.send((numbers[0], "BROKEN: MemoryError", ""))


def die(numbers, seed, folder, results):
    import os

    os.abort()


def test_a_model_that_changes_is_noticed(tmp_path, monkeypatch):
    model, path = make_model(), tmp_path / "x.safetensors"
    untouched = fuzz_format.bits(model)
    path.write_bytes(good_files()[0])
    assert examine(path, model, untouched) == "valid, applied"
    monkeypatch.setattr(TensorPatch, "inverse", lambda patch: patch)
    with pytest.raises(AssertionError, match="the model has changed"):
        examine(path, model, untouched)


def test_a_delta_that_does_not_survive_saving_is_noticed(tmp_path, monkeypatch):
    path, save = tmp_path / "x.safetensors", SparseDelta.save
    path.write_bytes(good_files()[0])
    monkeypatch.setattr(SparseDelta, "save", lambda delta, to: save(SparseDelta({}, {"x": torch.ones(1)}), to))
    with pytest.raises(AssertionError, match="saved and loaded again, the delta is another"):
        examine(path, make_model(), {})
