"""Random training programs against the dense oracle; a failure prints the program and its seed."""

import pytest
import torch
from program_runs import run
from programs import program

ALL = 200
pytestmark = pytest.mark.filterwarnings("ignore:.*got no gradient in the first step")


@pytest.mark.parametrize("seed", range(ALL))
def test_a_random_program_is_the_oracle(seed):
    both = run(program(seed))  # which compares the two after each action
    trained = dict(both.sparse.named_parameters())
    for name, expected in both.dense.model.named_parameters():
        torch.testing.assert_close(trained[name], expected, rtol=0, atol=10 * both.rounding)
