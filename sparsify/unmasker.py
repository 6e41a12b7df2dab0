"""The engine: what happens to the gradients between ``backward()`` and the weights after ``optimizer.step()``.

    collect   a node hands over a weight's gradient; the unmasked entries' part goes into one flat buffer, the masked
              entries are shown to the step's chooser, the rest is freed with the node
    commit    after the last node: the chooser's winners join the index buffers, and the flat gradient is returned to
              autograd, their own gradients included
    step      after the optimizer's step: base + delta is written into the weights

All state is parameters and buffers of the model: ``sparse_values`` (capacity,), the flat delta on the root;
``sparse_position`` (2,) int64, the optimizer steps done and the entries updated by them; and the index buffers, on the
root too. This object holds settings and what lives for a single backward pass.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.accumulation import Sums
from sparsify.agreement import agree_on_winners, check_agreement
from sparsify.anchors import AnchoredUse, Anchors, Root
from sparsify.announced import AnnouncedUse, AnnouncedUses
from sparsify.backward import BackwardPass
from sparsify.choosers import Chooser
from sparsify.draws import Draw
from sparsify.errors import SparsifyError
from sparsify.export import Export, digest_buffers, export
from sparsify.growth import growth_of
from sparsify.index_buffers import BUFFERS, IndexBuffers
from sparsify.masked.tensor import Gradient, MaskedTensor
from sparsify.ranks import Ranks, num_ranks
from sparsify.schedules import Schedule
from sparsify.sharding import check_root, read_base
from sparsify.shards import is_fully_sharded, reshard
from sparsify.stepping import listen
from sparsify.strategies import Strategy
from sparsify.values import VALUES, SparseValues
from sparsify.verification import Verification, verify

POSITION = "sparse_position"
STATE = (VALUES, POSITION, *BUFFERS)  # what the root's state dict has beside the model's own
OFFLOADED = (
    "`{name}` is on the meta device: it was offloaded after sparsify(), as accelerate's cpu_offload(), disk_offload() "
    "and dispatch_model() do, and its trained values would be lost. Take that back "
    "(accelerate.hooks.remove_hook_from_submodules(model)); offload before sparsify(), and only what is not trained."
)


class Unmasker:
    """Trains a model at ``budget`` of its entries; reached by :func:`sparsify.get_unmasker`.

    Args:
        root: the model.
        strategy: which entries to unmask.
        budget: how many, in entries.
        schedule: how the unmasked set grows.
        steps: planned number of optimizer steps; may be set later, before the first backward.
        seed: of a random importance.
        accumulation: ``"first"`` or ``"exact"``: which micro-batches of a step its entries are chosen by.
        dense_names: parameters that are trained dense and stored whole.
        frozen_names: parameters that were trainable before and are frozen as long as the model is sparsified.
        sync_mode: how several ranks choose the same entries: ``"exact"`` or ``"candidates"``.

    Attributes:
        tensors: the masked tensors, by ascending number and offset.
        buffers: their unmasked entries.
        fresh_names: parameters, dense ones apart, that the base does not have.
        draws: how the initial values of some of these are drawn, and the digest of them.
        step: optimizer steps done.
        updates: entry updates done, the trained entries summed over the steps.
        selected: whether the step in progress has had its selection.
        base_digests: what the base was, for :meth:`verify`.
        running: whether the root is in its forward.
        ranks: the other ranks, if there are any.
    """

    def __init__(
        self,
        root: nn.Module,
        strategy: Strategy,
        budget: int,
        schedule: Schedule,
        steps: int | None,
        seed: int = 0,
        *,
        accumulation: str = "first",
        dense_names: tuple[str, ...] = (),
        frozen_names: tuple[str, ...] = (),
        sync_mode: str = "exact",
    ) -> None:
        self.root = root
        self.strategy = strategy
        self.budget = budget
        self.schedule = schedule
        self.steps = steps
        self.seed = seed
        self.accumulation = accumulation
        self.dense_names = dense_names
        self.frozen_names = frozen_names
        self.sync_mode = sync_mode
        self.buffer_digests = digest_buffers(root)
        self.base_digests: dict[str, tuple[torch.dtype, str]] = {}
        self.tensors: list[MaskedTensor] = []
        self.buffers = IndexBuffers(root)
        self.fresh_names: tuple[str, ...] = ()
        self.draws: dict[str, tuple[Draw, str]] = {}
        self.step = 0
        self.updates = 0
        self.running = False
        self.ranks = Ranks()
        self._compared: set[int] = set()  # the steps, up to two, in which the ranks were found to be alike
        self._lock = threading.RLock()  # autograd runs the nodes of each device in a thread of its own
        self._anchors = Anchors(self)
        self._announced = AnnouncedUses(self)
        self._entry: Tensor | None = None  # the root anchor of the forward pass that is being compiled
        self._pass: BackwardPass | None = None
        self.selected = False  # whether this optimizer step has had its selection
        self._paused = False
        self._growth = growth_of(self)
        self._sums: Sums | None = None  # over the micro-batches of the step in progress
        self._reached: set[MaskedTensor] | None = set()  # until the first step: tensors that got a gradient
        self._written: Tensor | None = None  # the flat delta that the weights were written from
        self._written_dtype: torch.dtype | None = None

    # -------------------------------------------------------------------------------- state

    @property
    def values(self) -> SparseValues:
        """(capacity,) the flat delta; looked up by name, since ``load_state_dict(assign=True)`` replaces it."""
        values = self.root._parameters[VALUES]
        if type(values) is nn.Parameter:
            values.__class__ = SparseValues
        return values  # type: ignore[return-value]

    @property
    def unmasked(self) -> int:
        """Number of entries unmasked so far; their slots are 0 to ``unmasked - 1``."""
        return self.buffers.total

    @property
    def capacity(self) -> int:
        """Number of entries that there is room for: the budget, or more where repeat-S touches more."""
        return self.values.numel()

    @property
    def trained(self) -> int:
        """Number of entries that the step in progress trains."""
        active = self._growth.active
        return self.unmasked if active is None else int(active.sum())

    @property
    def growing(self) -> bool:
        """Whether entries may still be unmasked, those of the step in progress among them."""
        return self._growth.growing or self._sums is not None

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 has the weights."""
        return is_fully_sharded(self.root)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_pass": None, "_sums": None, "_entry": None, "_written": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()
        listen(self)

    # -------------------------------------------------------------------------------- forward

    @property
    def in_forward(self) -> bool:
        """Whether a weight that is read is a weight that is used: in the root's forward, or a recomputed part of it."""
        return self.running or torch._C._current_graph_task_id() != -1

    def use(self, tensor: MaskedTensor) -> AnchoredUse | None:
        """Announces a use of a tensor in a forward pass; ``None`` where no gradient will be collected."""
        if self._paused or not torch.is_grad_enabled():
            return None
        values = self.values
        if not values.requires_grad or not (tensor.count or self.growing):
            return None
        _check_shape(tensor)
        return self._anchors.use(tensor, values)

    @property
    def root_anchor(self) -> Tensor:
        """(1,) what the uses in a compiled graph take as an input; it is asked for while the graph is compiled."""
        return self._traced_root().output if self._entry is None else self._entry

    def trains(self, tensor: MaskedTensor) -> bool:
        """Whether a gradient may be collected for the tensor, now or later; it is asked while a graph is compiled."""
        return not (self._paused or tensor.dormant)

    def announce(self, tensor: MaskedTensor) -> None:
        """Announces a use by a compiled graph that runs forward."""
        _check_shape(tensor)
        self._announced.announce(tensor)

    def announced(self, tensor: MaskedTensor) -> AnnouncedUse:
        """One of the announced uses, in the backward pass of its graph."""
        return AnnouncedUse(self._announced, tensor, alone=not self._anchors.waits(tensor))

    def enter(self) -> None:
        """The root's forward begins: the weights are in step, and there is a root anchor for its compiled parts."""
        self.freeze()
        self.refresh()
        self.open_root()
        self.running = True

    def enter_compiled(self) -> None:
        """Likewise where the root's forward is being compiled; its graph will refresh the weights whenever it runs."""
        from sparsify.masked.compiled import refreshed_root

        self._entry = refreshed_root(self._traced_root().output, self.tensors[0].handle)
        self.running = True

    def leave(self) -> None:
        """The root's forward has ended, or failed."""
        self._entry = None
        self.running = False

    def open_root(self) -> Root:
        """The root anchor of the flat delta as it is now."""
        return self._anchors.root(self.values)

    def _traced_root(self) -> Root:
        """Likewise, asked for while a graph is compiled; it is compiled anew when the flat delta is another one."""
        from sparsify.masked.compiled import made_ready

        made_ready(self.tensors[0].handle)
        root = self._anchors.current
        assert root is not None
        assert root.serves(self.values)  # what is asked here, every run of the graph will ask
        return root

    # -------------------------------------------------------------------------------- backward

    def wants(self, tensor: MaskedTensor) -> bool:
        """Whether the running backward pass needs this tensor's gradient."""
        if self._reached is not None:
            self._reached.add(tensor)
        with self._lock:
            chooser = self._running_pass().chooser
        return tensor.count > 0 or (chooser is not None and chooser.wants(tensor))

    def collect(self, tensor: MaskedTensor, gradient: Gradient, *, whole: bool) -> None:
        """Takes the gradient of one use; ``whole`` where the tensor has no other use."""
        with self._lock:
            current = self._running_pass()
            if whole and tensor not in current.held and not self._announced.waits(tensor):
                current.settle(tensor, gradient)
                return
            held, gradient = current.held, gradient.dense()
            held[tensor] = held[tensor].add(gradient) if tensor in held else gradient

    def finish(self, tensor: MaskedTensor) -> None:
        """The last use of the tensor has been collected."""
        with self._lock:
            current = self._running_pass()
            gradient = None if self._announced.waits(tensor) else current.held.pop(tensor, None)
            if gradient is not None:
                current.settle(tensor, gradient)

    def commit(self) -> Tensor:
        """Ends the backward pass: unmasks the winners and returns the flat gradient (capacity,)."""
        current, self._pass = self._running_pass(), None
        current.settle_held()
        current.settle_earlier()
        self._announced.forget_recomputed()
        grad, chooser = current.grad, current.chooser
        if chooser is not None:
            winners, finite = chooser.winners(), torch.stack([grad.isfinite().all(), *chooser.finite()]).all()
            if not (finite if num_ranks() == 1 else agree_on_winners(self, winners, finite)):
                # as with full fine-tuning, the optimizer (or GradScaler) is to see that this pass overflowed
                return grad.fill_(torch.nan)
            self._growth.unmask(winners, grad)
            self.selected = True
        if self._growth.active is not None:
            grad.masked_fill_(~self._growth.active, 0)
        grad = grad if current.sums is None else current.sums.growth(grad)
        return self.ranks.mean_(grad) if self.sharded else grad  # DDP averages it by itself

    def _running_pass(self) -> BackwardPass:
        graph = torch._C._current_graph_task_id()
        if self._pass is None or self._pass.graph != graph:  # what a failed pass left behind is dropped
            self._check_not_paused("backward()")
            self._compare_ranks()
            chooser = self._chooser()
            self._pass = BackwardPass(graph, self.values.detach(), chooser, self._sums)
        return self._pass

    def _chooser(self) -> Chooser | None:
        """Who finds the entries that this backward pass is to unmask."""
        if self._sums is not None:
            self._take_back(self._sums)
        if self.selected:
            return None
        chooser = self._growth.chooser()
        if self.accumulation == "exact" and self._growth.by_gradient and chooser is not None and self._sums is None:
            self._sums = Sums(self.unmasked, self.values.dtype)
        return chooser

    def _take_back(self, sums: Sums) -> None:
        """Masks again what earlier micro-batches of the step in progress have unmasked."""
        self.buffers.keep_slots_below(sums.first)
        self._growth.restart()
        self.selected = False
        grad = self.values.grad
        if grad is None or not grad.any():  # they were dropped, as after an overflow: the step begins anew
            self._sums = None

    def append(self, ids: Tensor, slots: Tensor) -> None:
        """Adds entries (n,) given by global id to the index buffers; their current values are the base."""
        values = self.values.detach()
        ids, order = ids.sort()
        slots = slots[order]
        ends = torch.tensor([tensor.offset + tensor.numel for tensor in self.tensors], device=ids.device)
        sizes = torch.searchsorted(ids, ends).diff(prepend=ids.new_zeros(1)).tolist()
        indices = [own - tensor.offset for tensor, own in zip(self.tensors, ids.split(sizes), strict=True)]
        if self.sharded:
            first = int(slots.min()) if slots.numel() else 0
            self.buffers.append(sizes, torch.cat(indices), slots, values.new_zeros(ids.numel()))
            torch.autograd.Variable._execution_engine.queue_callback(lambda: read_base(self, first))
            return
        base = [
            tensor.take(own.to(tensor.parameter.device)).to(values)
            for tensor, own in zip(self.tensors, indices, strict=True)
            if own.numel()
        ]
        self.buffers.append(sizes, torch.cat(indices), slots, torch.cat(base) if base else values[:0])
        self._find_dormant()

    def _find_dormant(self) -> None:
        for tensor in self.tensors:
            tensor.dormant = self._growth.static and not tensor.count

    # -------------------------------------------------------------------------------- step

    def optimizer_stepped(self) -> None:
        """Counts an optimizer step and writes the new deltas into the weights."""
        self._check_not_paused("optimizer.step()")
        self._warn_of_unreached()
        self.step += 1
        self.updates += self.trained
        self.selected, self._sums = False, None
        self._announced.forget()
        self.root._buffers[POSITION].copy_(torch.tensor([self.step, self.updates]))  # type: ignore[union-attr]
        self.sync()

    @torch.no_grad()
    def sync(self, *, but: Set[MaskedTensor] = frozenset()) -> None:
        """Writes base + delta into the weights at the unmasked entries: O(budget)."""
        check_root(self)
        self._reshard()
        values, base = self.values.detach(), self.buffers.all_base
        effective = base.to(torch.promote_types(base.dtype, values.dtype)) + values[self.buffers.all_slots]
        for tensor, own in zip(self.tensors, self.buffers.split(effective), strict=True):
            if own.numel() and tensor not in but:
                tensor.write(own)
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
            or (self._written_dtype != self.tensors[0].dtype and not self.sharded)
            or not torch.equal(written, values)
        ):
            self.sync()

    def freeze(self) -> None:
        """Masked weights require no grad, though PEFT sets it back as it switches adapters, and are at hand."""
        for tensor in self.tensors:
            if tensor.parameter.is_meta:
                raise SparsifyError(OFFLOADED.format(name=tensor.name))
            if tensor.parameter.requires_grad and tensor.parameter.is_leaf:
                tensor.parameter.requires_grad_(False)

    @torch.no_grad()
    def state_loaded(self, plain: set[MaskedTensor]) -> None:
        """Brings everything in step after a state dict was loaded.

        Args:
            plain: tensors whose weight was loaded without index buffers, as from a merged checkpoint. What was loaded
                is what runs: their delta becomes weight minus base.
        """
        self.buffers.loaded()
        position = self.root._buffers[POSITION]
        assert position is not None
        self.step, self.updates = (int(number) for number in position.tolist())
        self.selected, self._sums = False, None
        self._growth.restart()
        self._find_dormant()
        if plain and not self.unmasked:
            warnings.warn(
                "weights were loaded without index buffers into a sparsified model that has nothing unmasked: they are "
                "its base now. To go on with an earlier run, load its whole state_dict(), buffers included; the "
                "checkpoints of the Hugging Face Trainer have them where it was given SparsifyCallback.",
                stacklevel=4,
            )
        values = self.values
        for tensor in plain:
            values[tensor.slots.to(values.device)] = (
                tensor.effective.to(values.dtype) - tensor.base.to(values.dtype)
            ).to(values)
        self.sync(but=plain)

    @contextmanager
    def base_weights(self) -> Iterator[None]:
        """The weights are the pretrained ones inside; nothing is trained there, and no graph is disturbed."""
        if self._paused:
            yield
            return
        self.refresh()
        self._reshard()
        trained = [tensor.own_effective for tensor in self.tensors]
        self._paused = True
        try:
            self.write_base()
            yield
        finally:
            self._reshard()
            for tensor, values in zip(self.tensors, trained, strict=True):
                tensor.write_unseen(values)
            self._paused = False

    def write_base(self) -> None:
        """Puts the pretrained values into the weights."""
        self._reshard()
        for tensor in self.tensors:
            if tensor.count:
                tensor.write_base()

    def verify(self) -> Verification:
        """Whether the frozen entries are the base's, and as many unmasked as planned."""
        self._check_not_paused("summary(verify=True)")
        self.refresh()
        self._reshard()
        return verify(self)

    def export(self, budget: int | None = None) -> Export:
        """What was learned: the first ``budget`` unmasked entries, and what is stored whole."""
        self._check_not_paused("SparseDelta.from_model()")
        self.refresh()
        self._reshard()
        return export(self, budget)

    def _reshard(self) -> None:
        if self.sharded:
            reshard(self.root)

    def _remember_written(self) -> None:
        self._written = self.values.detach().clone()
        self._written_dtype = self.tensors[0].dtype

    def _check_not_paused(self, call: str) -> None:
        if self._paused:
            raise SparsifyError(f"{call} inside base_weights(): the weights are the pretrained ones; leave it first.")

    def _compare_ranks(self) -> None:
        """In the first step, and in the next: then it shows whether gradients are averaged."""
        if len(self._compared) < 2 and self.step not in self._compared and num_ranks() > 1:
            check_agreement(self)
            self._compared.add(self.step)

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


def _check_shape(tensor: MaskedTensor) -> None:
    if tensor.shape_now != tensor.shape:
        raise SparsifyError(
            f"`{tensor.name}` had shape {tuple(tensor.shape)} at sparsify() and has {tuple(tensor.shape_now)} now; "
            "resize embeddings and the like before sparsify(). FullyShardedDataParallel (FSDP1) flattens weights: use "
            "fully_shard() (FSDP2)."
        )
