"""Some of the attacks of ``fuzz_attacks.py``, and that a broken promise is noticed."""

from collections import Counter

import fuzz_format
import pytest
from fuzz_attacks import ATTACKS
from fuzz_format import TARGETS, make_world, valid_files
from fuzzing import examine, run_alone
from limits import needs_limits

from sparsify.delta.patch_plan import PlannedWrite

pytestmark = needs_limits
ROUND = 5 * len(ATTACKS)  # files until every target has seen every kind of attack, and the quick ones five times


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


@pytest.mark.slow
def test_thousands_of_attacks():
    run_alone(fuzz_format, 72 * ROUND, seed=2)


def test_a_changed_model_is_noticed(tmp_path, monkeypatch):
    world = make_world(tmp_path)
    path = world.folder / "attack.safetensors"
    path.write_bytes(valid_files(world.folder)[0])
    monkeypatch.setattr(PlannedWrite, "inverse", lambda patch: patch)
    outcome = examine(path, {"apply": TARGETS["apply"]}, world)
    assert "BROKEN" in outcome
    assert "the model has changed" in outcome
