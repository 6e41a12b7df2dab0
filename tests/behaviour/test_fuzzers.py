"""Some of the files and messages of the fuzzers."""

from collections import Counter

import fuzz_format
import fuzz_stream
import pytest
from fuzz_attacks import ATTACKS
from fuzzing import run_alone
from limits import needs_limits

pytestmark = needs_limits
KINDS = {attack.__name__.removeprefix("attack_") for attack in ATTACKS}
FILES = 5 * len(KINDS)  # until every target has seen every kind of attack, and the quick ones five times
MESSAGES = 10 * (1 + len(KINDS))


def test_files_end_well_or_in_an_error_of_ours():
    counts, failures = fuzz_format.fuzz(FILES, seed=7)
    assert failures == []
    assert set(counts) == KINDS
    outcomes = sum(counts.values(), start=Counter())
    assert outcomes.total() == FILES
    assert outcomes["refused"] > FILES / 4
    passed = Counter(target for outcome in outcomes.elements() for target in outcome.split())
    assert passed["load"] > FILES / 8
    assert set(passed) - {"refused"} == set(fuzz_format.TARGETS)


def test_messages_leave_the_version_before_or_are_applied():
    counts, failures = fuzz_stream.fuzz(MESSAGES, seed=1)
    assert failures == []
    assert set(counts) == KINDS | {"stream"}
    outcomes = sum(counts.values(), start=Counter())
    assert outcomes.total() == MESSAGES
    assert outcomes["refused"] > MESSAGES / 2
    assert outcomes["applied"], "hashes are made to fit, so that some get through"


@pytest.mark.slow
@pytest.mark.parametrize(("fuzzer", "number"), [(fuzz_format, 18 * FILES), (fuzz_stream, 10 * MESSAGES)])
def test_many_more_attacks(fuzzer, number):
    run_alone(fuzzer, number, seed=2)
