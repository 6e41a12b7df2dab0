"""Some of the messages of ``fuzz_stream.py``, and that a broken promise is noticed."""

from collections import Counter

import fuzz_stream
import pytest
from fuzz_attacks import ATTACKS
from fuzz_format import examine
from fuzz_stream import attacked, follow, make_cases
from limits import needs_limits

from sparsify.delta.patch_plan import TensorPatch

ROUND = 2 + len(ATTACKS)  # kinds of attack


@needs_limits
@pytest.mark.parametrize(
    ("messages", "seed"), [(8 * ROUND, 1), pytest.param(715 * ROUND, 2, marks=pytest.mark.slow)], ids=["quick", "long"]
)
def test_damaged_messages_leave_the_version_before(messages, seed):
    counts, failures = fuzz_stream.fuzz(messages, seed)
    assert failures == [], f"seed {seed}"
    assert len(counts) == ROUND
    outcomes = sum(counts.values(), start=Counter())
    assert outcomes.total() == messages
    assert outcomes["refused"] > messages / 2
    assert outcomes["applied"], "hashes are made to fit, so that some get through"


@needs_limits
def test_a_wrong_model_is_noticed(tmp_path, monkeypatch):
    case, path = make_cases()[2], tmp_path / "message"
    path.write_bytes(case.message)
    assert examine(path, follow(case, genuine=True), None) is None
    assert "a damaged message was applied" in examine(path, follow(case._replace(after={}), genuine=True), None)
    path.write_bytes(case.message[:-1])
    assert "this is no update that can be used" in examine(path, follow(case, genuine=True), None)
    assert "has changed the model" in examine(path, follow(case._replace(before={}), genuine=True), None)
    path.write_bytes(case.message)
    with monkeypatch.context() as patch:
        patch.setattr(TensorPatch, "write", lambda patch, target: None)
        assert "a damaged message was applied" in examine(path, follow(case, genuine=True), None)


def test_a_number_and_a_seed_give_the_same_attack():
    cases = make_cases()
    for number in range(ROUND):
        assert attacked(number, 7, cases)[2] == attacked(number, 7, cases)[2]
