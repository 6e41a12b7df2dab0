"""When entries are unmasked: cumulative targets over the optimizer steps.

A schedule says how many entries are unmasked *after* each step, never how many to add: places that a step could not
fill are caught up by the next one, and the last step lands on the budget exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction

from sparsify.errors import SparsifyError


def _cosine(share: Fraction) -> Fraction:
    # rounding takes back the last bits that pi and cos lose, so that c(1/2) is 1/2
    return Fraction(round((1 - math.cos(math.pi * float(share))) / 2, 15))


SHAPES = {
    "uniform": lambda share: share,
    "linear": lambda share: 1 - (1 - share) ** 2,
    "cubic": lambda share: 1 - (1 - share) ** 3,
    "cosine": _cosine,
}


@dataclass(frozen=True)
class Schedule:
    """How the unmasked set grows to the budget over training (the paper's unmasking scheduler).

    Args:
        shape: ``"uniform"`` c(s) = s, ``"linear"`` 1 - (1 - s)^2, ``"cubic"`` 1 - (1 - s)^3 or
            ``"cosine"`` (1 - cos(pi s)) / 2, with s the share of the unmasking done.
        every: steps 0, n, 2n, ... unmask at once what the n steps from there on would; the others unmask nothing and
            need no selection.
        until: share of the steps after which the budget is full, in (0, 1].

    Raises:
        SparsifyError: for an unknown shape, ``every`` below 1, or ``until`` outside (0, 1].

    Example:
        >>> [Schedule().target(step, steps=4, budget=10) for step in range(5)]
        [2, 5, 7, 10, 10]
        >>> [Schedule(every=2).target(step, steps=4, budget=10) for step in range(4)]
        [5, 5, 10, 10]
    """

    shape: str = "uniform"
    every: int = 1
    until: float = 1.0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            near = get_close_matches(str(self.shape), SHAPES, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise SparsifyError(f"unknown schedule {self.shape!r}; expected one of {', '.join(SHAPES)}.{hint}")
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise SparsifyError(f"every={self.every!r} steps; expected an int of at least 1 (1 unmasks at each step).")
        if isinstance(self.until, bool) or not isinstance(self.until, (int, float)) or not 0 < self.until <= 1:
            raise SparsifyError(
                f"until={self.until!r}; expected a share of the steps in (0, 1], 1.0 to unmask until the last step."
            )

    def target(self, step: int, steps: int, budget: int) -> int:
        """Number of entries unmasked after an optimizer step.

        Args:
            step: the optimizer step, counted from 0; may lie beyond the plan.
            steps: the planned number of optimizer steps T.
            budget: the number of entries B.

        Returns:
            floor(B c(min(1, (t + 1) / (until T)))), in exact arithmetic, with t the last step of the ``every`` block.
        """
        steps_covered = step - step % self.every + self.every
        share = min(Fraction(1), Fraction(steps_covered) / (Fraction(str(self.until)) * steps))
        return math.floor(budget * SHAPES[self.shape](share))

    def quota(self, step: int, steps: int, budget: int, unmasked: int) -> int:
        """Number of entries to unmask in an optimizer step, given how many are unmasked before it.

        What earlier steps could not fill is caught up; steps between the multiples of ``every`` and steps beyond the
        plan unmask nothing.
        """
        if step >= steps or step % self.every:
            return 0
        return max(0, self.target(step, steps, budget) - unmasked)


def resolve_schedule(schedule: str | Schedule) -> Schedule:
    """The schedule itself, or the one with the given name's shape.

    Raises:
        SparsifyError: when it is neither.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, str):
        return Schedule(schedule)
    raise SparsifyError(f"schedule={schedule!r}; expected a name ({', '.join(SHAPES)}) or a Schedule.")
