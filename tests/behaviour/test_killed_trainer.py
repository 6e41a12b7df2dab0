"""Two of the kills of ``kill_trainer.py``, and that it notices when a resumed run is not the uninterrupted one."""

import signal
import sys

import pytest
from kill_trainer import STEPS, finish, kill, last_complete, result, start

pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

linux_only = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL and a fork server")


@linux_only
def test_runs_that_are_killed_and_resumed_are_the_uninterrupted_one(tmp_path):
    counts, failure = kill(kills=2, seed=3, base=tmp_path)
    assert failure is None
    assert [counter.total() for counter in counts.values()] == [1, 1]


@linux_only
def test_a_run_that_dies_while_it_writes_a_checkpoint_is_resumed_from_the_one_before(tmp_path):
    process = start(tmp_path, (3, 6))  # the fourth checkpoint, in the middle
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / "checkpoint-4").is_dir()
    assert last_complete(tmp_path) == 3
    process = start(tmp_path)
    process.join()
    begun_at, (logs, *_) = result(tmp_path)
    assert begun_at == 3
    assert list(logs) == list(range(1, STEPS + 1))


@linux_only
def test_a_run_that_ends_elsewhere_is_a_failure(tmp_path):
    straight = start(tmp_path)
    straight.join()
    begun_at, (logs, *rest) = result(tmp_path)
    assert begun_at == 0
    logs[STEPS][0] += 1e-6
    assert "the resumed run ended elsewhere" in finish(tmp_path, (logs, *rest))
