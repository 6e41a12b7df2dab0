"""Unmasking policies: the entries that a step selects, and how the unmasked set changes with them.

static-S      selects nothing while the model trains
increment-S   selects masked entries up to the schedule's target; they stay unmasked
repeat-S      selects the whole budget afresh at each step; an entry that leaves keeps its slot and gets no gradient

A policy holds settings, and what can be computed again from the weights. How far training is comes with each call.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify.common.devices import runs_ahead
from sparsify.common.ranks import Ranks, num_ranks
from sparsify.errors import SparsifyError
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.context import SelectionContext, Work
from sparsify.selection.dense_check import CheckedSelector
from sparsify.selection.device_topk import DeviceSelector
from sparsify.selection.distributed import DistributedSelector
from sparsify.selection.selectors import RankedSelector, Selector, StreamingSelector
from sparsify.selection.static import rank_by_weight
from sparsify.selection.topk import TopK, Winners
from sparsify.strategies.importance import D3, Fisher, GradientImportance
from sparsify.strategies.schedules import Schedule
from sparsify.strategies.strategy import Increment, Repeat, Strategy


class Progress(NamedTuple):
    """How far training is."""

    step: int  # optimizer steps done
    steps: int | None  # optimizer steps planned; None where the number is not known
    unmasked: int  # entries unmasked so far
    budget: int  # entries to unmask in all


class UnmaskingPolicy:
    """static-S, and what it has in common with the other policies.

    Args:
        strategy: the importance and the selection.
        schedule: how the unmasked set grows.
        seed: of a random importance.
        ranks: the other ranks, if there are any.
        sync_mode: how several ranks select the same entries: ``"exact"`` or ``"candidates"``.

    Attributes:
        static: whether the unmasked set never changes.
        active: (capacity,) bool, the slots that the step in progress trains; ``None`` for all of them.
    """

    static = True
    active: Tensor | None = None
    _masked_only = True  # whether unmasked entries are no candidates
    _warned = False

    def __init__(self, strategy: Strategy, schedule: Schedule, *, seed: int, ranks: Ranks, sync_mode: str) -> None:
        self._importance: Any = strategy.importance
        self._schedule = schedule
        self._seed = seed
        self._ranks = ranks
        self._sync_mode = sync_mode

    def growing(self, progress: Progress) -> bool:
        """Whether entries may still be unmasked."""
        return False

    def quota(self, progress: Progress) -> int:
        """Number of entries that the next step selects."""
        return 0

    def selector(
        self, progress: Progress, tensors: Sequence[MaskedTensor], values: Tensor, work: Work, *, check: bool = False
    ) -> Selector | None:
        """Makes the selector of a backward pass.

        Args:
            progress: how far training is.
            tensors: all masked tensors, by ascending offset.
            values: (capacity,) the flat delta, for its dtype and device.
            work: counts the entries that the selector looks at.
            check: compare the selection with the dense form.

        Returns:
            ``None`` where nothing is to be selected.

        Raises:
            SparsifyError: when the number of steps is needed and not known, or ``check`` is set on several ranks.
        """
        number, importance = self.quota(progress), self._importance
        if not number or importance is None:
            return None
        values = values.detach()
        if not importance.uses_gradient:
            return RankedSelector(self._rank(progress, number, tensors, values), tensors, values)
        selector = self._by_gradients(number, tensors, values, work)
        if not check:
            return selector
        if num_ranks() > 1:
            raise SparsifyError(
                "get_unmasker(model).check is set, and several ranks train together; one process alone can compare "
                "its selection with the dense form: unset it, or train without ranks."
            )
        return CheckedSelector(selector, number, importance, masked_only=self._masked_only)

    def _by_gradients(self, number: int, tensors: Sequence[MaskedTensor], values: Tensor, work: Work) -> Selector:
        """Selects by gradients: on a GPU, on a CPU, or together with other ranks."""
        importance: GradientImportance = self._importance
        if num_ranks() == 1 and runs_ahead(values.device):
            total = tensors[-1].offset + tensors[-1].numel
            return DeviceSelector(number, total, importance, values, work, masked_only=self._masked_only)
        context = SelectionContext(TopK(number, values.dtype, values.device), importance, work)
        if num_ranks() == 1:
            return StreamingSelector(context, masked_only=self._masked_only)
        return DistributedSelector(context, self._ranks, tensors, masked_only=self._masked_only, mode=self._sync_mode)

    def unmask(
        self, winners: Winners, progress: Progress, tensors: Sequence[MaskedTensor], slots: Tensor, capacity: int
    ) -> Winners:
        """Takes note of a step's winners.

        Args:
            winners: what the selector found.
            progress: how far training was when they were selected.
            tensors: all masked tensors.
            slots: (unmasked,) int64, the slots of the unmasked entries, tensor by tensor.
            capacity: number of slots.

        Returns:
            The winners to be unmasked: they get the next free slots, in this order.
        """
        if not winners.ids.numel():
            self._warn_of_none(progress.step)
        return winners

    def restart(self) -> None:
        """Forgets what depends on the unmasked set, which is another one now."""

    def _warn_of_none(self, step: int) -> None:
        """Warns once of an importance that left nothing to unmask."""
        importance = self._importance
        if self._warned or isinstance(importance, (D3, Fisher)):  # which score any gradient that is not zero
            return
        self._warned = True
        scores = "above 0" if importance.uses_gradient else "that is finite"
        warnings.warn(
            f"the importance {importance.name!r} gave no masked entry a score {scores} in step {step:,}, "
            "so nothing was unmasked: NaN and infinite scores never count, nor do scores up to 0 of an importance of "
            "gradients. If the loss had a gradient in this step, correct the importance.",
            stacklevel=2,
        )

    def _rank(self, progress: Progress, number: int, tensors: Sequence[MaskedTensor], values: Tensor) -> Tensor:
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
        return self._schedule.quota(progress.step, progress.steps, progress.budget, progress.unmasked)

    def restart(self) -> None:
        self._ranking = None

    def _rank(self, progress: Progress, number: int, tensors: Sequence[MaskedTensor], values: Tensor) -> Tensor:
        if self._ranking is None:  # masked entries never change, so one ranking serves all steps
            topk = TopK(progress.budget - progress.unmasked, values.dtype, values.device)
            ranking = rank_by_weight(tensors, self._importance, topk, str(self._seed), masked_only=True)
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

    def unmask(
        self, winners: Winners, progress: Progress, tensors: Sequence[MaskedTensor], slots: Tensor, capacity: int
    ) -> Winners:
        ids, first = super().unmask(winners, progress, tensors, slots, capacity).ids, progress.unmasked
        touched = torch.cat([tensor.indices.to(ids) + tensor.offset for tensor in tensors])  # as the slots
        new = torch.isin(ids, touched, invert=True).nonzero().squeeze(1)[: capacity - first]
        self.active = torch.zeros(capacity, dtype=torch.bool, device=winners.grads.device)
        self.active[slots.to(ids)[torch.isin(touched, ids)]] = True
        self.active[first : first + new.numel()] = True
        return Winners(ids[new], winners.grads[new])

    def restart(self) -> None:
        self.active = None

    def _rank(self, progress: Progress, number: int, tensors: Sequence[MaskedTensor], values: Tensor) -> Tensor:
        topk = TopK(number, values.dtype, values.device)
        key = f"{self._seed}:{progress.step}"
        return rank_by_weight(tensors, self._importance, topk, key, masked_only=False)


def policy_of(
    strategy: Strategy, schedule: Schedule, *, seed: int, ranks: Ranks, sync_mode: str = "exact"
) -> UnmaskingPolicy:
    """Returns the unmasking policy of a strategy; its arguments are those of :class:`UnmaskingPolicy`."""
    policy = UnmaskingPolicy
    if isinstance(strategy.selection, (Increment, Repeat)):
        policy = IncrementPolicy if isinstance(strategy.selection, Increment) else RepeatPolicy
    return policy(strategy, schedule, seed=seed, ranks=ranks, sync_mode=sync_mode)
