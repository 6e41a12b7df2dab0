"""What an engine has to do with compiled graphs: a root anchor as they are compiled, and their uses as they run.

    compiled   the root anchor is an input of every use in the graph, and never another while the flat delta stays
    forward    each use is announced
    backward   each use hands over what it saw, and is ended

No Python object lives as long as a compiled graph, so the uses are only counted. A graph that is dropped leaves its
uses behind until the next optimizer step; meanwhile sums are held to the end of a backward pass, and nothing is lost.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsify.errors import SparsifyError
from sparsify.masked.gradients import Gradient
from sparsify.masked.module import without_autocast
from sparsify.masked.tensor import MaskedTensor
from sparsify.training.anchors import REENTRANT, Anchors, Root, Sink, is_reached
from sparsify.training.weights import EffectiveWeights


class Engine(Protocol):
    """What is trained by the graphs."""

    tensors: list[MaskedTensor]
    weights: EffectiveWeights

    @property
    def values(self) -> Tensor:
        """(capacity,) the flat delta."""

    def refresh(self) -> None:
        """The weights are in step with the flat delta."""


class CompiledGraphs:
    """The compiled graphs of a model.

    Args:
        engine: of the model.
        sink: receives the gradients of their uses.
        anchors: of the eager graphs beside them.
    """

    def __init__(self, engine: Engine, sink: Sink, anchors: Anchors) -> None:
        self._engine, self._sink, self._anchors = engine, sink, anchors
        self._entry: Tensor | None = None  # the root anchor of the forward pass that is being compiled
        self._uses: Counter[MaskedTensor] = Counter()  # since the tensor last had none waiting
        self._waiting: Counter[MaskedTensor] = Counter()
        self._recomputed: dict[MaskedTensor, int] = {}  # in which backward pass its graph ran forward again

    def __getstate__(self) -> dict[str, Any]:
        return dict(
            CompiledGraphs(self._engine, self._sink, self._anchors).__dict__
        )  # a copy of the model starts with no open graph

    # -------------------------------------------------------------------------------- as they are compiled

    @property
    def root_anchor(self) -> Tensor:
        """(1,) what every use takes as an input."""
        return self._traced_root().output if self._entry is None else self._entry

    def enter(self) -> None:
        """The root's forward is being compiled; its graph will refresh the weights whenever it runs."""
        from sparsify.masked.compiled import refreshed_root

        self._entry = refreshed_root(self._traced_root().output, self._engine.tensors[0].handle)

    def leave(self) -> None:
        """The root's forward has ended."""
        self._entry = None

    def trains(self, tensor: MaskedTensor) -> bool:
        """Whether a gradient may be collected for the tensor, now or later."""
        return not (self._engine.weights.are_base or tensor.dormant)

    def make_root(self) -> None:
        """Sees to it that there is a root anchor of the flat delta as it is now."""
        self._anchors.root(self._engine.values)

    def _traced_root(self) -> Root:
        """The root anchor; a graph is compiled anew when the flat delta is another one."""
        from sparsify.masked.compiled import made_ready

        made_ready(self._engine.tensors[0].handle)
        root = self._anchors.current
        assert root is not None
        assert root.serves(self._engine.values)  # what is asked here, every run of the graph will ask
        return root

    # -------------------------------------------------------------------------------- as they run

    def refresh(self) -> None:
        """A graph of the root's forward begins: the weights are brought in step."""
        self._engine.refresh()

    def announce(self, tensor: MaskedTensor) -> None:
        """A graph runs forward and uses the tensor; one that is run again inside a backward pass is checkpointing's."""
        tensor.check_shape()
        graph = torch._C._current_graph_task_id()
        if graph != -1:
            self._recomputed[tensor] = graph
            return
        if not self._waiting[tensor]:
            self._uses[tensor] = 0
        self._uses[tensor] += 1
        self._waiting[tensor] += 1

    def use(self, tensor: MaskedTensor) -> AnnouncedUse:
        """One of a tensor's uses, in the backward pass of its graph."""
        return AnnouncedUse(self, tensor, alone=not self._anchors.waits(tensor))

    def waits(self, tensor: MaskedTensor) -> bool:
        """Whether uses of the tensor still wait for their backward."""
        return self._waiting[tensor] > 0

    def forget_recomputed(self) -> None:
        """A backward pass has ended."""
        self._recomputed.clear()

    def forget(self) -> None:
        """Graphs that were built before have seen other weights; those that wait were dropped."""
        self._uses.clear()
        self._waiting.clear()

    def wanted(self, tensor: MaskedTensor) -> bool:
        """Whether anybody wants the gradient of one of a tensor's uses in the backward pass that is running."""
        if self._recomputed.get(tensor, graph := torch._C._current_graph_task_id()) != graph:
            raise SparsifyError(REENTRANT.format(name=tensor.name))
        root = self._anchors.current
        return root is not None and is_reached(root.output) and self._sink.wants(tensor)

    def collect(self, tensor: MaskedTensor, gradient: Gradient | None, *, alone: bool) -> None:
        """Hands over what one of a tensor's uses saw; ``alone`` where no eager node uses the tensor."""
        waiting = self._waiting[tensor]
        self._waiting[tensor] = max(waiting - 1, 0)  # none waits where a graph that was kept runs backward again
        if gradient is None:
            return
        whole = alone and waiting > 0 and self._uses[tensor] == 1
        if not whole:  # what is held on to has to be copied: a compiled graph uses its buffers again
            with without_autocast(gradient.device):
                gradient = gradient.dense().own()
        self._sink.collect(tensor, gradient, whole=whole)
        if alone and waiting == 1:
            self._sink.finish(tensor)


class AnnouncedUse:
    """One use of a tensor by a compiled graph, as its backward sees it."""

    anchor: Tensor  # a compiled graph has it as an input

    def __init__(self, graphs: CompiledGraphs, tensor: MaskedTensor, *, alone: bool) -> None:
        self._graphs = graphs
        self._tensor = tensor
        self._alone = alone

    def wanted(self) -> bool:
        return self._graphs.wanted(self._tensor)

    def collect(self, gradient: Gradient | None) -> None:
        self._graphs.collect(self._tensor, gradient, alone=self._alone)
