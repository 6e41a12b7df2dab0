"""Backward: the gradients of all nodes on their way into one flat gradient, and the entries that they unmask.

collect   a node hands over a weight's gradient; the unmasked entries' part goes into one flat buffer, the masked
          entries are shown to the step's selector, the rest is freed with the node
commit    after the last node: the selector's winners join the index buffers, and the flat gradient is returned to
          autograd, their own gradients included

Both are ranges of torch's profiler.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from sparsify.common.devices import Streams
from sparsify.common.interrupts import uninterrupted
from sparsify.common.ranks import num_ranks
from sparsify.errors import SparsifyError
from sparsify.masked.gradients import Gradient
from sparsify.masked.module import without_autocast
from sparsify.masked.recompute import release_memory
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.context import Work
from sparsify.selection.policies import Progress, policy_of
from sparsify.selection.selectors import Selector
from sparsify.selection.topk import Winners
from sparsify.strategies.schedules import Schedule
from sparsify.training.anchors import Anchors
from sparsify.training.backward_pass import BackwardPass
from sparsify.training.compiled import CompiledGraphs
from sparsify.training.flat_delta import SparseValues
from sparsify.training.optimizer_hook import Listener
from sparsify.training.rank_checks import Engine as Comparable
from sparsify.training.rank_checks import agree_on_winners, check_ranks_alike
from sparsify.training.weights import EffectiveWeights

OVERLAPPING = (
    "two backward passes through one sparsified model ran at the same time in several threads, and part of one's "
    "gradient is lost: they shared a GPU, or one unmasked entries that the other did not know of. Run the backward "
    "passes one after the other (with a lock around backward()); forward passes may overlap."
)
COLLECT, COMMIT = "sparsify::collect", "sparsify::commit"  # the names of the ranges


class Engine(Comparable, Listener, Protocol):
    """What is trained, and on how many ranks."""

    weights: EffectiveWeights
    schedule: Schedule
    check: bool
    work: Work

    @property
    def values(self) -> SparseValues: ...

    def settle(self) -> None:
        """Brings its books in order after what came past them."""

    def append(self, ids: Tensor, slots: Tensor) -> None:
        """Adds entries (n,) given by global id to the index buffers."""

    def note_values(self) -> None:
        """Remembers the flat delta as it is now, in case it is replaced."""


class Collection:
    """Receives the gradients of an engine's tensors; the sink of all anchors.

    Args:
        engine: whose they are.

    Attributes:
        anchors: the uses in eager graphs.
        compiled: the uses in compiled graphs.
        policy: how the unmasked set unfolds.
        streams: that its backward passes run on.
        selected: whether the optimizer step in progress has had its selection.
        passes: backward passes since the last optimizer step.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.anchors = Anchors(self)
        self.compiled = CompiledGraphs(engine, self, self.anchors)
        self.policy = policy_of(
            engine.strategy, engine.schedule, seed=engine.seed, ranks=engine.ranks, sync_mode=engine.sync_mode
        )
        self.streams = Streams()
        self.selected = False
        self.passes = 0
        self._passes: dict[int, BackwardPass] = {}  # those that are running, by autograd's id; threads run several
        self._dropped: set[int] = set()  # ids of those that were taken to have failed
        self._reached: set[MaskedTensor] | None = set()  # until the first step: tensors that got a gradient
        self._compared: set[int] = set()  # the steps, up to two, in which the ranks were found to be alike
        self._lock = threading.RLock()  # autograd runs the nodes of each device in a thread of its own

    @property
    def growing(self) -> bool:
        """Whether entries may still be unmasked, those of the step in progress among them."""
        return self.policy.growing(self._progress)

    @property
    def _progress(self) -> Progress:
        engine = self._engine
        return Progress(engine.step, engine.steps, engine.buffers.total, engine.budget)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_passes": {}, "_dropped": set(), "passes": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    # -------------------------------------------------------------------------------- as autograd calls it

    def wants(self, tensor: MaskedTensor) -> bool:
        """Whether the running backward pass needs this tensor's gradient."""
        if self._reached is not None:
            self._reached.add(tensor)
        with self._lock:
            selector = self._running_pass().selector
            return tensor.count > 0 or (selector is not None and selector.wants(tensor))

    def collect(self, tensor: MaskedTensor, gradient: Gradient, *, whole: bool) -> None:
        """Takes the gradient of one use; ``whole`` where the tensor has no other use."""
        with self._lock, _range(COLLECT), self.streams.joined(gradient.device):
            current = self._running_pass()
            if whole and tensor not in current.held and not self.compiled.waits(tensor):
                current.settle(tensor, gradient)
                return
            held = current.held
            with without_autocast(gradient.device):
                held[tensor] = held[tensor].add(gradient) if tensor in held else gradient.held()

    def finish(self, tensor: MaskedTensor) -> None:
        """The last use of the tensor has been collected."""
        with self._lock, _range(COLLECT):
            current = self._running_pass()
            waits = self.compiled.waits(tensor) or self.anchors.meet(tensor)  # the commit settles it
            gradient = None if waits else current.held.pop(tensor, None)
            if gradient is not None:
                with self.streams.joined():
                    current.settle(tensor, gradient)

    def commit(self) -> Tensor:
        """Ends the backward pass: unmasks the winners and returns the flat gradient (capacity,)."""
        with self._lock, _range(COMMIT), self.streams.joined(), without_autocast(self._engine.values.device):
            grad = self._commit()
        self.streams.forget()
        return grad

    def _commit(self) -> Tensor:
        engine = self._engine
        current = self._running_pass()
        del self._passes[current.graph]
        current.settle_held()
        current.settle_small()
        self.compiled.forget_recomputed()
        release_memory()
        grad, selector = current.grad, current.selector
        if engine.buffers.total != current.unmasked:
            raise SparsifyError(OVERLAPPING)
        if selector is not None:
            winners, finite = selector.winners(), torch.stack([grad.isfinite().all(), *selector.finite()]).all()
            if not (finite if num_ranks() == 1 else agree_on_winners(engine, winners, finite)):
                # as with full fine-tuning, the optimizer (or GradScaler) is to see that this pass overflowed
                self.passes += 1
                return grad.fill_(torch.nan)
            with uninterrupted():
                self._unmask(winners, grad)
                self.selected = True
        self.passes += 1
        if self.policy.active is not None:
            grad.masked_fill_(~self.policy.active, 0)
        return engine.ranks.average_(grad) if engine.weights.sharded else grad  # DDP averages it by itself

    def _unmask(self, winners: Winners, grad: Tensor) -> None:
        """Gives the winners that have no slot the next free ones and writes their gradients into ``grad``."""
        engine, progress = self._engine, self._progress
        slots, capacity = engine.buffers.all_slots, grad.numel()
        new = self.policy.unmask(winners, progress, engine.tensors, slots, capacity)
        free = torch.arange(progress.unmasked, progress.unmasked + new.ids.numel(), device=new.ids.device)
        grad[free] = new.grads
        engine.append(new.ids, free)

    # -------------------------------------------------------------------------------- from step to step

    def step_done(self) -> None:
        """An optimizer step is over."""
        self._warn_of_unreached()
        self.selected, self.passes = False, 0
        self.compiled.forget()

    def restart(self) -> None:
        """The unmasked set is another one now: a state dict was loaded."""
        self.selected, self.passes = False, 0
        self.policy.restart()

    def _running_pass(self) -> BackwardPass:
        graph = torch._C._current_graph_task_id()
        current = self._passes.get(graph)
        if current is None:
            engine = self._engine
            engine.weights.check_trained("backward()")
            engine.settle()
            engine.note_values()
            self._compare_ranks()
            self._drop_failed(graph)
            values = engine.values.detach()
            with self.streams.joined(values.device):
                current = BackwardPass(graph, values, self._chooser(), engine.buffers.total)
            self._passes[graph] = current
        return current

    def _drop_failed(self, graph: int) -> None:
        """Drops what failed passes left behind: a thread runs one pass at a time, so its earlier one is over."""
        if graph in self._dropped:
            raise SparsifyError(OVERLAPPING)
        thread = threading.get_ident()
        failed = [key for key, other in self._passes.items() if other.thread == thread]
        for key in failed:
            del self._passes[key]
        self._dropped.update(failed)

    def _chooser(self) -> Selector | None:
        """Makes what selects the entries that this backward pass unmasks."""
        if self.selected:
            return None
        engine, work = self._engine, Work()
        selector = self.policy.selector(self._progress, engine.tensors, engine.values, work, check=engine.check)
        if selector is not None:
            engine.work = work
        return selector

    def _compare_ranks(self) -> None:
        """In the first step, and in the next: then it shows whether gradients are averaged."""
        step = self._engine.step
        if len(self._compared) < 2 and step not in self._compared and num_ranks() > 1:
            check_ranks_alike(self._engine)
            self._compared.add(step)

    def _warn_of_unreached(self) -> None:
        reached, self._reached = self._reached, None
        if reached is None:
            return
        tensors = self._engine.tensors
        expected = tensors if self.growing else [tensor for tensor in tensors if tensor.count]
        names = [tensor.name for tensor in expected if tensor not in reached]
        if names:
            warnings.warn(
                f"{len(names)} of {len(expected)} tensors got no gradient in the first step and are not trained: "
                f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}. If the loss does not depend on them, all "
                "is well; otherwise their weight is read without their module being called: please report it.",
                stacklevel=2,
            )


def _range(name: str) -> AbstractContextManager[object]:
    """A range of torch's profiler, where one is running: with none a range still takes longer than a small gradient."""
    return record_function(name) if torch._C._autograd._profiler_enabled() else nullcontext()
