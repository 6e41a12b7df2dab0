"""Some of the messages of ``fuzz_stream.py``, and that a broken promise is noticed."""

from collections import Counter

import fuzz_stream
import pytest
from fuzz_attacks import ATTACKS
from fuzz_stream import attacked, follow, make_cases
from fuzzing import examine, run_alone
from limits import needs_limits

from sparsify.delta.patch_plan import PlannedWrite

ROUND = 2 + len(ATTACKS)  # kinds of attack


@needs_limits
def test_damaged_messages_leave_the_version_before():
    messages = 8 * ROUND
    counts, failures = fuzz_stream.fuzz(messages, seed=1)
    assert failures == []
    assert len(counts) == ROUND
    outcomes = sum(counts.values(), start=Counter())
    assert outcomes.total() == messages
    assert outcomes["refused"] > messages / 2
    assert outcomes["applied"], "hashes are made to fit, so that some get through"


@needs_limits
@pytest.mark.slow
def test_ten_thousand_damaged_messages():
    run_alone(fuzz_stream, 715 * ROUND, seed=2)


@needs_limits
def test_a_wrong_model_is_noticed(tmp_path, monkeypatch):
    case, path = make_cases()[2], tmp_path / "message"

    def outcome(data, **other):
        path.write_bytes(data)
        return examine(path, {"applied": follow(case._replace(**other), genuine=True)}, None)

    assert outcome(case.message) == "applied"
    assert "a damaged message was applied" in outcome(case.message, after={})
    assert outcome(case.message[:-1]) == "refused"
    assert "has changed the model" in outcome(case.message[:-1], before={})
    with monkeypatch.context() as patch:
        patch.setattr(PlannedWrite, "write", lambda patch, target: None)
        assert "a damaged message was applied" in outcome(case.message)


def test_a_number_and_a_seed_give_the_same_attack():
    cases = make_cases()
    for number in range(ROUND):
        assert attacked(number, 7, cases)[2] == attacked(number, 7, cases)[2]
