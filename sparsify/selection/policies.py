"""How the unmasked set unfolds over the steps: for each selection, what a step is to choose and what becomes of it.

static-S      nothing is chosen while the model trains
increment-S   masked entries, up to the schedule's target; they stay
repeat-S      the whole budget afresh at each step; an entry that leaves keeps its slot, and gets no gradient
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from sparsify.common.devices import runs_ahead
from sparsify.common.ranks import Ranks, num_ranks
from sparsify.errors import SparsifyError
from sparsify.masked.index_buffers import IndexBuffers
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.context import SelectionContext
from sparsify.selection.counters import Counters
from sparsify.selection.dense_check import CheckedSelector
from sparsify.selection.device_topk import DeviceSelector
from sparsify.selection.distributed import DistributedSelector
from sparsify.selection.ranking import rank_by_weight
from sparsify.selection.selectors import RankedSelector, Selector, StreamingSelector
from sparsify.selection.topk import TopK, Winners
from sparsify.strategies.importance import D3, Fisher, GradientImportance, WeightImportance
from sparsify.strategies.schedules import Schedule
from sparsify.strategies.strategy import Increment, Repeat, Strategy


class Engine(Protocol):
    """What is trained, and how far it has come."""

    strategy: Strategy
    schedule: Schedule
    budget: int
    steps: int | None
    step: int
    seed: int
    sync_mode: str
    check: bool
    counters: Counters
    ranks: Ranks
    tensors: list[MaskedTensor]
    buffers: IndexBuffers

    @property
    def values(self) -> Tensor:
        """(capacity,) the flat delta."""

    def append(self, ids: Tensor, slots: Tensor) -> None:
        """Adds entries (n,) given by global id to the index buffers."""


class UnmaskingPolicy:
    """static-S, and what the other two have in common.

    Attributes:
        static: whether the unmasked set stays as it is.
        active: (capacity,) bool, the slots that the step in progress trains; ``None`` where it trains them all.
    """

    static = True
    active: Tensor | None = None

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def growing(self) -> bool:
        """Whether entries may still be unmasked."""
        return False

    def quota(self) -> int:
        """Number of entries that a step is to choose."""
        return 0

    def selector(self) -> Selector | None:
        """Who finds the entries that a backward pass is to unmask; ``None`` where there are none to find."""
        engine, number = self.engine, self.quota()
        importance, values = engine.strategy.importance, engine.values.detach()
        if not number or importance is None:
            return None
        if isinstance(importance, GradientImportance) and importance.uses_gradient:
            return self._by_gradients(importance, number)
        return RankedSelector(self._rank(cast(WeightImportance, importance), number), engine.tensors, values)

    def _by_gradients(self, importance: GradientImportance, number: int) -> Selector:
        """Who finds so many entries while the gradients come by: on a GPU, on a CPU, or together with other ranks."""
        engine, masked_only = self.engine, self._masked_only
        work, values = engine.counters.current, engine.values.detach()
        if num_ranks() == 1 and runs_ahead(values.device):
            last = engine.tensors[-1]
            total = last.offset + last.numel
            device = DeviceSelector(number, total, importance, values, work, masked_only=masked_only)
            return self._checked(device, number)
        context = SelectionContext(TopK(number, values.dtype, values.device), importance, work)
        if num_ranks() == 1:
            return self._checked(StreamingSelector(context, masked_only=masked_only), number)
        if engine.check:
            raise SparsifyError(
                "get_unmasker(model).check is set, and several ranks train together; one process alone can compare "
                "its selection with the dense form: unset it, or train without ranks."
            )
        return DistributedSelector(
            context, engine.ranks, engine.tensors, masked_only=masked_only, mode=engine.sync_mode
        )

    def _checked(self, selector: Selector, number: int) -> Selector:
        """Who chooses as many by the gradients, compared with the dense form where that is asked for."""
        engine = self.engine
        if not engine.check:
            return selector
        importance = cast(GradientImportance, engine.strategy.importance)
        return CheckedSelector(selector, number, importance, engine.counters.current, masked_only=self._masked_only)

    def unmask(self, winners: Winners, grad: Tensor) -> None:
        """Gives the winners that have no slot the next free ones and writes their gradients into ``grad``."""

    def restart(self) -> None:
        """The unmasked set is another one now: a state dict was loaded."""

    _masked_only = True
    _warned = False  # whether _warn_if_none has warned

    def _warn_if_none(self, winners: Winners) -> None:
        """Warns once where an importance left nothing to unmask; the number of winners is known without a wait."""
        importance = self.engine.strategy.importance
        # D3 and Fisher score any gradient that is not zero
        if winners.ids.numel() or self._warned or isinstance(importance, (D3, Fisher)):
            return
        self._warned = True
        assert importance is not None
        scores = "above 0" if importance.uses_gradient else "that is finite"
        warnings.warn(
            f"the importance {importance.name!r} gave no masked entry a score {scores} in step {self.engine.step:,}, "
            "so nothing was unmasked: NaN and infinite scores never count, nor do scores up to 0 of an importance of "
            "gradients. If the loss had a gradient in this step, correct the importance.",
            stacklevel=2,
        )

    def _rank(self, importance: WeightImportance, number: int) -> Tensor:
        """The global ids (number,) that the weights say are next."""
        raise NotImplementedError  # static-S chooses nothing

    def _append(self, ids: Tensor, grads: Tensor, grad: Tensor) -> None:
        first = self.engine.buffers.total
        slots = torch.arange(first, first + ids.numel(), device=ids.device)
        grad[slots] = grads
        self.engine.append(ids, slots)


class IncrementPolicy(UnmaskingPolicy):
    """increment-S: a step adds what the schedule says and removes nothing."""

    static = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        # the masked entries that an importance of the weights unmasks next, and how many there were before the first
        self._ranking: tuple[int, Tensor] | None = None

    @property
    def growing(self) -> bool:
        engine = self.engine
        return engine.buffers.total < engine.budget and (engine.steps is None or engine.step < engine.steps)

    def quota(self) -> int:
        engine = self.engine
        if not self.growing:
            return 0
        if engine.steps is None:
            raise SparsifyError(
                "the number of training steps is not known, so there is no telling how many entries to unmask in this "
                "one; pass steps= (optimizer steps, not batches) to sparsify(), set get_unmasker(model).steps, or give "
                "the Hugging Face Trainer callbacks=[SparsifyCallback()]."
            )
        return engine.schedule.quota(engine.step, engine.steps, engine.budget, engine.buffers.total)

    def unmask(self, winners: Winners, grad: Tensor) -> None:
        self._warn_if_none(winners)
        self._append(winners.ids, winners.grads, grad)

    def restart(self) -> None:
        self._ranking = None

    def _rank(self, importance: WeightImportance, number: int) -> Tensor:
        """Masked entries never change, so their order is found once.

        It is no state: it can be found again from the weights and the index buffers.
        """
        engine, values = self.engine, self.engine.values
        unmasked = engine.buffers.total
        if self._ranking is None:
            topk = TopK(engine.budget - unmasked, values.dtype, values.device)
            ranking = rank_by_weight(engine.tensors, importance, topk, str(engine.seed), masked_only=True)
            self._ranking = unmasked, ranking
        first, ranking = self._ranking
        return ranking[unmasked - first :][:number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ranking": None}


class RepeatPolicy(UnmaskingPolicy):
    """repeat-S: a step trains the budget's best entries of all, as far as there is room for those it touches."""

    static = False
    _masked_only = False

    @property
    def growing(self) -> bool:
        return True

    def quota(self) -> int:
        return self.engine.budget

    def unmask(self, winners: Winners, grad: Tensor) -> None:
        self._warn_if_none(winners)
        buffers, ids, grads = self.engine.buffers, winners.ids, winners.grads
        first, touched = buffers.total, self._touched(self.engine.tensors, ids)
        active = torch.zeros_like(grad, dtype=torch.bool)
        active[buffers.all_slots.to(ids)[torch.isin(touched, ids)]] = True
        new = torch.isin(ids, touched, invert=True).nonzero().squeeze(1)[: grad.numel() - first]
        active[first : first + new.numel()] = True
        self._append(ids[new], grads[new], grad)
        self.active = active

    def restart(self) -> None:
        self.active = None

    def _rank(self, importance: WeightImportance, number: int) -> Tensor:
        engine, values = self.engine, self.engine.values
        topk, key = TopK(number, values.dtype, values.device), f"{engine.seed}:{engine.step}"
        return rank_by_weight(engine.tensors, importance, topk, key, masked_only=False)

    @staticmethod
    def _touched(tensors: Sequence[MaskedTensor], like: Tensor) -> Tensor:
        """Global ids of the entries that have a slot, in the order of the index buffers."""
        return torch.cat([tensor.indices.to(like) + tensor.offset for tensor in tensors])


def policy_of(engine: Engine) -> UnmaskingPolicy:
    """How the unmasked set of this engine's strategy unfolds."""
    selection = engine.strategy.selection
    if isinstance(selection, Increment):
        return IncrementPolicy(engine)
    return RepeatPolicy(engine) if isinstance(selection, Repeat) else UnmaskingPolicy(engine)
