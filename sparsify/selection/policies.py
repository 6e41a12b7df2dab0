"""Makes each step's selector, by importance, device and ranks, and repeat-S; other policies are in the core."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsify.common.ranks import Ranks, num_ranks
from sparsify.core.devices import runs_ahead
from sparsify.core.entries import count_by_tensor
from sparsify.core.gradients import Gradient
from sparsify.core.importance import D3
from sparsify.core.policy import IncrementPolicy, Policy, Selector
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import TopK, Winners
from sparsify.selection.device_topk import DeviceTopK
from sparsify.selection.distributed import RanksSelector, ShareTopK
from sparsify.selection.screening import StreamingSelector, Work
from sparsify.selection.static import rank_by_scores
from sparsify.strategies.importance import Fisher
from sparsify.strategies.strategy import Increment, Repeat


class RankedSelector(Selector):
    """Selects entries (n,) that are known before the step, best first; gradients are ``like`` the flat delta."""

    batches_small = False

    def __init__(self, ids: Tensor, tensors: Sequence[MaskedTensor], like: Tensor) -> None:
        self._ids, self._grads = ids.to(like.device), like.new_zeros(ids.numel())
        ordered, places = self._ids.sort()
        counts = count_by_tensor(ordered, [tensor.offset + tensor.numel for tensor in tensors]).tolist()
        parts = zip(ordered.split(counts), places.split(counts), strict=True)
        self._own = dict(zip(tensors, parts, strict=True))  # of each tensor: ids, and their places among all

    def wants(self, tensor: MaskedTensor) -> bool:
        return self._own[tensor][0].numel() > 0

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        if self.wants(tensor):
            ids, places = self._own[tensor]
            self._grads[places] = gradient.take((ids - tensor.offset).to(tensor.parameter.device)).to(self._grads)
        return gradient.take(tensor.indices)

    def skip(self, tensor: MaskedTensor) -> None:
        """An empty gradient leaves the gradients zero."""

    def winners(self) -> Winners:
        return Winners(self._ids, self._grads)

    def finite(self) -> Tensor:
        return self._grads.isfinite().all()


class SelectorFactory:
    """Makes the selector of a policy's step; ``work`` has the entries that the last one looked at."""

    def __init__(self, ranks: Ranks, seed: int) -> None:
        self.work = Work()
        self._ranks, self._seed, self._warned = ranks, seed, False  # the seed is of a random importance
        # for an importance of the weights: the masked entries in order, and how many there were before the first
        self._ranking: tuple[int, Tensor] | None = None

    def __call__(self, policy: Policy, number: int) -> Selector:
        values = policy.entries.values.detach()
        if not policy.importance.uses_gradient:
            return RankedSelector(self._rank(policy, number), policy.tensors, values)
        self.work = Work()
        topk: Any = ShareTopK(number, values.dtype, values.device)
        if runs_ahead(values.device):
            topk = DeviceTopK(number, policy.entries.ends[-1], values.dtype, values.device)
        if num_ranks() == 1:
            return StreamingSelector(topk, policy.importance, self.work, policy.masked_only)
        return RanksSelector(topk, policy.importance, self.work, policy.masked_only, self._ranks, policy.tensors)

    def _rank(self, policy: Policy, number: int) -> Tensor:
        """Global ids (number,) of the entries that come next by the weights alone."""
        values, unmasked = policy.entries.values, policy.entries.count
        if isinstance(policy, RepeatPolicy):
            topk = TopK(number, values.dtype, values.device)
            return rank_by_scores(policy.tensors, policy.importance, topk, f"{self._seed}:{policy.entries.step}")
        if self._ranking is None:  # masked entries never change, so one ranking serves all steps
            topk = TopK(policy.budget - unmasked, values.dtype, values.device)
            ranking = rank_by_scores(policy.tensors, policy.importance, topk, str(self._seed), masked_only=True)
            self._ranking = unmasked, ranking
        first, ranking = self._ranking
        return ranking[unmasked - first :][:number]

    def warn_of_none(self, policy: Policy) -> None:
        """Warns once of an importance that left nothing to unmask."""
        if self._warned or isinstance(policy.importance, (D3, Fisher)):  # which score any gradient that is not zero
            return
        self._warned = True
        scores = "above 0" if policy.importance.uses_gradient else "that is finite"
        warnings.warn(
            f"the importance {policy.importance.name!r} gave no masked entry a score {scores} in step "
            f"{policy.entries.step:,}, so nothing was unmasked: NaN and infinite scores never count, nor do scores up "
            "to 0 of an importance of gradients. If the loss had a gradient in this step, correct the importance.",
            stacklevel=2,
        )

    def restart(self) -> None:
        """Forgets what depends on the unmasked set, which is another one now."""
        self._ranking = None


class RepeatPolicy(Policy):
    """repeat-S: a step trains the best entries of all, as many as the budget has, as far as there are free slots."""

    static = False
    masked_only = False

    def growing(self) -> bool:
        return True

    def quota(self) -> int:
        return self.budget - self.kept

    def unmask(self, winners: Winners) -> Winners:
        ids, first, capacity = super().unmask(winners).ids, self.entries.count, self.entries.values.numel()
        touched = self.entries.ids.to(ids)
        new = torch.isin(ids, touched, invert=True).nonzero().squeeze(1)[: capacity - first]
        self.active = torch.zeros(capacity, dtype=torch.bool, device=winners.grads.device)
        self.active[:first] = torch.isin(touched, ids)
        self.active[: self.kept] = True
        self.active[first : first + new.numel()] = True
        return Winners(ids[new], winners.grads[new])

    def restart(self) -> None:
        self.active = None


POLICIES: dict[type, type[Policy]] = {Increment: IncrementPolicy, Repeat: RepeatPolicy}  # else static-S
