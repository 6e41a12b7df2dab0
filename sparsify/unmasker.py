"""The engine: what happens to the gradients between ``backward()`` and the weights after ``optimizer.step()``.

    collect   a node hands over a weight's gradient; the unmasked entries' part goes into one flat buffer, the best
              masked entries are offered to the pool, the rest is freed with the node
    commit    after the last node: the pool's winners join the index buffers, and the flat gradient is returned to
              autograd, their own gradients included
    step      after the optimizer's step: base + delta is written into the weights

All state is parameters and buffers of the model: ``sparse_values`` (budget,), the flat delta on the root;
``sparse_position`` (2,) int64, the optimizer steps done and the entries updated by them; and each masked tensor's
index buffers. This object holds settings and what lives for a single backward pass.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from sparsify.anchors import AnchoredUse, Anchors
from sparsify.errors import SparsifyError
from sparsify.export import Export, digest_buffers, export
from sparsify.importance import GradientImportance
from sparsify.masked.product import Product
from sparsify.masked.tensor import Gradient, MaskedTensor
from sparsify.schedules import Schedule
from sparsify.screen import can_screen, offer_screened
from sparsify.selection import Pool, Winners, offer_gradient
from sparsify.strategies import Increment, Strategy
from sparsify.values import VALUES, SparseValues

POSITION = "sparse_position"


class BackwardPass:
    """What lives from the first node of a backward pass to its commit.

    Attributes:
        graph: autograd's id of the pass.
        grad: (budget,) the flat gradient.
        pool: the best masked entries so far; ``None`` when this pass unmasks nothing.
        held: sums over the uses of tensors that are used more than once.
        finite: for each tensor that was seen whole, whether its gradient is finite.
    """

    def __init__(self, graph: int, values: Tensor, quota: int) -> None:
        self.graph = graph
        self.grad = torch.zeros_like(values)
        self.pool = Pool(quota, values.dtype, values.device) if quota else None
        self.held: dict[MaskedTensor, Gradient] = {}
        self.finite: list[Tensor] = []


class Unmasker:
    """Trains a model at ``budget`` of its entries; reached by :func:`sparsify.get_unmasker`.

    Args:
        root: the model.
        strategy: which entries to unmask.
        budget: how many, in entries.
        schedule: how the unmasked set grows.
        steps: planned number of optimizer steps; may be set later, before the first backward.
        dense_names: parameters that are trained dense and stored whole.
        frozen_names: parameters that were trainable before and are frozen as long as the model is sparsified.

    Attributes:
        tensors: the masked tensors, by ascending offset.
        step: optimizer steps done.
        updates: entry updates done, the unmasked entries summed over the steps.
    """

    def __init__(
        self,
        root: nn.Module,
        strategy: Strategy,
        budget: int,
        schedule: Schedule,
        steps: int | None,
        *,
        dense_names: tuple[str, ...] = (),
        frozen_names: tuple[str, ...] = (),
    ) -> None:
        self.root = root
        self.strategy = strategy
        self.budget = budget
        self.schedule = schedule
        self.steps = steps
        self.dense_names = dense_names
        self.frozen_names = frozen_names
        self.buffer_digests = digest_buffers(root)
        self.tensors: list[MaskedTensor] = []
        self.step = 0
        self.updates = 0
        self._anchors = Anchors(self)
        self._pass: BackwardPass | None = None
        self._selected = False  # whether this optimizer step has had its selection
        self._paused = False
        self._full = False  # whether the whole budget is unmasked
        self._reached: set[MaskedTensor] | None = set()  # until the first step: tensors that got a gradient
        self._written: Tensor | None = None  # the flat delta that the weights were written from
        self._written_dtype: torch.dtype | None = None
        _watch_optimizers(self)

    # -------------------------------------------------------------------------------- state

    @property
    def values(self) -> SparseValues:
        """(budget,) the flat delta; looked up by name, since ``load_state_dict(assign=True)`` replaces it."""
        values = self.root._parameters[VALUES]
        if type(values) is nn.Parameter:
            values.__class__ = SparseValues
        return values  # type: ignore[return-value]

    @property
    def unmasked(self) -> int:
        """Number of entries unmasked so far; their slots are 0 to ``unmasked - 1``."""
        return sum(tensor.count for tensor in self.tensors)

    @property
    def growing(self) -> bool:
        """Whether entries may still be unmasked."""
        if not isinstance(self.strategy.selection, Increment):
            return False
        return not self._full and (self.steps is None or self.step < self.steps)

    @property
    def _importance(self) -> GradientImportance:
        return cast(GradientImportance, self.strategy.importance)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pass": None, "_written": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _watch_optimizers(self)

    # -------------------------------------------------------------------------------- forward

    def use(self, tensor: MaskedTensor) -> AnchoredUse | None:
        """Announces a use of a tensor in a forward pass; ``None`` where no gradient will be collected."""
        if self._paused or not torch.is_grad_enabled():
            return None
        values = self.values
        if not values.requires_grad or not (tensor.count or self.growing):
            return None
        if tensor.parameter.shape != tensor.shape:
            raise SparsifyError(
                f"`{tensor.name}` had shape {tuple(tensor.shape)} at sparsify() and has "
                f"{tuple(tensor.parameter.shape)} now; resize embeddings and the like before sparsify()."
            )
        return self._anchors.use(tensor, values)

    # -------------------------------------------------------------------------------- backward

    def wants(self, tensor: MaskedTensor) -> bool:
        """Whether the running backward pass needs this tensor's gradient."""
        if self._reached is not None:
            self._reached.add(tensor)
        return self._running_pass().pool is not None or tensor.count > 0

    def collect(self, tensor: MaskedTensor, gradient: Gradient, *, whole: bool) -> None:
        """Takes the gradient of one use; ``whole`` where the tensor has no other use."""
        if whole:
            self._settle(tensor, gradient)
            return
        held, gradient = self._running_pass().held, gradient.dense()
        held[tensor] = held[tensor].add(gradient) if tensor in held else gradient

    def finish(self, tensor: MaskedTensor) -> None:
        """The last use of the tensor has been collected."""
        gradient = self._running_pass().held.pop(tensor, None)
        if gradient is not None:
            self._settle(tensor, gradient)

    def commit(self) -> Tensor:
        """Ends the backward pass: unmasks the winners and returns the flat gradient (budget,)."""
        current, self._pass = self._running_pass(), None
        if current.pool is None:
            return current.grad
        if not torch.stack([current.grad.isfinite().all(), *current.finite]).all():
            # as with full fine-tuning, the optimizer (or GradScaler) is to see that this pass overflowed
            return current.grad.fill_(torch.nan)
        self._unmask(current.pool.winners(), current.grad)
        self._selected = True
        return current.grad

    def _running_pass(self) -> BackwardPass:
        graph = torch._C._current_graph_task_id()
        if self._pass is None or self._pass.graph != graph:  # what a failed pass left behind is dropped
            self._check_not_paused("backward()")
            _check_single_rank()
            self._pass = BackwardPass(graph, self.values.detach(), self._quota())
        return self._pass

    def _quota(self) -> int:
        """Number of entries that this backward pass is to unmask."""
        if not isinstance(self.strategy.selection, Increment) or self._selected:
            return 0
        if self.steps is None:
            raise SparsifyError(
                "the number of training steps is not known, so there is no telling how many entries to unmask in this "
                "one; pass steps= (optimizer steps, not batches) to sparsify(), or set get_unmasker(model).steps."
            )
        return self.schedule.quota(self.step, self.steps, self.budget, self.unmasked)

    def _settle(self, tensor: MaskedTensor, gradient: Gradient) -> None:
        """Takes what is needed from a tensor's whole gradient."""
        current = self._running_pass()
        if not gradient.numel:
            return
        if current.pool is not None and not self._screens(current.pool, tensor, gradient):
            gradient = gradient.dense()
        if tensor.count:
            taken = gradient.take(tensor.indices)
            current.grad[tensor.slots.to(current.grad.device)] = taken.to(current.grad)
        if current.pool is not None:
            self._offer(current, current.pool, tensor, gradient)

    def _screens(self, pool: Pool, tensor: MaskedTensor, gradient: Gradient) -> bool:
        """How a tensor gets its candidates: from a screen in bfloat16, or from the whole gradient."""
        return isinstance(gradient, Product) and can_screen(gradient, self._importance, pool, tensor.count)

    def _offer(self, current: BackwardPass, pool: Pool, tensor: MaskedTensor, gradient: Gradient) -> None:
        """Offers a tensor's masked entries."""
        not_candidates = tensor.not_candidates
        if isinstance(gradient, Product):
            if offer_screened(pool, self._importance, tensor.matrix, gradient, not_candidates, tensor.offset):
                return
            gradient = gradient.dense()
        if not_candidates.numel():
            gradient.clear(not_candidates)  # an entry whose gradient is zero is never offered
        finite = offer_gradient(pool, self._importance, tensor.matrix, gradient.values, gradient.rows, tensor.offset)
        current.finite.append(finite.to(current.grad.device))

    def _unmask(self, winners: Winners, grad: Tensor) -> None:
        """Gives the winners the next free slots and writes their gradients (n,) there."""
        first, ids = self.unmasked, winners.ids
        slots = torch.arange(first, first + ids.numel(), device=ids.device)
        grad[slots] = winners.grads
        self.append(ids, slots)
        self._full = first + ids.numel() >= self.budget

    def append(self, ids: Tensor, slots: Tensor) -> None:
        """Adds entries (n,) given by global id to their tensors' index buffers."""
        ids, order = ids.sort()
        slots = slots[order]
        ends = torch.tensor([tensor.offset + tensor.parameter.numel() for tensor in self.tensors], device=ids.device)
        sizes = torch.searchsorted(ids, ends).diff(prepend=ids.new_zeros(1)).tolist()
        for tensor, own_ids, own_slots in zip(self.tensors, ids.split(sizes), slots.split(sizes), strict=True):
            if own_ids.numel():
                tensor.append((own_ids - tensor.offset).to(tensor.parameter.device), own_slots)

    # -------------------------------------------------------------------------------- step

    def optimizer_stepped(self) -> None:
        """Counts an optimizer step and writes the new deltas into the weights."""
        self._check_not_paused("optimizer.step()")
        self._warn_of_unreached()
        self.step += 1
        self.updates += self.unmasked
        self._selected = False
        self.root._buffers[POSITION].copy_(torch.tensor([self.step, self.updates]))  # type: ignore[union-attr]
        self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        """Writes base + delta into the weights at the unmasked entries: O(budget)."""
        for tensor in self.tensors:
            if tensor.count:
                tensor.write_effective()
        self._remember_written()

    def refresh(self) -> None:
        """Writes the weights if the flat delta, or the weights' dtype, is not the one they were written from.

        The values themselves are compared: a version counter misses writes through ``.data``.
        """
        if self._paused:
            return
        written, values = self._written, self.values.detach()
        if (
            written is None
            or (written.device, written.dtype) != (values.device, values.dtype)
            or self._written_dtype != self.tensors[0].parameter.dtype
            or not torch.equal(written, values)
        ):
            self.sync()

    @torch.no_grad()
    def state_loaded(self, plain: set[MaskedTensor]) -> None:
        """Brings everything in step after a state dict was loaded.

        Args:
            plain: tensors whose weight was loaded without index buffers, as from a merged checkpoint. What was loaded
                is what runs: their delta becomes weight minus base.
        """
        position = self.root._buffers[POSITION]
        assert position is not None
        self.step, self.updates = (int(number) for number in position.tolist())
        self._selected = False
        self._full = self.unmasked >= self.budget
        if plain and not self.unmasked:
            warnings.warn(
                "weights were loaded without index buffers into a sparsified model that has nothing unmasked: they are "
                "its base now. To go on with an earlier run, load its whole state_dict(), buffers included.",
                stacklevel=4,
            )
        values = self.values
        for tensor in self.tensors:
            if tensor in plain:
                weight = tensor.parameter.take(tensor.indices)
                change = weight.to(values.dtype) - tensor.base.to(values.dtype)
                values[tensor.slots.to(values.device)] = change.to(values.device)
            elif tensor.count:
                tensor.write_effective()
        self._remember_written()

    @contextmanager
    def base_weights(self) -> Iterator[None]:
        """The weights are the pretrained ones inside; nothing is trained there, and no graph is disturbed."""
        if self._paused:
            yield
            return
        self.refresh()
        trained = [tensor.parameter.detach().take(tensor.indices) for tensor in self.tensors]
        self._paused = True
        try:
            # through .data: a graph that was built before has saved these weights and gets them back unchanged
            for tensor in self.tensors:
                tensor.parameter.data.put_(tensor.indices, tensor.base.to(tensor.parameter.dtype))
            yield
        finally:
            for tensor, values in zip(self.tensors, trained, strict=True):
                tensor.parameter.data.put_(tensor.indices, values)
            self._paused = False

    def export(self, budget: int | None = None) -> Export:
        """What was learned: the first ``budget`` unmasked entries, and what is stored whole."""
        self._check_not_paused("SparseDelta.from_model()")
        self.refresh()
        return export(self, budget)

    def retire(self) -> None:
        """No optimizer step is counted any more."""
        _LIVE.discard(self)

    def _remember_written(self) -> None:
        self._written = self.values.detach().clone()
        self._written_dtype = self.tensors[0].parameter.dtype

    def _check_not_paused(self, call: str) -> None:
        if self._paused:
            raise SparsifyError(f"{call} inside base_weights(): the weights are the pretrained ones; leave it first.")

    def _warn_of_unreached(self) -> None:
        reached, self._reached = self._reached, None
        if reached is None:
            return
        expected = self.tensors if self.growing else [tensor for tensor in self.tensors if tensor.count]
        names = [tensor.name for tensor in expected if tensor not in reached]
        if names:
            warnings.warn(
                f"{len(names)} of {len(expected)} tensors got no gradient in the first step and are not trained: "
                f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}. If the loss does not depend on them, all "
                "is well; otherwise their weight is read without their module being called: please report it.",
                stacklevel=2,
            )


def _check_single_rank() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise SparsifyError(
            f"training on {distributed.get_world_size()} ranks is not supported: each would unmask entries of its own; "
            "train on one."
        )


_LIVE: weakref.WeakSet[Unmasker] = weakref.WeakSet()
_HOOK: list[Any] = []


def _watch_optimizers(engine: Unmasker) -> None:
    if not _HOOK:
        _HOOK.append(register_optimizer_step_post_hook(_after_optimizer_step))
    _LIVE.add(engine)


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Global hook: tells the engines whose flat delta this optimizer has just moved."""
    if not _LIVE:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for engine in list(_LIVE):
        values = engine.values
        if id(values) in held and values.grad is not None and not _skipped(optimizer):
            engine.optimizer_stepped()


def _skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimizer was told by GradScaler to leave the parameters alone."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)
