"""Makes each step's selector, by importance, device and ranks, and repeat-S; other policies are in the core."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from sparsify.common.ranks import Ranks, num_ranks
from sparsify.core.devices import runs_ahead
from sparsify.core.entries import count_by_tensor
from sparsify.core.gradients import Gradient
from sparsify.core.importance import D3
from sparsify.core.policy import IncrementPolicy, Policy, Selector
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import TopK, Winners
from sparsify.errors import SparsifyError
from sparsify.selection.device_topk import DeviceTopK
from sparsify.selection.distributed import RanksSelector
from sparsify.selection.joined import Joined
from sparsify.selection.screening import StreamingSelector
from sparsify.selection.static import rank_by_scores
from sparsify.strategies.importance import Fisher, Random
from sparsify.strategies.strategy import Increment, Repeat, Strategy, divide

# candidates that are kept of a step's passes: so many for each entry that it unmasks, and at least
_KEPT, _LEAST_KEPT = 8, 1 << 16


class RankedSelector(Selector):
    """Selects entries (n,) that are known before the step, best first; gradients are ``like`` the flat delta."""

    joins = False

    def __init__(self, ids: Tensor, tensors: Sequence[MaskedTensor], like: Tensor) -> None:
        self._ids, self._grads = ids.to(like.device), like.new_zeros(ids.numel())
        ordered, places = self._ids.sort()
        counts = count_by_tensor(ordered, [tensor.offset + tensor.numel for tensor in tensors]).tolist()
        parts = zip(ordered.split(counts), places.split(counts), strict=True)
        # of each tensor that has some: ids, and their places among all
        self._own = self.sees = {tensor: own for tensor, own in zip(tensors, parts, strict=True) if own[0].numel()}

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        if tensor in self._own:
            ids, places = self._own[tensor]
            self._grads[places] = gradient.take((ids - tensor.offset).to(tensor.parameter.device)).to(self._grads)
        return gradient.take(tensor.indices)

    def winners(self) -> Winners:
        return Winners(self._ids, self._grads)

    def finite(self) -> Tensor:
        return self._grads.isfinite().all()


class AllocatedSelector(Selector):
    """Selects by a selector of its own for each module with a budget of its own, and one for all other tensors."""

    joins = False

    def __init__(self, own: Mapping[MaskedTensor, Any]) -> None:
        self._own, self._all = own, list(dict.fromkeys(own.values()))

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        own = self._own.get(tensor)
        return gradient.take(tensor.indices) if own is None else own.offer(tensor, gradient)

    def winners(self) -> Winners:
        parts = [selector.winners() for selector in self._all]
        ids, grads = torch.cat([part.ids for part in parts]), torch.cat([part.grads for part in parts])
        order = (ids < 0).to(torch.int8).argsort(stable=True)  # those that a device's top-k lacks are last
        return Winners(ids[order], grads[order])

    def finite(self) -> Tensor:
        return torch.stack([selector.finite() for selector in self._all]).all()


class SelectorFactory:
    """Makes the selector of a policy's step; ``work`` has the numbers of entries of the last one: a summary's."""

    def __init__(self, ranks: Ranks, seed: int) -> None:
        self.work: Counter[str] = Counter()
        self._ranks, self._seed, self._warned = ranks, seed, False  # the seed is of a random importance
        # for an importance of the weights: the masked entries in order, and how many there were before the first
        self._ranking: tuple[int, Tensor] | None = None

    def __call__(self, policy: Policy, number: int) -> Selector:
        if not policy.importance.uses_gradient:
            return RankedSelector(self._rank(policy, number), policy.tensors, policy.entries.values.detach())
        self.work = Counter()
        if isinstance(policy, AllocatedPolicy):
            if num_ranks() > 1:
                raise SparsifyError("budgets of modules of their own work on one rank: leave them out.")
            own: dict[MaskedTensor, Selector] = {}
            for (tensors, _), quota in zip(policy.groups(), policy.quotas(), strict=True):
                own |= dict.fromkeys(tensors, self._streaming(policy, quota)) if quota else {}
            return AllocatedSelector(own)
        return self._streaming(policy, number)

    def _streaming(self, policy: Policy, number: int) -> Selector:
        values = policy.entries.values.detach()
        topk: Any = TopK(number, values.dtype, values.device)
        if runs_ahead(values.device):
            topk = DeviceTopK(number, policy.entries.ends[-1], values.dtype, values.device)
        parts = topk, policy.importance, self.work, not isinstance(policy, RepeatPolicy)
        selector = StreamingSelector(*parts) if num_ranks() == 1 else RanksSelector(*parts, self._ranks, policy.tensors)
        keeps = isinstance(policy, AccumulatingPolicy) and policy.keeps
        return AccumulatingSelector(topk, policy, selector, self._ranks) if keeps else selector

    def _rank(self, policy: Policy, number: int) -> Tensor:
        """Global ids (number,) of the entries that come next by the weights alone."""
        values, unmasked = policy.entries.values, policy.entries.count
        if isinstance(policy, RepeatPolicy):
            topk = TopK(number, values.dtype, values.device)
            return rank_by_scores(policy.tensors, policy.importance, topk, f"{self._seed}:{policy.entries.step}")
        if self._ranking is None:  # masked entries never change, so one ranking serves all steps
            is_drawn = isinstance(policy.importance, Random)  # all at once, so that a resumed run draws the same
            topk = TopK(policy.budget - (policy.kept if is_drawn else unmasked), values.dtype, values.device)
            ranking = rank_by_scores(policy.tensors, policy.importance, topk, str(self._seed), masked_only=not is_drawn)
            self._ranking = unmasked, ranking[torch.isin(ranking, policy.entries.ids.to(ranking), invert=True)]
        first, ranking = self._ranking
        return ranking[unmasked - first :][:number]

    def warn_of_none(self, policy: Policy) -> None:
        if self._warned or isinstance(policy.importance, (D3, Fisher)):  # which score any gradient that is not zero
            return
        self._warned = True
        scores = "above 0" if policy.importance.uses_gradient else "that is finite"
        text = f"the importance {policy.importance.name!r} gave no masked entry a score {scores} in step "
        text += f"{policy.entries.step:,}, so nothing was unmasked: NaN and infinite scores never count, nor do scores "
        text += "up to 0 of an importance of gradients. If the loss had a gradient here, correct the importance."
        warnings.warn(text, stacklevel=2)

    def restart(self) -> None:
        """Forgets what depends on the unmasked set, which is another one now."""
        self._ranking = None


class RepeatPolicy(Policy):
    """repeat-S: a step trains the best entries of all, as many as the budget has, as far as there are free slots."""

    static = False

    def growing(self) -> bool:
        return True

    def quota(self) -> int:
        return self.budget - self.kept

    def unmask(self, winners: Winners) -> Winners:
        ids, first, capacity = winners.ids, self.entries.count, self.entries.values.numel()
        touched = self.entries.ids.to(ids)
        new = torch.isin(ids, touched, invert=True).nonzero().squeeze(1)[: capacity - first]
        self.active = torch.zeros(capacity, dtype=torch.bool, device=winners.grads.device)
        self.active[:first] = torch.isin(touched, ids)
        self.active[: self.kept] = True
        self.active[first : first + new.numel()] = True
        return Winners(ids[new], winners.grads[new])


class AccumulatingSelector(Selector):
    """Selects by the gradients of a pass, which another selector takes, plus those of earlier ones where known."""

    def __init__(self, topk: Any, policy: Any, selector: StreamingSelector, ranks: Ranks) -> None:
        super().__init__(topk, policy.importance)
        self._policy, self._selector, self._ranks, self.joins = policy, selector, ranks, selector.joins
        like, known = policy.entries.values.detach(), policy.known
        self._ids, order = known.ids.to(like.device).sort()
        self._sums, self._weights = known.grads.to(like)[order], known.weights.to(like)[order]
        self._new = torch.zeros_like(self._sums)  # the gradients of this pass, on this rank
        counts = count_by_tensor(self._ids, policy.entries.ends).tolist()
        self._own = dict(zip(policy.tensors, self._new.split(counts), strict=True))
        parts = zip(policy.tensors, self._ids.split(counts), strict=True)
        selector.known = {tensor: (ids - tensor.offset).to(tensor.parameter.device) for tensor, ids in parts}

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        unmasked, own = self._selector.offer(tensor, gradient).split([tensor.count, self._own[tensor].numel()])
        self._own[tensor] += own.to(self._new)
        return unmasked

    def offer_joined(self, batches: Sequence[Joined]) -> None:
        for some in batches:
            known = {tensor: self._selector.known[tensor] for tensor in some.gradients}
            parts = some.values[some.places(known)].to(self._new).split([own.numel() for own in known.values()])
            for tensor, own in zip(known, parts, strict=True):
                self._own[tensor] += own
        self._selector.offer_joined(batches)

    def winners(self) -> Winners:
        ranks = num_ranks()
        sums = self._sums + self._ranks.sum_(self._new).div_(ranks)
        own = slice(dist.get_rank() if ranks > 1 else 0, None, ranks)  # each rank offers some
        if self._ids[own].numel():
            self._topk.offer(self._importance, self._weights[own][None], sums[own][None], None, 0, self._ids[own])
        self._policy.known = self._selector.winners()
        return self._policy.known.first(self._policy.number)


class AccumulatingPolicy(IncrementPolicy):
    """increment-S by the gradients of all passes of a step, each of which selects the step's entries again.

    The best candidates, several times as many as are unmasked, are kept from pass to pass with the sums of their
    gradients: in the first step, and in one after a step of several passes. In any other the first pass selects.
    """

    known: Any = None  # the candidates of the step's passes, best first
    number, keeps = 0, True  # entries that the step unmasks, and whether it keeps more

    def selector(self) -> Selector | None:
        none = self.entries.values.detach()[:0]
        self.known, self.number = Winners(none.long(), none, none), self.quota()
        self.keeps = self.summed >= self.entries.step
        return self._make() if self.number else None

    def selector_again(self, first: int) -> Selector | None:
        """Makes the selector of a later pass; the entries from slot ``first`` on are what the earlier ones selected."""
        values, grad = self.entries.values.detach()[first : self.entries.count], self.entries.values.grad
        if values.numel():
            if not self.keeps or grad is None or values.numel() > self.known.ids.numel():  # the last after an overflow
                return None
            sums = self.known.grads[: values.numel()].to(values)
            close = (grad[first : self.entries.count] - sums).abs() <= 1e-4 * sums.abs()  # ranks round a mean
            if not bool((close & (values == 0)).all()):  # a closure, or SAM, has moved them, or the gradient is another
                return None
        self.known, self.keeps = self.known.first(int((self.known.ids >= 0).sum())), True
        return self._make()

    def _make(self) -> Selector:
        assert self.select is not None
        return self.select(self, max(_KEPT * self.number, _LEAST_KEPT) if self.keeps else self.number)


class AllocatedPolicy(IncrementPolicy):
    """increment-S with budgets of their own for some modules, each of which follows the schedule by itself."""

    def __init__(self, *args: Any, strategy: Strategy) -> None:
        super().__init__(*args)
        # by a budget of 0, so that all others have what the modules have less than that
        self._groups = divide(0, strategy, [tensor for tensor in self.tensors if tensor.rows is None])

    def groups(self) -> list[tuple[list[Any], int]]:
        """The tensors that share a budget, and the budget."""
        return [(own, number if number > 0 else number + self.budget - self.kept) for own, number in self._groups]

    def quotas(self) -> list[int]:
        """How many entries of each group the next step unmasks."""
        step, steps, schedule = self.entries.step, self.steps or 0, self.schedule
        return [schedule.quota(step, steps, number, sum(each.count for each in own)) for own, number in self.groups()]

    def quota(self) -> int:
        return sum(self.quotas()) if super().quota() else 0


def target_of(policy: Policy, done: int) -> int:
    """Number of entries unmasked once ``done`` optimizer steps have selected, as the policy plans it."""
    if not isinstance(policy, IncrementPolicy):  # of repeat-S it depends on the gradients
        return policy.entries.count if isinstance(policy, RepeatPolicy) else policy.budget
    steps = policy.steps if done else None
    groups = policy.groups() if isinstance(policy, AllocatedPolicy) else [((), policy.budget - policy.kept)]
    return policy.kept + sum(policy.schedule.target(done - 1, steps, budget) for _, budget in groups if steps)


def policy_of(strategy: Strategy) -> Any:
    """The class of a strategy's policy."""
    selection = strategy.selection
    if isinstance(selection, Increment) and isinstance(selection.allocation, dict):
        return partial(AllocatedPolicy, strategy=strategy)
    if isinstance(selection, Increment):
        by_all = selection.select == "all" and strategy.importance.uses_gradient  # type: ignore[union-attr]
        return AccumulatingPolicy if by_all else IncrementPolicy
    return RepeatPolicy if isinstance(selection, Repeat) else Policy
