"""The engine of a sparsified model: what it is made of, and what happens at each event of its training.

All state is parameters and buffers of the model: ``sparse_values`` (capacity,), the flat delta on the root;
``sparse_position`` (2,) int64, the optimizer steps done and the entries updated by them; ``sparse_settings`` (n,)
uint8, what a state dict is compared by when it is loaded; and the index buffers, all on the root. The engine holds
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
from sparsify.common.interrupts import uninterrupted
from sparsify.common.ranks import Ranks
from sparsify.common.shards import is_fully_sharded
from sparsify.delta.entries import DeltaParts
from sparsify.errors import SparsifyError
from sparsify.masked.index_buffers import IndexBuffers
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.context import Work
from sparsify.selection.policies import POLICIES, Progress, UnmaskingPolicy
from sparsify.training.anchors import AnchoredUse
from sparsify.training.backward import BackwardCollector
from sparsify.training.compiled import CompiledGraphs
from sparsify.training.export import export
from sparsify.training.exporter import Exporter
from sparsify.training.flat_delta import POSITION, SparseValues, flat_delta
from sparsify.training.optimizer_hook import forget_uncounted_steps, has_uncounted_step, listen, note_counted
from sparsify.training.plan import Plan
from sparsify.training.settings import lengthen, plan_extension
from sparsify.training.verification import digest_base
from sparsify.training.weights import EffectiveWeights


class _Forward(threading.local):
    """The root's forward passes in one thread."""

    depth = 0  # number of nested ones that have begun and not ended
    number = 0  # number of those that have begun


class Engine:
    """Trains a model at ``budget`` of its entries, by a plan; reached by :func:`sparsify.get_unmasker`.

    Attributes:
        steps: planned optimizer steps; may be set until the first backward.
        step: optimizer steps done.
        updates: entry updates done, the trained entries summed over the steps.
        work: entries that the last selection looked at, by the way it took.
    """

    def __init__(self, plan: Plan) -> None:
        self.root, self.tensors = plan.model, list(plan.tensors)
        for tensor in self.tensors:
            tensor.collector = self
        self.strategy, self.schedule, self.budget, self.steps = plan.strategy, plan.schedule, plan.budget, plan.steps
        self.found_steps: int | None = None  # the steps of a Trainer, which the next one may replace
        self.seed, self.work = plan.seed, Work()
        self.dense_names = tuple(plan.targets.saved)
        trainable = (each.name for each in plan.targets.candidates if each.parameter.requires_grad)
        self.frozen_names = (*trainable, *plan.targets.frozen)  # that require grad when the model is plain again
        self.new_names, self.buffer_digests = plan.new_names, plan.buffer_digests
        self.step = self.updates = 0
        self.extended_at = 0  # number of entries that were unmasked when the run was last extended
        self.ranks, self.buffers = Ranks(), IndexBuffers(self.root)
        self.base_digests = digest_base(self)
        policy = POLICIES.get(type(self.strategy.selection), UnmaskingPolicy)
        importance = self.strategy.importance
        self.policy = policy(importance, self.schedule, self.tensors, self.seed, self.ranks)
        self.weights, self.backward = EffectiveWeights(self), BackwardCollector(self)
        self.compiled = CompiledGraphs(self)
        self.known_values: list[weakref.ref[SparseValues]] = []  # the flat deltas so far, the present one last
        self._forward, self._traced = _Forward(), False  # whether dynamo traces the root's forward
        self._counted_by_hook = False  # whether the last step was
        self._position_seen = 0  # version of the buffer when step and updates were read from it
        self.hooks: list[Any] = []  # on the root
        self.was_sharded = False  # whether the root has run forward under FSDP2
        # of a state dict that is loaded: tensors without index buffers, prefix, all names of a trained state
        self.loading: tuple[set[MaskedTensor], str, set[str] | None] = (set(), "", None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_position_seen": -1, "known_values": [], "_forward": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forward = _Forward()  # a copy of the model is in none
        listen(self)

    def begin(self, selected: Tensor) -> None:
        """Unmasks the entries (n,), global ids, that were chosen before training."""
        self.weights.append(selected)
        self._find_dormant()
        self.weights.write()

    @property
    def values(self) -> SparseValues:
        """(capacity,) the flat delta."""
        return flat_delta(self.root)

    @property
    def unmasked(self) -> int:
        """Number of entries unmasked so far; their slots are 0 to ``unmasked - 1``."""
        return self.buffers.total

    @property
    def trained(self) -> int:
        """Number of entries that the step in progress trains."""
        return self.unmasked if self.policy.active is None else int(self.policy.active.sum())

    @property
    def progress(self) -> Progress:
        """How far training is."""
        return Progress(self.step, self.steps, self.unmasked, self.budget)

    def note_values(self) -> None:
        """Remembers the flat delta as it is now, in case it is replaced."""
        if not self.known_values or self.known_values[-1]() is not self.values:
            self.known_values.append(weakref.ref(self.values))

    @property
    def _position(self) -> Tensor:
        return self.root._buffers[POSITION]  # type: ignore[return-value]

    def _read_position(self) -> None:
        self.step, self.updates = self._position.tolist()
        self._position_seen = self._position._version

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 has sharded the weights."""
        return is_fully_sharded(self.root)

    @property
    def in_forward(self) -> bool:
        """Whether a weight that is read is a weight that is used: in the root's forward, or a recomputed part of it."""
        return self._traced or self._forward.depth > 0 or torch._C._current_graph_task_id() != -1

    @property
    def forward_pass(self) -> int:
        """Number of the root's forward pass that this thread is in, or was in last."""
        return self._forward.number

    def enter(self) -> None:
        """The root's forward begins: refreshes the weights and makes a root anchor for compiled parts."""
        if torch.compiler.is_dynamo_compiling():
            self.compiled.enter()
            self._traced = True
        else:
            self.weights.freeze()
            self.refresh()
            self.compiled.make_root()
            self._forward.number += 1
            self._forward.depth += 1

    def leave(self) -> None:
        """The root's forward has ended, or failed."""
        self.compiled.leave()
        self._traced = False
        if not torch.compiler.is_dynamo_compiling():
            self._forward.depth = max(0, self._forward.depth - 1)

    def use(self, tensor: MaskedTensor) -> AnchoredUse | None:
        """Announces a use of a tensor in a forward pass; ``None`` where no gradient will be collected."""
        if self.weights.are_base or not torch.is_grad_enabled():
            return None
        values = self.values
        if not values.requires_grad:
            return None
        # a checkpoint may be recomputed after the budget is spent, so that a tensor without entries counts as used
        saved_by_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        may_be_recomputed = saved_by_hooks and not self.policy.static
        if not (tensor.count or self.policy.growing(self.progress) or may_be_recomputed):
            return None
        tensor.check_shape()
        return self.backward.anchors.use(tensor, values, self.backward)

    def optimizer_stepped(self) -> None:
        """Counts an optimizer step and writes the new deltas into the weights."""
        self.weights.check_trained("optimizer.step()")
        with uninterrupted():
            note_counted(self)
            self._counted_by_hook = True
            self._forward.depth = 0  # forward passes that were interrupted have not left
            self.step += 1
            self.updates += self.trained
            self.backward.step_done()
            self._position.copy_(upload([self.step, self.updates], self._position.device))
            self._position_seen = self._position._version
            self.weights.write()

    def count_step(self) -> None:
        """Counts a step of an optimizer that is none of ``torch.optim``; raises where the hook has counted it."""
        if self._counted_by_hook and not self.backward.passes:
            raise SparsifyError(
                "this optimizer step was counted already: the optimizer is one of torch.optim's, or derives from it, "
                "and tells of its steps by itself; leave optimizer_stepped(model) out."
            )
        self.optimizer_stepped()
        self._counted_by_hook = False

    def settle(self) -> None:
        """Catches up with an optimizer step that was interrupted, and with buffers that were written to."""
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
        """Brings the weights in step with the flat delta."""
        self.settle()
        self.weights.refresh()
        self.backward.streams.use(self.values.device)

    @torch.no_grad()
    def state_loaded(self, plain: set[MaskedTensor]) -> None:
        """Brings everything in step after a state dict was loaded.

        The weights of ``plain`` tensors came without index buffers, as from a merged checkpoint. They are the values
        that run: their delta becomes weight minus base.
        """
        self.buffers.loaded()
        self._read_position()
        self._restart()
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
            delta = tensor.effective.to(values.dtype) - tensor.base.to(values.dtype)
            values[tensor.slots.to(values.device)] = delta.to(values)
        self.weights.write(but=plain)

    def extend(
        self,
        *,
        budget: int | float | None = None,
        steps: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Continues a run with a larger budget, or for more steps, than it was begun with.

        The unmasked entries stay; the schedule becomes that of the new budget and steps. To be called between two
        steps, as after loading an earlier run's state, and before DDP and ``fully_shard()``. A larger budget makes
        ``sparse_values`` a new, longer parameter.

        Args:
            budget: entries in all, or a share of the candidates; ``None``: as before.
            steps: optimizer steps in all, those done included; ``None``: as before.
            optimizer: one that holds ``sparse_values``: it gets the new parameter, and its state is padded with zeros,
                as if the budget had been larger from the start (SGD, the Adam family, Lion). ``None``: an optimizer is
                made afterwards.

        Raises:
            SparsifyError: when budget or steps get smaller, a step has begun, or the strategy chooses its entries
                before training; before anything has been changed.

        Example:
            >>> import sparsify
            >>> model = sparsify.sparsify(torch.nn.Linear(4, 4), budget=3, steps=10)
            >>> sparsify.get_unmasker(model).extend(budget=6, steps=20)
            >>> model.sparse_values.shape
            torch.Size([6])
        """
        budget, steps, capacity = plan_extension(self, budget, steps, optimizer)
        if capacity > self.values.numel():
            lengthen(self, capacity, optimizer)
        self.budget, self.steps, self.extended_at = budget, steps, self.unmasked
        self._restart()

    def _restart(self) -> None:
        self.policy.restart()
        self.backward.restart()

    def _find_dormant(self) -> None:
        for tensor in self.tensors if self.policy.static else ():
            tensor.dormant = not tensor.count

    def export(self, budget: int | None, model: nn.Module) -> DeltaParts:
        """The parts of a :class:`sparsify.SparseDelta`, which finds this engine without training code."""
        return export(self, budget, model)

    def exporter(self, model: nn.Module) -> Exporter:
        """A function that gives the model's present version, for :class:`sparsify.DeltaPublisher`."""
        return Exporter(self, model)
