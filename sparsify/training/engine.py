"""The engine of a sparsified model: what it is made of, and what happens at each event of its training.

    forward     the weights are refreshed, each use of a tensor gets its anchor           ``weights.py``, ``anchors.py``
    backward    gradients are collected, winners unmasked, the flat gradient returned    ``collection.py``
    step        base + delta is written into the weights                                 ``weights.py``

All state is parameters and buffers of the model: ``sparse_values`` (capacity,), the flat delta on the root;
``sparse_position`` (2,) int64, the optimizer steps done and the entries updated by them; ``sparse_settings`` (n,)
uint8, what a state dict is compared by when it is loaded; and the index buffers, all on the root. This object holds
settings and what lives for a single step.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.common.devices import upload
from sparsify.common.initializers import InitializerRecipe
from sparsify.common.interrupts import uninterrupted
from sparsify.common.ranks import Ranks
from sparsify.errors import SparsifyError
from sparsify.masked.index_buffers import BUFFERS, IndexBuffers
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.context import Work
from sparsify.strategies.schedules import Schedule
from sparsify.strategies.strategy import Strategy
from sparsify.training.anchors import AnchoredUse
from sparsify.training.backward import Collection
from sparsify.training.compiled import CompiledGraphs
from sparsify.training.export import Export, digest_buffers, export, warn_of_unheld
from sparsify.training.flat_delta import VALUES, SparseValues
from sparsify.training.optimizer_hook import forget_uncounted_steps, has_uncounted_step, listen, note_counted
from sparsify.training.settings import SETTINGS, check_holds, lengthen, plan_extension
from sparsify.training.sharding import read_base
from sparsify.training.verification import Verification, verify
from sparsify.training.weights import EffectiveWeights

UNKNOWN_VALUES = (
    "`sparse_values` has values for entries that this model does not know. The parameters of another sparsified model "
    "were copied or averaged into it, and its buffers were not: copy these too, as "
    "torch.optim.swa_utils.AveragedModel does: for own, other in zip(ema.buffers(), model.buffers()): "
    "own.copy_(other). Or noise was added to all of its gradient: add it to the first unmasked numbers alone."
)
NOT_FINITE = (
    "`sparse_values` is not finite: the loss or its gradient overflowed, and the optimizer stepped by it. Go on from "
    "an earlier state, and clip gradients, scale the loss (GradScaler), or lower the learning rate."
)
POSITION = "sparse_position"
STATE = (VALUES, POSITION, SETTINGS, *BUFFERS)  # what the root's state dict has beside the model's own


class _Forward(threading.local):
    """The root's forward passes in one thread.

    Attributes:
        depth: how many it is in.
        number: how many there were.
    """

    depth = 0
    number = 0

    def __reduce__(self) -> tuple[type[_Forward], tuple[()]]:
        return _Forward, ()  # a copy of the model is in none


class Engine:
    """Trains a model at ``budget`` of its entries; reached by :func:`sparsify.get_unmasker`.

    Args:
        root: the model.
        strategy: which entries to unmask.
        budget: how many, in entries.
        schedule: how the unmasked set grows.
        steps: planned number of optimizer steps; may be set later, before the first backward.
        seed: of a random importance.
        dense_names: parameters that are trained dense and stored whole.
        frozen_names: parameters that were trainable before and are frozen as long as the model is sparsified.
        sync_mode: how several ranks choose the same entries: ``"exact"`` or ``"candidates"``.

    Attributes:
        found_steps: the ``steps`` that a Trainer had, which the next one may replace; ``None`` where they were given.
        tensors: the masked tensors, by ascending number and offset.
        buffers: their unmasked entries.
        fresh_names: parameters, dense ones apart, that the base does not have.
        draws: how the initial values of some of these are drawn, and the digest of them.
        step: optimizer steps done.
        updates: entry updates done, the trained entries summed over the steps.
        extended_at: number of entries that were unmasked when :meth:`extend` was last called.
        base_digests: what the base was, for :meth:`verify`.
        running: whether the root is in its forward, and that is compiled.
        weights: keeps the effective values in step.
        collection: takes the gradients.
        ranks: the other ranks, if there are any.
        work: the entries that the last selection looked at, by the way it took.
        check: whether each step's selection is compared with the dense form, which takes its time and memory.
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
        dense_names: tuple[str, ...] = (),
        frozen_names: tuple[str, ...] = (),
        sync_mode: str = "exact",
    ) -> None:
        self.root = root
        self.strategy = strategy
        self.budget = budget
        self.schedule = schedule
        self.steps = steps
        self.found_steps: int | None = None
        self.seed = seed
        self.dense_names = dense_names
        self.frozen_names = frozen_names
        self.sync_mode = sync_mode
        self.buffer_digests = digest_buffers(root)
        self.base_digests: dict[str, tuple[torch.dtype, str]] = {}
        self.tensors: list[MaskedTensor] = []
        self.buffers = IndexBuffers(root)
        self.fresh_names: tuple[str, ...] = ()
        self.draws: dict[str, tuple[InitializerRecipe, str]] = {}
        self.step = 0
        self.updates = 0
        self.extended_at = 0
        self.running = False
        self._forward = _Forward()
        self._counted_by_hook = False  # whether the last step was
        self._position_seen = 0  # how often the buffer was written, when step and updates were read from it
        self._former: list[weakref.ref[SparseValues]] = []  # flat deltas, of which the last is the present one
        self.ranks = Ranks()
        self.work = Work()
        self.check = False
        self.weights = EffectiveWeights(self)
        self.collection = Collection(self)

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
        active = self.collection.policy.active
        return self.unmasked if active is None else int(active.sum())

    @property
    def growing(self) -> bool:
        """Whether entries may still be unmasked, those of the step in progress among them."""
        return self.collection.growing

    @property
    def compiled(self) -> CompiledGraphs:
        """Its part in compiled graphs."""
        return self.collection.compiled

    @property
    def selected(self) -> bool:
        """Whether the step in progress has had its selection."""
        return self.collection.selected

    @property
    def passes(self) -> int:
        """Backward passes since the last optimizer step that was counted."""
        return self.collection.passes

    @property
    def awaits_step(self) -> bool:
        """Whether there were any."""
        return self.passes > 0

    @property
    def was_frozen(self) -> bool:
        """Whether the flat delta does not train though something does that is in no delta, as after get_peft_model().

        With nothing else to train it was frozen on purpose, to pass gradients on.
        """
        if self.values.requires_grad or self.weights.are_base:
            return False
        own = {id(tensor.parameter) for tensor in self.tensors}
        return any(
            parameter.requires_grad and id(parameter) not in own and name not in self.dense_names
            for name, parameter in self.root.named_parameters()
        )

    @property
    def is_whole(self) -> bool:
        """Whether it can be asked at all: not in the middle of a copy, or in one that failed."""
        return VALUES in self.root.__dict__.get("_parameters", ())

    def has_frozen(self, ids: set[int]) -> bool:
        """Whether a parameter with one of these ids is a masked tensor's, or a flat delta that was replaced since."""
        former = (known() for known in self._former[:-1])
        return any(id(parameter) in ids for parameter in (*former, *(tensor.parameter for tensor in self.tensors)))

    def note_values(self) -> None:
        """Remembers the flat delta as it is now, in case it is replaced."""
        if not self._former or self._former[-1]() is not self.values:
            self._former.append(weakref.ref(self.values))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_position_seen": -1, "_former": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        listen(self)

    @property
    def _position(self) -> Tensor:
        position = self.root._buffers[POSITION]
        assert position is not None
        return position

    def _read_position(self) -> None:
        self.step, self.updates = (int(number) for number in self._position.tolist())
        self._position_seen = self._position._version

    # -------------------------------------------------------------------------------- forward

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 has the weights."""
        return self.weights.sharded

    @property
    def in_forward(self) -> bool:
        """Whether a weight that is read is a weight that is used: in the root's forward, or a recomputed part of it."""
        return self.running or self._forward.depth > 0 or torch._C._current_graph_task_id() != -1

    @property
    def forward_pass(self) -> int:
        """Number of the root's forward pass that this thread is in, or was in last."""
        return self._forward.number

    def use(self, tensor: MaskedTensor) -> AnchoredUse | None:
        """Announces a use of a tensor in a forward pass; ``None`` where no gradient will be collected."""
        if self.weights.are_base or not torch.is_grad_enabled():
            return None
        values = self.values
        if not values.requires_grad or not (tensor.count or self.growing or self._may_be_recomputed):
            return None
        tensor.check_shape()
        return self.collection.anchors.use(tensor, values)

    @property
    def _may_be_recomputed(self) -> bool:
        """Whether a tensor without entries counts as used, so that a checkpoint is recomputed just as it was made.

        The budget may be spent in between. What is saved for it is recomputed, too, and not kept.
        """
        saved_by_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        return saved_by_hooks and not self.collection.policy.static

    def enter(self) -> None:
        """The root's forward begins: the weights are in step, and there is a root anchor for its compiled parts."""
        if torch.compiler.is_dynamo_compiling():
            self.compiled.enter()
            self.running = True
        else:
            self.weights.freeze()
            self.refresh()
            self.compiled.make_root()
            self._forward.number += 1
            self._forward.depth += 1

    def leave(self) -> None:
        """The root's forward has ended, or failed."""
        self.compiled.leave()
        self.running = False
        if not torch.compiler.is_dynamo_compiling():
            self._forward.depth = max(0, self._forward.depth - 1)

    # -------------------------------------------------------------------------------- unmasking

    def append(self, ids: Tensor, slots: Tensor) -> None:
        """Adds entries (n,) given by global id to the index buffers; their current values are the base."""
        values = self.values.detach()
        ids, order = ids.sort()
        slots = slots[order]
        ends = upload([tensor.offset + tensor.numel for tensor in self.tensors], ids.device)
        sizes = torch.searchsorted(ids, ends).diff(prepend=ids.new_zeros(1)).tolist()
        indices = [own - tensor.offset for tensor, own in zip(self.tensors, ids.split(sizes), strict=True)]
        if self.weights.sharded:
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

    def extend(
        self,
        *,
        budget: int | float | None = None,
        steps: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Lets a run go on with a larger budget, or for more steps, than it was begun with.

        The entries that are unmasked stay; from here on the schedule is that of the new budget and steps. To be called
        between two steps, as after loading an earlier run's state, and on the bare model: before DDP and
        ``fully_shard()``. A larger budget makes ``sparse_values`` a new, longer parameter.

        Args:
            budget: entries in all, or a share of the candidates; ``None``: as before.
            steps: optimizer steps in all, those done included; ``None``: as before.
            optimizer: one that holds ``sparse_values``: it gets the new parameter, and its state for it is padded with
                zeros, which for SGD, the Adam family and Lion is what it would be had the budget been larger from the
                start. ``None``: an optimizer that is made afterwards.

        Raises:
            SparsifyError: when budget or steps get smaller, a step has begun, or the entries of a larger budget would
                have been chosen before training; before anything has been changed.

        Example:
            >>> import sparsify
            >>> model = sparsify.sparsify(torch.nn.Linear(4, 4), budget=3, steps=10)
            >>> sparsify.get_unmasker(model).extend(budget=6, steps=20)
            >>> model.sparse_values.shape
            torch.Size([6])
        """
        budget, steps, capacity = plan_extension(self, budget, steps)
        if optimizer is not None:
            check_holds(optimizer, self.values)
        if capacity > self.capacity:
            lengthen(self, capacity, optimizer)
        self.budget, self.steps, self.extended_at = budget, steps, self.unmasked
        self.collection.restart()

    def _find_dormant(self) -> None:
        for tensor in self.tensors if self.collection.policy.static else ():
            tensor.dormant = not tensor.count

    # -------------------------------------------------------------------------------- step

    def optimizer_stepped(self) -> None:
        """Counts an optimizer step and writes the new deltas into the weights."""
        self.weights.check_trained("optimizer.step()")
        with uninterrupted():
            note_counted(self)
            self._counted_by_hook = True
            self._forward.depth = 0  # forward passes that were interrupted have not left
            self.step += 1
            self.updates += self.trained
            self.collection.step_done()
            self._position.copy_(upload([self.step, self.updates], self._position.device))
            self._position_seen = self._position._version
            self.weights.write()

    def count_step(self) -> None:
        """Likewise, told by the user, of an optimizer that ``torch.optim`` knows nothing of.

        Raises:
            SparsifyError: when a hook of ``torch.optim`` has counted the step.
        """
        if self._counted_by_hook and not self.awaits_step:
            raise SparsifyError(
                "this optimizer step was counted already: the optimizer is one of torch.optim's, or derives from it, "
                "and tells of its steps by itself; leave optimizer_stepped(model) out."
            )
        self.optimizer_stepped()
        self._counted_by_hook = False

    def settle(self) -> None:
        """Brings the books in order after what came past them: a step that was cut off, buffers that were copied into.

        Raises:
            SparsifyError: when the index buffers were averaged, or written to in another way that makes no sense.
        """
        if has_uncounted_step(self):
            if self.weights.are_in_step:
                forget_uncounted_steps(self)  # it failed before it had moved them
            else:
                self.optimizer_stepped()
        if self._position_seen != self._position._version:
            self._read_position()
        if not self.buffers.have_changed():
            return
        if self.buffers.problem([tensor.numel for tensor in self.tensors]):
            raise SparsifyError(
                "the index buffers of this model were written to, and make no sense any more. They can be "
                "copied, but not averaged: use AveragedModel with use_buffers=False; in an EMA of your own average "
                "parameters(), and copy_() the buffers()."
            )
        self.state_loaded(set())

    def refresh(self) -> None:
        """The weights are in step with the flat delta."""
        self.settle()
        self.weights.refresh()
        self.collection.streams.use(self.values.device)

    @torch.no_grad()
    def state_loaded(self, plain: set[MaskedTensor]) -> None:
        """Brings everything in step after a state dict was loaded.

        Args:
            plain: tensors whose weight was loaded without index buffers, as from a merged checkpoint. What was loaded
                is what runs: their delta becomes weight minus base.
        """
        self.buffers.loaded()
        self._read_position()
        self.collection.restart()
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
        self.weights.write(but=plain)

    def verify(self, model: nn.Module | None = None) -> Verification:
        """Whether the frozen entries are the base's, and as many unmasked as planned; ``model`` holds the root."""
        self._prepare("summary(verify=True)")
        return verify(self, self.root if model is None else model)

    def export(self, budget: int | None = None, model: nn.Module | None = None) -> Export:
        """What was learned: the first ``budget`` unmasked entries, and what is stored whole.

        Warns where something trains in the root, or in the ``model`` that holds it, that is not exported.
        """
        self._prepare("SparseDelta.from_model()")
        exported = export(self, budget)
        warn_of_unheld(self, self.root if model is None else model, stacklevel=4)
        return exported

    def _prepare(self, call: str) -> None:
        """The trained weights can be read."""
        self.weights.check_trained(call)
        self.refresh()
        free = self.values.detach()[self.unmasked :]
        if bool(free.any()):
            raise SparsifyError(f"{call}: {UNKNOWN_VALUES if bool(free.isfinite().all()) else NOT_FINITE}")
        self.weights.reshard()
