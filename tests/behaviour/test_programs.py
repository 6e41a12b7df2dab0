"""Random training programs against the dense oracle; a failure prints the program and its seed."""

import pytest
import torch
from program_ranks import run_all
from program_runs import run
from programs import program
from rank_processes import on_ranks

ALL = [*range(200), 2400, 2949]  # where an idle step counts, and where rounding chooses one entry more
pytestmark = pytest.mark.filterwarnings("ignore:.*got no gradient in the first step")


@pytest.mark.parametrize("seed", ALL)
def test_a_random_program_is_the_oracle(seed):
    check(seed)


@pytest.mark.parametrize("seed", ALL[::4])
def test_as_on_a_gpu_too(seed, monkeypatch):
    monkeypatch.setattr("sparsify.core.devices.AHEAD", ("cpu",))
    check(seed)


def check(seed):
    both = run(program(seed))  # which compares the two after each action
    trained = dict(both.sparse.named_parameters())
    for name, expected in both.dense.model.named_parameters():
        torch.testing.assert_close(trained[name], expected, rtol=0, atol=10 * both.rounding)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["DDP", "HSDP", "TP, DDP", "TP, FSDP2"])
def test_a_random_program_on_two_times_two_ranks_is_the_oracle(engine):
    on_ranks(4, run_all, engine, [*range(3), 30])  # 30 has entries of -0.0 in its first set
