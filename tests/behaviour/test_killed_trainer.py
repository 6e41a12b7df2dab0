"""Runs of the Trainer that are killed by ``kill_trainer.py`` and resumed."""

import sys

import pytest
from kill_trainer import kill

pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL and a fork server")


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_runs_that_are_killed_and_resumed_are_the_uninterrupted_one(kills, tmp_path):
    counts = kill(kills, seed=3, base=tmp_path)
    assert counts == {"any time": kills // 2, "writing": kills // 2}
