"""Schedules: cumulative numbers of unmasked entries over the optimizer steps.

A schedule gives the number of entries unmasked *after* each step, not how many to add: a step makes up for earlier ones
that found too few entries, and the last one reaches the budget exactly.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from sparsify.errors import SparsifyError, did_you_mean

SHAPES = {
    "uniform": lambda share: share,
    "linear": lambda share: 1 - (1 - share) ** 2,
    "cubic": lambda share: 1 - (1 - share) ** 3,
    # rounding restores the last bits that pi and cos lose, so that c(1/2) is 1/2
    "cosine": lambda share: Fraction(round((1 - math.cos(math.pi * float(share))) / 2, 15)),
}


@dataclass(frozen=True)
class Schedule:
    """How the unmasked set grows to the budget over training (the paper's unmasking scheduler).

    Args:
        shape: ``"uniform"`` c(s) = s, ``"linear"`` 1 - (1 - s)^2, ``"cubic"`` 1 - (1 - s)^3 or
            ``"cosine"`` (1 - cos(pi s)) / 2, with s the share of the unmasking done.
        every: steps 0, n, 2n, ... unmask the entries of n steps at once; the others unmask nothing.
        until: share of the steps after which the whole budget is unmasked, in (0, 1].

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
            near = did_you_mean(self.shape, SHAPES)
            raise SparsifyError(f"unknown schedule {self.shape!r}; expected one of {', '.join(SHAPES)}.{near}")
        if type(self.every) is not int or self.every < 1:
            raise SparsifyError(f"every={self.every!r} steps; expected an int of at least 1 (1 unmasks at each step).")
        if isinstance(self.until, bool) or not isinstance(self.until, (int, float)) or not 0 < self.until <= 1:
            raise SparsifyError(f"until={self.until!r}; expected a share of the steps in (0, 1], 1.0 for all of them.")

    def target(self, step: int, steps: int, budget: int) -> int:
        """Number of entries unmasked after a step, from 0, of T planned ``steps``; it may lie beyond the plan.

        It is floor(budget c(min(1, (t + 1) / (until T)))), in exact arithmetic, with t the last step of the ``every``
        block.
        """
        steps_covered = step - step % self.every + self.every
        share = min(Fraction(1), Fraction(steps_covered) / (Fraction(str(self.until)) * steps))
        return math.floor(budget * SHAPES[self.shape](share))

    def quota(self, step: int, steps: int, budget: int, unmasked: int) -> int:
        """Number of entries to unmask in a step, with ``unmasked`` before it: 0 between the multiples of ``every``."""
        if step >= steps or step % self.every:
            return 0
        return max(0, self.target(step, steps, budget) - unmasked)
