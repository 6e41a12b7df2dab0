"""Random training programs against the dense oracle; a failure prints the program and its seed."""

import pytest
import torch
from program_oracle import IMPORTANCES, OPTIMIZERS, ROUNDING
from program_runs import SELECTIONS, run
from programs import HEADS, KINDS, PARTS, program

ALL = 200
pytestmark = pytest.mark.filterwarnings("ignore:.*got no gradient in the first step")


@pytest.mark.parametrize("seed", range(ALL))
def test_a_random_program_is_the_oracle(seed):
    both = run(program(seed))  # which compares the two after each action
    trained = dict(both.sparse.named_parameters())
    for name, expected in both.dense.model.named_parameters():
        torch.testing.assert_close(trained[name], expected, rtol=0, atol=10 * both.rounding)


def test_the_programs_have_everything_in_them():
    programs = [program(seed) for seed in range(ALL)]
    assert {part for each in programs for part in each.parts} == set(PARTS)
    assert {each.head for each in programs} == set(HEADS)
    assert {each.dtype for each in programs} == set(ROUNDING)
    assert {each.optimizer for each in programs} == set(OPTIMIZERS)
    assert {each.selection for each in programs} == {*SELECTIONS, "given"}
    assert {each.importance for each in programs if each.selection == "increment"} == set(IMPORTANCES)
    actions = [action for each in programs for action in each.script]
    assert {(name, kind) for name, kinds in KINDS.items() for kind in kinds} <= {action[:2] for action in actions}
    assert any(action[0] == "backward" and action[-1] is not None for action in actions)  # an overflow
