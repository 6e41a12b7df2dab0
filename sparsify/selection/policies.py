"""Unmasking policies: the entries that a step selects, and how the unmasked set changes with them.

static-S      selects nothing while the model trains
increment-S   selects masked entries up to the schedule's target; they stay unmasked
repeat-S      selects the whole budget afresh at each step; an entry that leaves keeps its slot and gets no gradient

A policy holds settings, and what can be computed again from the weights. How far training is comes with each call.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify.common.devices import runs_ahead
from sparsify.common.ranks import Ranks, num_ranks
from sparsify.errors import SparsifyError
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.context import SelectionContext, Work
from sparsify.selection.device_topk import DeviceTopK
from sparsify.selection.distributed import DistributedSelector
from sparsify.selection.selectors import RankedSelector, Selector, StreamingSelector
from sparsify.selection.sharded import ShardedSelector
from sparsify.selection.static import rank_by_weight
from sparsify.selection.topk import TopK, Winners
from sparsify.strategies.importance import D3, Fisher
from sparsify.strategies.schedules import Schedule
from sparsify.strategies.strategy import Increment, Repeat


class Progress(NamedTuple):
    """How far training is."""

    step: int  # optimizer steps done
    steps: int | None  # optimizer steps planned; None where the number is not known
    unmasked: int  # entries unmasked so far
    budget: int  # entries to unmask in all


@dataclass(eq=False, repr=False)
class UnmaskingPolicy:
    """static-S, and what it has in common with the other policies.

    Attributes:
        static: whether the unmasked set never changes.
        active: (capacity,) bool, the slots that the step in progress trains; ``None`` for all of them.
    """

    importance: Any
    schedule: Schedule
    tensors: Sequence[MaskedTensor]  # by ascending offset
    seed: int  # of a random importance
    ranks: Ranks
    active: Tensor | None = field(default=None, init=False)

    static = True
    _masked_only = True  # whether unmasked entries are no candidates
    _warned = False

    def growing(self, progress: Progress) -> bool:
        """Whether entries may still be unmasked."""
        return False

    def quota(self, progress: Progress) -> int:
        """Number of entries that the next step selects."""
        return 0

    def selector(self, progress: Progress, values: Tensor, work: Work) -> Selector | None:
        """Makes the selector of a backward pass; ``None`` where nothing is to be selected.

        Args:
            progress: how far training is.
            values: (capacity,) the flat delta, for its dtype and device.
            work: counts the entries that the selector looks at.
        """
        number, values = self.quota(progress), values.detach()
        if not number:
            return None
        if not self.importance.uses_gradient:
            return RankedSelector(self._rank(progress, number, values), self.tensors, values)
        topk: TopK | DeviceTopK
        if runs_ahead(values.device):
            total = self.tensors[-1].offset + self.tensors[-1].numel
            topk = DeviceTopK(number, total, values.dtype, values.device)
        else:
            topk = TopK(number, values.dtype, values.device)
        context = SelectionContext(topk, self.importance, work, self._masked_only)
        if num_ranks() == 1:
            return StreamingSelector(context)
        if isinstance(topk, DeviceTopK):
            return ShardedSelector(context, self.ranks, self.tensors, values.dtype)
        return DistributedSelector(context, self.ranks, self.tensors)

    def unmask(self, winners: Winners, progress: Progress, slots: Tensor, capacity: int) -> Winners:
        """Takes note of a step's winners, and returns those that get the next free slots, in this order.

        Args:
            winners: what the selector found.
            progress: how far training was when they were selected.
            slots: (unmasked,) int64, the slots of the unmasked entries, tensor by tensor.
            capacity: number of slots.
        """
        if not winners.ids.numel():
            self._warn_of_none(progress.step)
        return winners

    def restart(self) -> None:
        """Forgets what depends on the unmasked set, which is another one now."""

    def _warn_of_none(self, step: int) -> None:
        """Warns once of an importance that left nothing to unmask."""
        if self._warned or isinstance(self.importance, (D3, Fisher)):  # which score any gradient that is not zero
            return
        self._warned = True
        scores = "above 0" if self.importance.uses_gradient else "that is finite"
        warnings.warn(
            f"the importance {self.importance.name!r} gave no masked entry a score {scores} in step {step:,}, "
            "so nothing was unmasked: NaN and infinite scores never count, nor do scores up to 0 of an importance of "
            "gradients. If the loss had a gradient in this step, correct the importance.",
            stacklevel=2,
        )

    def _rank(self, progress: Progress, number: int, values: Tensor) -> Tensor:
        """Global ids (number,) of the entries that come next by the weights alone."""
        raise NotImplementedError  # static-S selects nothing


class IncrementPolicy(UnmaskingPolicy):
    """increment-S: a step unmasks up to the schedule's target and masks nothing."""

    static = False
    # for an importance of the weights: the masked entries in order, and how many there were before the first of them
    _ranking: tuple[int, Tensor] | None = None

    def growing(self, progress: Progress) -> bool:
        return progress.unmasked < progress.budget and (progress.steps is None or progress.step < progress.steps)

    def quota(self, progress: Progress) -> int:
        if not self.growing(progress):
            return 0
        if progress.steps is None:
            raise SparsifyError(
                "the number of training steps is not known, so there is no telling how many entries to unmask in this "
                "one; pass steps= (optimizer steps, not batches) to sparsify(), set get_unmasker(model).steps, or give "
                "the Hugging Face Trainer callbacks=[SparsifyCallback()]."
            )
        return self.schedule.quota(progress.step, progress.steps, progress.budget, progress.unmasked)

    def restart(self) -> None:
        self._ranking = None

    def _rank(self, progress: Progress, number: int, values: Tensor) -> Tensor:
        if self._ranking is None:  # masked entries never change, so one ranking serves all steps
            topk = TopK(progress.budget - progress.unmasked, values.dtype, values.device)
            ranking = rank_by_weight(self.tensors, self.importance, topk, str(self.seed), masked_only=True)
            self._ranking = progress.unmasked, ranking
        first, ranking = self._ranking
        return ranking[progress.unmasked - first :][:number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ranking": None}


class RepeatPolicy(UnmaskingPolicy):
    """repeat-S: a step trains the best entries of all, as many as the budget has, as far as there are free slots."""

    static = False
    _masked_only = False

    def growing(self, progress: Progress) -> bool:
        return True

    def quota(self, progress: Progress) -> int:
        return progress.budget

    def unmask(self, winners: Winners, progress: Progress, slots: Tensor, capacity: int) -> Winners:
        ids, first = super().unmask(winners, progress, slots, capacity).ids, progress.unmasked
        touched = torch.cat([tensor.indices.to(ids) + tensor.offset for tensor in self.tensors])  # as the slots
        new = torch.isin(ids, touched, invert=True).nonzero().squeeze(1)[: capacity - first]
        self.active = torch.zeros(capacity, dtype=torch.bool, device=winners.grads.device)
        self.active[slots.to(ids)[torch.isin(touched, ids)]] = True
        self.active[first : first + new.numel()] = True
        return Winners(ids[new], winners.grads[new])

    def restart(self) -> None:
        self.active = None

    def _rank(self, progress: Progress, number: int, values: Tensor) -> Tensor:
        topk = TopK(number, values.dtype, values.device)
        return rank_by_weight(self.tensors, self.importance, topk, f"{self.seed}:{progress.step}")


POLICIES: dict[type, type[UnmaskingPolicy]] = {Increment: IncrementPolicy, Repeat: RepeatPolicy}  # else static-S
