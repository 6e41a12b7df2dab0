"""The uses of tensors by compiled graphs: announced as the graph runs forward, ended as it runs backward.

No Python object lives as long as a compiled graph, so the uses are only counted. A graph that is dropped leaves its
uses behind until the next optimizer step; meanwhile sums are held to the end of a backward pass, and nothing is lost.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from sparsify.anchors import REENTRANT, Sink
from sparsify.errors import SparsifyError
from sparsify.masked.tensor import Gradient, MaskedTensor


class AnnouncedUses:
    """The uses of all tensors by compiled graphs.

    Args:
        sink: receives their gradients.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._uses: Counter[MaskedTensor] = Counter()  # since the tensor last had none waiting
        self._waiting: Counter[MaskedTensor] = Counter()
        self._recomputed: dict[MaskedTensor, int] = {}  # in which backward pass its graph ran forward again

    def announce(self, tensor: MaskedTensor) -> None:
        """A graph runs forward and uses the tensor; one that is run again inside a backward pass is checkpointing's."""
        graph = torch._C._current_graph_task_id()
        if graph != -1:
            self._recomputed[tensor] = graph
            return
        if not self._waiting[tensor]:
            self._uses[tensor] = 0
        self._uses[tensor] += 1
        self._waiting[tensor] += 1

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
        return self._sink.wants(tensor)

    def collect(self, tensor: MaskedTensor, gradient: Gradient | None, *, alone: bool) -> None:
        """Hands over what one of a tensor's uses saw; ``alone`` where no eager node uses the tensor."""
        waiting = self._waiting[tensor]
        self._waiting[tensor] = max(waiting - 1, 0)  # none waits where a graph that was kept runs backward again
        if gradient is not None:
            whole = alone and waiting > 0 and self._uses[tensor] == 1
            # what is held on to has to be copied: a compiled graph uses its buffers again
            self._sink.collect(tensor, gradient if whole else gradient.dense().own(), whole=whole)
        if alone and waiting == 1:
            self._sink.finish(tensor)


class AnnouncedUse:
    """One use of a tensor by a compiled graph, as its backward sees it."""

    anchor: Tensor  # a compiled graph has it as an input

    def __init__(self, uses: AnnouncedUses, tensor: MaskedTensor, *, alone: bool) -> None:
        self._uses = uses
        self._tensor = tensor
        self._alone = alone

    def wanted(self) -> bool:
        return self._uses.wanted(self._tensor)

    def collect(self, gradient: Gradient | None) -> None:
        self._uses.collect(self._tensor, gradient, alone=self._alone)
