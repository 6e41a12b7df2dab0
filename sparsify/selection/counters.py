"""What choosing a step's entries took: how many were looked at, and in which way.

Plain integers that are known from shapes and lengths: counting waits for no device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Work:
    """Entries by the way they were looked at, those that are no candidates among them.

    Of several ranks each counts its own, and may look at a tensor more than once.

    Attributes:
        screened: multiplied and compared tile by tile, in bfloat16 where the CPU has matrix units, to find those that
            could be among the best.
        verified: of these, those that could; once more computed in full where tiles are rounded.
        multiplied: with the gradient at hand of all of their tensor, or of all rows that were looked up, because it is
            small, because it comes that way, or because it was multiplied out.
        skipped: in no way, since the norms of a product's factors say that none of them could be among the best.
        vain: of those multiplied, whose norms, or a screen, had left too many before, or numbers that are not finite.
    """

    screened: int = 0
    verified: int = 0
    multiplied: int = 0
    skipped: int = 0
    vain: int = 0

    def __iadd__(self, other: Work) -> Work:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

    def __str__(self) -> str:
        """In words.

        Example:
            >>> print(Work(screened=84_934_656, verified=312, multiplied=600_123))
            84.9 M entries screened, 312 verified, 0.6 M multiplied out
        """
        parts = [f"{_short(self.screened)} entries screened, {self.verified:,} verified"] if self.screened else []
        if self.multiplied:
            parts.append(f"{_short(self.multiplied)}{'' if parts else ' entries'} multiplied out")
        if self.skipped:
            parts.append(f"{_short(self.skipped)} skipped")
        if self.vain:
            parts.append(f"{_short(self.vain)} screened in vain")
        return ", ".join(parts) or "nothing was looked at"


class Counters:
    """The work of an engine.

    Attributes:
        current: of the optimizer step in progress; selectors add to it.
        last: of the last step.
        total: of all steps since ``sparsify()``, that in progress apart.
    """

    def __init__(self) -> None:
        self.current = Work()
        self.last = Work()
        self.total = Work()

    def step_done(self) -> None:
        """The step in progress is the last one."""
        self.last, self.current = self.current, Work()
        self.total += self.last


def _short(number: int) -> str:
    return f"{number:,}" if number < 100_000 else f"{number / 1e6:,.1f} M"
