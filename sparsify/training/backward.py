"""Backward: the gradients of all nodes on their way into one flat gradient, and the entries that they unmask.

collect   a node hands over a weight's gradient; the unmasked entries' part goes into one flat buffer, the masked
          entries are offered to the step's selector, the rest is freed with the node
commit    after the last node: the selector's winners join the index buffers, and the flat gradient is returned to
          autograd, the winners' own gradients included

Both are ranges of torch's profiler. :class:`BackwardPass` lives for one pass; :class:`BackwardCollector` as long as the
engine.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import record_function

from sparsify.common.names import listed
from sparsify.common.ranks import num_ranks
from sparsify.common.streams import Streams
from sparsify.core.gradients import Gradient
from sparsify.core.interrupts import uninterrupted
from sparsify.core.tensor import MaskedTensor, count_by_tensor
from sparsify.core.topk import Winners
from sparsify.errors import SparsifyError
from sparsify.masked.module import without_autocast
from sparsify.masked.recompute import release_memory
from sparsify.selection.context import Work
from sparsify.selection.selectors import Selector
from sparsify.selection.small_tensors import SmallGradients, is_small
from sparsify.training.anchors import Anchors
from sparsify.training.rank_checks import agree, check_agreement, check_ranks_alike, meet_at_end

if TYPE_CHECKING:
    from sparsify.training.engine import Engine

OVERLAPPING = (
    "two backward passes through one sparsified model ran at the same time in several threads, and part of one's "
    "gradient is lost: they shared a GPU, or one unmasked entries that the other did not know of. Run the backward "
    "passes one after the other (with a lock around backward()); forward passes may overlap."
)
COLLECT, COMMIT = "sparsify::collect", "sparsify::commit"  # the names of the ranges


class BackwardPass:
    """One backward pass: the flat gradient as it fills up, and the selector of the entries to unmask, if any."""

    def __init__(self, graph: int, values: Tensor, selector: Selector | None, unmasked: int) -> None:
        self.graph, self.selector = graph, selector  # autograd's id of the pass
        self.unmasked = unmasked  # entries, when it began
        self.thread = threading.get_ident()
        self.grad = torch.zeros_like(values)  # (capacity,)
        self.held: dict[MaskedTensor, Gradient] = {}  # sums of tensors that are used more than once
        self._settled: set[MaskedTensor] = set()
        self._small: dict[torch.device, SmallGradients] = {}
        self._keeps_small = selector is None or selector.batches_small

    def hold(self, tensor: MaskedTensor, gradient: Gradient) -> None:
        """Adds the gradient of one of a tensor's uses to those of the others."""
        with without_autocast(gradient.device):
            self.held[tensor] = self.held[tensor].add(gradient) if tensor in self.held else gradient.held()

    def settle(self, tensor: MaskedTensor, gradient: Gradient) -> None:
        """Takes the unmasked entries' part of a tensor's whole gradient and offers the rest to the selector."""
        with without_autocast(gradient.device):  # which may be on in backward
            if not gradient.numel:
                if self.selector is not None:
                    self.selector.skip(tensor)
                return
            again = tensor in self._settled  # a graph that was kept runs backward together with a newer one
            self._settled.add(tensor)
            if is_small(tensor) and self._keeps_small and not again:
                self._small.setdefault(gradient.device, SmallGradients()).add(tensor, gradient)
                return
            if self.selector is not None and not again:
                taken = self.selector.offer(tensor, gradient)
            else:
                taken = gradient.take(tensor.indices)
            if tensor.count:
                slots, taken = tensor.slots.to(self.grad.device), taken.to(self.grad)
                self.grad[slots] = self.grad[slots] + taken if again else taken

    def settle_rest(self) -> None:
        """Settles the sums that are still held, and then the small tensors, all at once."""
        while self.held:
            self.settle(*self.held.popitem())
        for small in self._small.values():
            slots = torch.cat([tensor.slots for tensor in small.tensors]).to(self.grad.device)
            self.grad[slots] += small.take().to(self.grad)
            if self.selector is not None:
                self.selector.offer_small(small)


class BackwardCollector:
    """Receives the gradients of all masked tensors of an engine, and ends each backward pass with the flat gradient."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.anchors = Anchors()  # of the graphs that autograd runs; ``engine.compiled`` has the uses by compiled ones
        self.streams = Streams()  # that its backward passes run on
        self.selected = False  # whether the entries of the optimizer step in progress have been selected
        self.passes = 0  # since the last optimizer step
        self._passes: dict[int, BackwardPass] = {}  # those that are running, by autograd's id; threads run several
        self._dropped: set[int] = set()  # ids of those that were taken to have failed
        self._compared: set[int] = set()  # the steps, up to two, in which the ranks were found to be alike
        self._reached: set[MaskedTensor] | None = set()  # until the first step: tensors that got a gradient
        self._lock = threading.RLock()  # autograd runs the nodes of each device in a thread of its own

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_passes": {}, "_dropped": set(), "passes": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    # -------------------------------------------------------------------------------- called by autograd's nodes

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
            if whole and tensor not in current.held and not self._engine.compiled.waits(tensor):
                current.settle(tensor, gradient)
            else:
                current.hold(tensor, gradient)

    def finish(self, tensor: MaskedTensor) -> None:
        """The last use of the tensor has been collected."""
        with self._lock, _range(COLLECT):
            current = self._running_pass()
            waits = self._engine.compiled.waits(tensor) or self.anchors.meet(tensor)  # the commit settles it
            gradient = None if waits else current.held.pop(tensor, None)
            if gradient is not None:
                with self.streams.joined():
                    current.settle(tensor, gradient)

    def commit(self) -> Tensor:
        """Ends the backward pass: unmasks the winners and returns the flat gradient (capacity,)."""
        with self._lock, _range(COMMIT), self.streams.joined(), without_autocast(self._engine.values.device):
            grad = self._commit()
            self.passes += 1
        self.streams.forget()
        return grad

    def _commit(self) -> Tensor:
        engine, current = self._engine, self._running_pass()
        del self._passes[current.graph]
        current.settle_rest()
        engine.compiled.pass_done()
        release_memory()
        grad, selector = current.grad, current.selector
        if engine.unmasked != current.unmasked:
            raise SparsifyError(OVERLAPPING)
        if selector is not None:
            if num_ranks() > 1:
                meet_at_end(engine)
            winners, finite = selector.winners(), selector.finite() & grad.isfinite().all()
            outcome = agree(engine, winners, finite) if num_ranks() > 1 else finite.view(1)
            counts = count_by_tensor(winners.ids, engine.tensors)
            read = torch.cat([counts, outcome.to(counts)]).tolist()  # the step's one wait for a GPU
            sizes, (is_finite, *alike) = read[: counts.numel()], read[counts.numel() :]
            if alike:
                check_agreement(is_finite, *alike)
            if not is_finite:
                return grad.fill_(torch.nan)  # the optimizer, or GradScaler, sees that this pass overflowed
            with uninterrupted():
                self._unmask(winners.first(sum(sizes)), sizes, grad)
                self.selected = True
        if engine.policy.active is not None:
            grad.masked_fill_(~engine.policy.active, 0)
        return engine.ranks.average_(grad) if engine.sharded else grad  # DDP averages it by itself

    def _unmask(self, winners: Winners, sizes: list[int], grad: Tensor) -> None:
        """Gives the winners that have no slot the next free ones and writes their gradients into ``grad``.

        Args:
            winners: what the selector found.
            sizes: how many of them each tensor has.
            grad: (capacity,) the flat gradient.
        """
        engine, unmasked = self._engine, self._engine.unmasked
        new = engine.policy.unmask(winners, engine.progress, engine.buffers.slots(), grad.numel())
        grad[unmasked : unmasked + new.ids.numel()] = new.grads
        engine.weights.append(new.ids, new.weights, sizes if new is winners else None)

    # -------------------------------------------------------------------------------- from step to step

    def step_done(self) -> None:
        """An optimizer step is over."""
        self._warn_of_unreached()
        self._engine.compiled.step_done()
        self.restart()

    def restart(self) -> None:
        """The next backward pass begins a step: after an optimizer step, or a state dict that was loaded."""
        self.selected, self.passes = False, 0

    def _running_pass(self) -> BackwardPass:
        """The backward pass of the node that calls; its first node begins it."""
        graph = torch._C._current_graph_task_id()
        current = self._passes.get(graph)
        if current is None:
            engine = self._engine
            engine.weights.check_trained("backward()")
            engine.settle()
            engine.note_values()
            if num_ranks() > 1 and len(self._compared) < 2 and engine.step not in self._compared:
                check_ranks_alike(engine)  # in the second step, too: then it shows whether gradients are averaged
                self._compared.add(engine.step)
            self._drop_failed(graph)
            values = engine.values.detach()
            with self.streams.joined(values.device):
                policy, work, selector = engine.policy, Work(), None
                if not self.selected:
                    selector = policy.selector(engine.progress, values, work)
                engine.work = engine.work if selector is None else work
                current = BackwardPass(graph, values, selector, engine.unmasked)
            self._passes[graph] = current
        return current

    def _drop_failed(self, graph: int) -> None:
        """Drops the passes of this thread that failed: a thread runs one at a time, so its earlier ones are over."""
        if graph in self._dropped:
            raise SparsifyError(OVERLAPPING)
        thread = threading.get_ident()
        failed = [key for key, other in self._passes.items() if other.thread == thread]
        for key in failed:
            del self._passes[key]
        self._dropped.update(failed)

    def _warn_of_unreached(self) -> None:
        reached, self._reached = self._reached, None
        if reached is None:
            return
        growing = self._engine.policy.growing(self._engine.progress)
        expected = [tensor for tensor in self._engine.tensors if growing or tensor.count]
        names = [tensor.name for tensor in expected if tensor not in reached]
        if names:
            warnings.warn(
                f"{len(names)} of {len(expected)} tensors got no gradient in the first step and are not trained: "
                f"{listed(names)}. If the loss does not depend on them, all is well; otherwise their weight is read "
                "without their module being called: please report it.",
                stacklevel=2,
            )


def _range(name: str) -> AbstractContextManager[object]:
    """A range of torch's profiler, where one is running: with none a range still takes longer than a small gradient."""
    return record_function(name) if torch._C._autograd._profiler_enabled() else nullcontext()
