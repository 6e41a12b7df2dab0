"""Which entries a step unmasks: a policy says how many, and its selector finds them while gradients arrive.

static-S      selects nothing while the model trains
increment-S   selects masked entries up to the schedule's target; they stay unmasked
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from torch import Tensor

from sparsify.core.entries import Entries
from sparsify.core.gradients import Gradient
from sparsify.core.importance import Importance
from sparsify.core.schedule import Schedule
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import TopK, Winners
from sparsify.errors import SparsifyError


class Selector:
    """Selects the best masked entries of a step, from gradients that arrive one tensor at a time."""

    sees: Container[MaskedTensor] | None = None  # the tensors whose gradients it needs; None for all

    def __init__(self, topk: TopK, importance: Importance) -> None:
        self._topk, self._importance = topk, importance

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        """Takes the whole gradient of one tensor and returns that of its unmasked entries (k,).

        The gradient may be written to and is not used afterwards.
        """
        dense = gradient.dense()
        unmasked = dense.take(tensor.indices)
        dense.clear(tensor.not_candidates)  # an entry whose gradient is zero is never offered
        self._topk.offer(self._importance, tensor.matrix, dense.values, dense.rows, tensor.offset)
        return unmasked

    def winners(self) -> Winners:
        """Returns the selected entries, best first."""
        return self._topk.winners()

    def finite(self) -> Tensor:
        """Returns a bool scalar: whether the gradients seen are finite."""
        return self._topk.finite


class Policy:
    """static-S, and what it has in common with the other policies.

    ``importance`` scores the entries of the tensors; ``schedule`` says how the unmasked ones grow to the ``budget``.
    """

    static = True  # whether the unmasked set never changes
    kept = 0  # entries of the budget that are trained from the start, and that no schedule counts
    summed = 0  # optimizer steps up to the last one with several backward passes

    def __init__(
        self, importance: Any, schedule: Schedule, tensors: Sequence[MaskedTensor], entries: Entries, budget: int,
        steps: int | None, select: Callable[[Policy, int], Selector] | None = None,
    ) -> None:  # fmt: skip
        self.importance, self.schedule, self.tensors, self.entries = importance, schedule, tensors, entries
        self.budget, self.select = budget, select  # makes a selector of so many entries
        self.steps = steps  # optimizer steps planned; None where the number is not known
        self.active: Tensor | None = None  # (capacity,) bool, the slots that this step trains; None for all of them

    def growing(self) -> bool:
        """Whether entries may still be unmasked."""
        return False

    def quota(self) -> int:
        """Number of entries that the next step selects."""
        return 0

    def selector(self) -> Selector | None:
        """Makes the selector of a backward pass; ``None`` where nothing is to be selected."""
        number, values = self.quota(), self.entries.values
        if number and self.select is not None:
            return self.select(self, number)
        return Selector(TopK(number, values.dtype, values.device), self.importance) if number else None

    def unmask(self, winners: Winners) -> Winners:
        """Takes note of a step's winners, and returns those that get the next free slots, in this order."""
        return winners


class IncrementPolicy(Policy):
    """increment-S: a step unmasks up to the schedule's target and masks nothing (the paper's Algorithm 1)."""

    static = False

    def growing(self) -> bool:
        return self.entries.count < self.budget and (self.steps is None or self.entries.step < self.steps)

    def quota(self) -> int:
        if not self.growing():
            return 0
        if self.steps is None:
            problem = "the number of training steps is not known, so there is no telling how many entries to unmask"
            remedy = "pass steps= (optimizer steps, not batches) to sparsify(), set get_engine(model).steps, or give"
            raise SparsifyError(f"{problem}; {remedy} the Hugging Face Trainer callbacks=[SparsifyCallback()].")
        kept, entries = self.kept, self.entries
        return self.schedule.quota(entries.step, self.steps, self.budget - kept, entries.count - kept)
