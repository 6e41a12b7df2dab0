"""Compiled graphs: a root anchor while they are compiled, and the uses of tensors that they announce as they run.

    compiled   the root anchor is an input of every use in the graph, and stays the same as long as the flat delta does
    forward    each use is announced
    backward   each use hands over its gradient, and is ended

No Python object lives as long as a compiled graph, so the uses are only counted. A graph that is dropped leaves its
uses behind until the next optimizer step; meanwhile sums are held to the end of a backward pass, and nothing is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsify.errors import SparsifyError
from sparsify.masked.gradients import Gradient
from sparsify.masked.module import without_autocast
from sparsify.masked.tensor import MaskedTensor
from sparsify.training.anchors import REENTRANT, Root, is_reached
from sparsify.training.flat_delta import flat_delta
from sparsify.training.weights import EffectiveWeights

if TYPE_CHECKING:
    from sparsify.training.backward import BackwardCollector


class CompiledUses:
    """The number of uses of each tensor by compiled graphs."""

    def __init__(self) -> None:
        self._uses: Counter[MaskedTensor] = Counter()  # since the tensor last had none waiting
        self._waiting: Counter[MaskedTensor] = Counter()
        self._recomputed: dict[MaskedTensor, int] = {}  # the backward pass in which its graph ran forward again

    def __getstate__(self) -> dict[str, Any]:
        return CompiledUses().__dict__  # a copy of the model starts with no open graph

    def announce(self, tensor: MaskedTensor) -> None:
        """Counts a use as its graph runs forward; one that runs again inside a backward pass is checkpointing's."""
        tensor.check_shape()
        graph = torch._C._current_graph_task_id()
        if graph != -1:
            self._recomputed[tensor] = graph
            return
        if not self._waiting[tensor]:
            self._uses[tensor] = 0
        self._uses[tensor] += 1
        self._waiting[tensor] += 1

    def end(self, tensor: MaskedTensor) -> tuple[int, int]:
        """Ends a use; the number of those that waited before, and of all uses in the same graphs."""
        waiting = self._waiting[tensor]
        self._waiting[tensor] = max(waiting - 1, 0)  # none waits where a graph that was kept runs backward again
        return waiting, self._uses[tensor]

    def waits(self, tensor: MaskedTensor) -> bool:
        """Whether uses of the tensor still wait for their backward."""
        return self._waiting[tensor] > 0

    def check_not_reentrant(self, tensor: MaskedTensor) -> None:
        """Raises where the running backward pass is one of a recomputed graph alone."""
        graph = torch._C._current_graph_task_id()
        if self._recomputed.get(tensor, graph) != graph:
            raise SparsifyError(REENTRANT.format(name=tensor.name))

    def forget_recomputed(self) -> None:
        """A backward pass has ended."""
        self._recomputed.clear()

    def forget(self) -> None:
        """Drops uses of graphs that were built before an optimizer step: those that still wait were dropped."""
        self._uses.clear()
        self._waiting.clear()


class AnnouncedUse:
    """One use of a tensor by a compiled graph, in the backward pass of that graph."""

    anchor: Tensor  # a compiled graph has it as an input

    def __init__(self, collector: BackwardCollector, tensor: MaskedTensor) -> None:
        self._collector = collector
        self._tensor = tensor
        self._alone = not collector.anchors.waits(tensor)  # whether no eager node uses the tensor

    def wanted(self) -> bool:
        self._collector.compiled_uses.check_not_reentrant(self._tensor)
        root = self._collector.anchors.current
        return root is not None and is_reached(root.output) and self._collector.wants(self._tensor)

    def collect(self, gradient: Gradient | None) -> None:
        collector, tensor = self._collector, self._tensor
        waiting, uses = collector.compiled_uses.end(tensor)
        if gradient is None:
            return
        whole = self._alone and waiting > 0 and uses == 1
        if not whole:  # a gradient that is held has to be copied: a compiled graph uses its buffers again
            with without_autocast(gradient.device):
                gradient = gradient.dense().own()
        collector.collect(tensor, gradient, whole=whole)
        if self._alone and waiting == 1:
            collector.finish(tensor)


class CompiledGraphs:
    """The operators in compiled graphs (masked/compiled.py) call this.

    Args:
        root: the model.
        tensors: its masked tensors.
        weights: their effective values.
        collector: receives the gradients.
        refresh: brings the weights in step with the flat delta, as a graph of the root's forward begins.
    """

    def __init__(
        self,
        root: nn.Module,
        tensors: Sequence[MaskedTensor],
        weights: EffectiveWeights,
        collector: BackwardCollector,
        refresh: Callable[[], None],
    ) -> None:
        self._root, self._weights, self._collector, self.refresh = root, weights, collector, refresh
        self._first = tensors[0]
        self._entry: Tensor | None = None  # the root anchor of the forward pass that is being compiled

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_entry": None}

    @property
    def root_anchor(self) -> Tensor:
        """(1,) what every use takes as an input."""
        return self._traced_root().output if self._entry is None else self._entry

    def enter(self) -> None:
        """The root's forward is being compiled; its graph will refresh the weights whenever it runs."""
        from sparsify.masked.compiled import refreshed_root

        self._entry = refreshed_root(self._traced_root().output, self._first.handle)

    def leave(self) -> None:
        """The root's forward has ended."""
        self._entry = None

    def trains(self, tensor: MaskedTensor) -> bool:
        """Whether a gradient may be collected for the tensor, now or later."""
        return not (self._weights.are_base or tensor.dormant)

    def make_root(self) -> None:
        """Makes a root anchor of the flat delta as it is now, unless there is one."""
        self._collector.anchors.root(flat_delta(self._root), self._collector)

    def announce(self, tensor: MaskedTensor) -> None:
        """Counts a use as its graph runs forward."""
        self._collector.compiled_uses.announce(tensor)

    def use(self, tensor: MaskedTensor) -> AnnouncedUse:
        """One of a tensor's uses, in the backward pass of its graph."""
        return AnnouncedUse(self._collector, tensor)

    def _traced_root(self) -> Root:
        """The root anchor; a graph is compiled anew when the flat delta is another one."""
        from sparsify.masked.compiled import made_ready

        made_ready(self._first.handle)
        root = self._collector.anchors.current
        assert root is not None
        assert root.serves(flat_delta(self._root))  # becomes a guard: every run of the graph checks it
        return root
