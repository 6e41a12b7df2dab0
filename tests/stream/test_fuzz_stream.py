"""Some of the messages of ``fuzz_stream.py``, and that a broken promise is noticed."""

from collections import Counter

import fuzz_stream
import pytest
from fuzz_attacks import ATTACKS
from fuzz_stream import follow, make_cases
from fuzzing import examine, run_alone
from limits import needs_limits

from sparsify.delta.patch_plan import PlannedWrite

pytestmark = needs_limits
ROUND = 2 + len(ATTACKS)  # kinds of attack


def test_damaged_messages_leave_the_version_before():
    messages = 8 * ROUND
    counts, failures = fuzz_stream.fuzz(messages, seed=1)
    assert failures == []
    assert len(counts) == ROUND
    outcomes = sum(counts.values(), start=Counter())
    assert outcomes.total() == messages
    assert outcomes["refused"] > messages / 2
    assert outcomes["applied"], "hashes are made to fit, so that some get through"


@pytest.mark.slow
def test_ten_thousand_damaged_messages():
    run_alone(fuzz_stream, 715 * ROUND, seed=2)


def test_a_wrong_model_is_noticed(tmp_path, monkeypatch):
    case, path = make_cases()[2], tmp_path / "message"
    path.write_bytes(case.message)
    monkeypatch.setattr(PlannedWrite, "write", lambda patch, target: None)
    assert "a damaged message was applied" in examine(path, {"applied": follow(case, genuine=True)}, None)
