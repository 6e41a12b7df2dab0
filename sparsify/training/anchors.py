"""Anchors: autograd itself tells when the last use of a tensor has run backward.

    flat delta --> root anchor --> one anchor per tensor --> every use of that tensor in a forward pass

Each use takes its tensor's anchor as an input, so in backward autograd runs a tensor's anchor after the tensor's last
use, and the root's after all of them. Tied, shared and repeated modules, several forwards before one backward, and
recomputation under checkpointing need no special case. The gradients along these edges are empty: each use hands its
gradient to the :class:`~sparsify.training.backward.BackwardCollector`, and the root's node returns the flat gradient.
A tensor with a single use is finished in that use's own node; only the sum over several uses is held until the
tensor's anchor runs.

A tensor's anchor lives as long as a graph that holds it, and is shared by all uses that may still meet in one backward
pass. Where a graph that was kept meets a newer one, with an anchor of its own, the sum is held until the root's node
runs. The root anchor is shared by all graphs over the same flat delta; compiled ones have it as an input.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsify.core.gradients import Gradient
from sparsify.core.tensor import MaskedTensor
from sparsify.errors import SparsifyError
from sparsify.masked.module import first_order

if TYPE_CHECKING:
    from sparsify.training.backward import BackwardCollector

REENTRANT = (
    "`{name}` was recomputed inside a backward pass of its own: reentrant activation checkpointing cannot work with "
    "entries that are selected over the whole model. Use the non-reentrant form: "
    'gradient_checkpointing_kwargs={{"use_reentrant": False}}.'
)


# Threads add and remove uses concurrently, and an interrupt may come at any moment. Sets of numbered uses need no lock,
# which an interrupted thread could keep.
_NUMBERS = itertools.count()


class _RootNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, collector: weakref.ref[BackwardCollector]) -> Tensor:
        ctx.collector = collector  # weakly: the collector itself holds the root anchor
        ctx.set_materialize_grads(False)
        return values.new_zeros(1)  # torch.compile takes a float64 scalar for a Python number, and compiles again

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        collector = ctx.collector()
        assert collector is not None  # a use of the model has handed it a gradient
        return collector.commit(), None


class _TensorNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, root: Tensor, collector: BackwardCollector, tensor: MaskedTensor) -> Tensor:
        ctx.collector, ctx.tensor = collector, tensor
        ctx.set_materialize_grads(False)  # a GPU launches nothing for an anchor
        return root.new_empty(())

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> tuple[None, None, None]:
        ctx.collector.finish(ctx.tensor)
        return None, None, None


class Root:
    """The root anchor over a flat delta; all graphs share it: those that meet in one backward pass end together."""

    def __init__(self, values: Tensor, collector: BackwardCollector) -> None:
        self.values = values
        self._made_of = _kind(values)
        with torch.inference_mode(False), torch.enable_grad():
            self.output: Tensor = _RootNode.apply(values, weakref.ref(collector))

    def serves(self, values: Tensor) -> bool:
        """Whether this is the root anchor of a flat delta as it is now."""
        return self.values is values and self._made_of == _kind(values)


def is_reached(anchor: Tensor) -> bool:
    """Whether the running backward pass goes on to the flat delta; one for the gradient of an input alone does not."""
    return anchor.grad_fn is not None and torch._C._will_engine_execute_node(anchor.grad_fn)


def _kind(values: Tensor) -> tuple[torch.device, torch.dtype, bool]:
    return values.device, values.dtype, values.requires_grad


class Anchor:
    """One tensor's anchor in the graphs that are being built."""

    def __init__(
        self, root: Root, collector: BackwardCollector, tensor: MaskedTensor, known: list[weakref.ref[Anchor]]
    ) -> None:
        self.root = root
        self.collector = collector
        self.tensor = tensor
        self.uses: set[int] = set()  # their numbers
        self.pending: set[int] = set()  # those that have not run backward
        self.output: Tensor = _TensorNode.apply(root.output, collector, tensor)
        for other in tuple(known):
            if (anchor := other()) is None or anchor.is_over:
                with suppress(ValueError):  # another thread has removed it
                    known.remove(other)
        known.append(weakref.ref(self))

    @property
    def is_over(self) -> bool:
        """Whether its graph was freed by its backward pass, so that it cannot run again."""
        node: Any = self.output.grad_fn
        try:
            node.saved_tensors  # noqa: B018, raises where they were freed, even where there are none
        except RuntimeError:
            return True
        return False


class AnchoredUse:
    """One use of a tensor; its autograd node holds it, and with it the anchor."""

    _waits = False  # for a backward

    def __init__(self, anchor: Anchor, *, recomputed: bool) -> None:
        self.anchor = anchor.output
        self._anchor = anchor
        self._recomputed = recomputed
        self._number = next(_NUMBERS)
        if not recomputed:
            anchor.uses.add(self._number)
            anchor.pending.add(self._number)
            self._waits = True  # last, so that an interrupt before it leaves one pending too many and never too few

    def __del__(self) -> None:
        if self._waits:  # the weight was only read, as for its dtype, or the graph was dropped
            self._end()
            self._anchor.uses.discard(self._number)

    def wanted(self) -> bool:
        if self._recomputed:
            raise SparsifyError(REENTRANT.format(name=self._anchor.tensor.name))
        return is_reached(self.anchor) and self._anchor.collector.wants(self._anchor.tensor)

    def collect(self, gradient: Gradient | None) -> None:
        if self._waits:
            self._end()
        if gradient is not None:
            collector, tensor = self._anchor.collector, self._anchor.tensor
            whole = len(self._anchor.uses) == 1 and not collector.anchors.meet(tensor)
            collector.collect(tensor, gradient, whole=whole)

    def _end(self) -> None:
        self._waits = False
        self._anchor.pending.discard(self._number)


class Anchors:
    """Hands out anchors in forward passes."""

    def __init__(self) -> None:
        self.current: Root | None = None  # the root anchor that was last asked for
        self._making = threading.RLock()
        # those that may run backward, the newest last
        self._known: defaultdict[MaskedTensor, list[weakref.ref[Anchor]]] = defaultdict(list)

    def use(self, tensor: MaskedTensor, values: Tensor, collector: BackwardCollector) -> AnchoredUse:
        """A new use of a tensor, ``values`` (capacity,) being the flat delta as it is now."""
        # a forward pass inside a backward pass is checkpointing's: its nodes only refill the first pass's
        recomputed = torch._C._current_graph_task_id() != -1
        root, anchor = self.root(values, collector), self._anchor(tensor)
        if anchor is None or not anchor.pending or anchor.root is not root:
            anchor = Anchor(root, collector, tensor, self._known[tensor])
        return AnchoredUse(anchor, recomputed=recomputed)

    def meet(self, tensor: MaskedTensor) -> bool:
        """Whether several graphs that use the tensor run backward together, each with an anchor of its own."""
        known = self._known[tensor]
        if len(known) < 2:
            return False
        living = [anchor for other in tuple(known) if (anchor := other()) is not None]
        return sum(is_reached(anchor.output) for anchor in living) > 1

    def root(self, values: Tensor, collector: BackwardCollector) -> Root:
        """The root anchor of the flat delta ``values`` (capacity,) as it is now."""
        root = self.current
        if root is None or not root.serves(values):
            with self._making:  # one root for the forward passes of all threads
                root = self.current
                if root is None or not root.serves(values):
                    self.current = None  # releases autograd's accumulator of a flat delta that was cast since
                    root = self.current = Root(values, collector)
        return root

    def waits(self, tensor: MaskedTensor) -> bool:
        """Whether uses of the tensor still wait for their backward."""
        anchor = self._anchor(tensor)
        return anchor is not None and bool(anchor.pending)

    def _anchor(self, tensor: MaskedTensor) -> Anchor | None:
        newest = (None, *self._known[tensor])[-1]  # in one go: another thread may remove some
        return None if newest is None else newest()

    def __reduce__(self) -> tuple[type[Anchors], tuple[()]]:
        return Anchors, ()  # a copy of the model starts with no open graph
