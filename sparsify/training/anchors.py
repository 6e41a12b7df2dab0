"""When a tensor's gradient is whole: anchors let autograd itself answer that.

    flat delta --> root anchor --> one anchor per tensor --> every use of that tensor in a forward pass

Each use takes its tensor's anchor as an input, so in backward autograd runs a tensor's anchor after the tensor's last
use, and the root's after all of them. Tied, shared and repeated modules, several forwards before one backward, and
recomputation under checkpointing need no special case. The gradients along these edges are empty: what a use saw goes
to the :class:`Sink` directly, and the root's node returns the flat gradient. A tensor with a single use is done with
in that use's own node; only the sum over several uses has to be held until the tensor's anchor runs.

A tensor's anchor lives as long as a graph that holds it, and is shared by all uses that may still meet in one backward
pass. Where a graph that was kept meets a newer one, with an anchor of its own, the sum is held until the root's node
runs. The root anchor is shared by all graphs over the same flat delta; compiled ones have it as an input.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsify.errors import SparsifyError
from sparsify.masked.gradients import Gradient
from sparsify.masked.module import first_order
from sparsify.masked.tensor import MaskedTensor

REENTRANT = (
    "`{name}` was recomputed inside a backward pass of its own: reentrant activation checkpointing cannot work with "
    "entries that are selected over the whole model. Use the non-reentrant form: "
    'gradient_checkpointing_kwargs={{"use_reentrant": False}}.'
)


# Threads change the books of uses together, and an interrupt may come at any moment. Sets, in which each use has a
# number of its own, need no lock, which an interrupted thread could keep.
_NUMBERS = itertools.count()


class Sink(Protocol):
    """What receives the gradients of a backward pass."""

    def wants(self, tensor: MaskedTensor) -> bool:
        """Whether the running backward pass needs this tensor's gradient."""

    def collect(self, tensor: MaskedTensor, gradient: Gradient, *, whole: bool) -> None:
        """Takes the gradient of one use; ``whole`` where the tensor has no other use."""

    def finish(self, tensor: MaskedTensor) -> None:
        """The last use of the tensor has been collected."""

    def commit(self) -> Tensor:
        """Ends the backward pass and returns the gradient (budget,) of the flat delta."""


class _RootNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sink: weakref.ref[Sink]) -> Tensor:
        ctx.sink = sink  # weakly: the sink itself holds the root anchor
        return values.new_zeros(1)  # torch.compile takes a float64 scalar for a Python number, and compiles again

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        sink = ctx.sink()
        assert sink is not None  # whatever got here has handed it a gradient
        return sink.commit(), None


class _TensorNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, root: Tensor, sink: Sink, tensor: MaskedTensor) -> Tensor:
        ctx.sink, ctx.tensor = sink, tensor
        return root.new_zeros(())

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> tuple[None, None, None]:
        ctx.sink.finish(ctx.tensor)
        return None, None, None


class Root:
    """The root anchor over a flat delta; all graphs share it: those that meet in one backward pass end together."""

    def __init__(self, values: Tensor, sink: Sink) -> None:
        self.values = values
        self._made_of = _kind(values)
        with torch.inference_mode(False), torch.enable_grad():
            self.output: Tensor = _RootNode.apply(values, weakref.ref(sink))

    def serves(self, values: Tensor) -> bool:
        """Whether this is the root anchor of a flat delta as it is now."""
        return self.values is values and self._made_of == _kind(values)


def is_reached(anchor: Tensor) -> bool:
    """Whether the running backward pass goes on to the flat delta; one for the gradient of an input alone does not."""
    return anchor.grad_fn is not None and torch._C._will_engine_execute_node(anchor.grad_fn)


def meet(anchors: Sequence[weakref.ref[Anchor]]) -> bool:
    """Whether the running backward pass goes through several of a tensor's anchors."""
    if len(anchors) < 2:
        return False
    living = [anchor for known in anchors if (anchor := known()) is not None]
    return sum(is_reached(anchor.output) for anchor in living) > 1


def _kind(values: Tensor) -> tuple[torch.device, torch.dtype, bool]:
    return values.device, values.dtype, values.requires_grad


class Anchor:
    """One tensor's anchor in the graphs that are being built, with the number of its uses and of those pending."""

    def __init__(self, root: Root, sink: Sink, tensor: MaskedTensor, known: list[weakref.ref[Anchor]]) -> None:
        self.root = root
        self.sink = sink
        self.tensor = tensor
        self.uses: set[int] = set()
        self.pending: set[int] = set()
        self.output: Tensor = _TensorNode.apply(root.output, sink, tensor)
        for other in tuple(known):
            if (anchor := other()) is None or anchor.is_over:
                with suppress(ValueError):  # another thread has removed it
                    known.remove(other)
        known.append(weakref.ref(self))
        self.known = known

    @property
    def is_over(self) -> bool:
        """Whether its graph was freed by its backward pass, so that it cannot run again."""
        node: Any = self.output.grad_fn
        try:
            node.saved_tensors  # noqa: B018, it raises where they are freed, be there any or not
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
        if self._waits:  # a weight that was only looked at, as for its dtype, or a graph that was dropped
            self._end()
            self._anchor.uses.discard(self._number)

    def wanted(self) -> bool:
        if self._recomputed:
            raise SparsifyError(REENTRANT.format(name=self._anchor.tensor.name))
        return is_reached(self.anchor) and self._anchor.sink.wants(self._anchor.tensor)

    def collect(self, gradient: Gradient | None) -> None:
        if self._waits:
            self._end()
        if gradient is not None:
            whole = len(self._anchor.uses) == 1 and not meet(self._anchor.known)
            self._anchor.sink.collect(self._anchor.tensor, gradient, whole=whole)

    def _end(self) -> None:
        self._waits = False
        self._anchor.pending.discard(self._number)


class Anchors:
    """Hands out anchors in forward passes.

    Args:
        sink: receives the gradients.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.current: Root | None = None  # the root anchor that was last asked for
        self._making = threading.RLock()
        self._anchors: dict[MaskedTensor, weakref.ref[Anchor]] = {}
        self._known: defaultdict[MaskedTensor, list[weakref.ref[Anchor]]] = defaultdict(list)  # that may run backward

    def use(self, tensor: MaskedTensor, values: Tensor) -> AnchoredUse:
        """A new use of a tensor, ``values`` (budget,) being the flat delta as it is now."""
        # a forward pass inside a backward pass is checkpointing's: its nodes only refill the first pass's
        recomputed = torch._C._current_graph_task_id() != -1
        root, anchor = self.root(values), self._anchor(tensor)
        if anchor is None or not anchor.pending or anchor.root is not root:
            anchor = Anchor(root, self._sink, tensor, self._known[tensor])
            self._anchors[tensor] = weakref.ref(anchor)
        return AnchoredUse(anchor, recomputed=recomputed)

    def meet(self, tensor: MaskedTensor) -> bool:
        """Whether several graphs that use the tensor run backward together, each with an anchor of its own."""
        return meet(self._known[tensor])

    def root(self, values: Tensor) -> Root:
        """The root anchor of the flat delta ``values`` (budget,) as it is now."""
        root = self.current
        if root is None or not root.serves(values):
            with self._making:  # one root for the forward passes of all threads
                root = self.current
                if root is None or not root.serves(values):
                    self.current = None  # with it goes autograd's accumulator of a flat delta that has been cast
                    root = self.current = Root(values, self._sink)
        return root

    def waits(self, tensor: MaskedTensor) -> bool:
        """Whether uses of the tensor still wait for their backward."""
        anchor = self._anchor(tensor)
        return anchor is not None and bool(anchor.pending)

    def _anchor(self, tensor: MaskedTensor) -> Anchor | None:
        known = self._anchors.get(tensor)
        return None if known is None else known()

    def __reduce__(self) -> tuple[type[Anchors], tuple[Sink]]:
        return Anchors, (self._sink,)  # a copy of the model starts with no open graph
