"""Compiled graphs: a root anchor while they are compiled, and the uses of tensors that they announce as they run.

    compiled   the root anchor is an input of every use in the graph, and stays the same as long as the flat delta does
    forward    each use is announced
    backward   each use hands over its gradient, and is ended

No Python object lives as long as a compiled graph, so the uses are only counted. A graph that is dropped leaves its
uses behind until the next optimizer step; meanwhile sums are held to the end of a backward pass, and nothing is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsify.core.gradients import Gradient
from sparsify.core.tensor import MaskedTensor
from sparsify.errors import SparsifyError
from sparsify.masked.module import without_autocast
from sparsify.selection.small_tensors import is_small
from sparsify.training.anchors import REENTRANT, Root, is_reached

if TYPE_CHECKING:
    from sparsify.training.engine import Engine


class CompiledGraphs:
    """The graphs of an engine's model, whose operators (masked/compiled.py) call this; and the uses that they have."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._entry: Tensor | None = None  # the root anchor of the forward pass that is being compiled
        self._uses: Counter[MaskedTensor] = Counter()  # since the tensor last had none waiting
        self._waiting: Counter[MaskedTensor] = Counter()  # for their backward
        self._recomputed: dict[MaskedTensor, int] = {}  # the backward pass in which its graph ran forward again

    def __getstate__(self) -> dict[str, Any]:
        return CompiledGraphs(self._engine).__dict__  # a copy of the model starts with no open graph

    # -------------------------------------------------------------------------------- while a graph is compiled

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
        """Makes a root anchor of the flat delta as it is now, unless there is one."""
        self._engine.backward.anchors.root(self._engine.values, self._engine.backward)

    def _traced_root(self) -> Root:
        """The root anchor; a graph is compiled anew when the flat delta is another one."""
        from sparsify.masked.compiled import made_ready

        made_ready(self._engine.tensors[0].handle)
        root = self._engine.backward.anchors.current
        assert root is not None
        assert root.serves(self._engine.values)  # becomes a guard: every run of the graph checks it
        return root

    # -------------------------------------------------------------------------------- while a graph runs

    def refresh(self) -> None:
        """Brings the weights in step with the flat delta, as a graph of the root's forward begins."""
        self._engine.refresh()

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

    def collect(self, tensor: MaskedTensor, gradient: Callable[[], Gradient]) -> None:
        """Ends one of the announced uses in the backward pass of its graph, and hands ``gradient()`` over."""
        graph, collector = torch._C._current_graph_task_id(), self._engine.backward
        if self._recomputed.get(tensor, graph) != graph:  # in a backward pass of its own
            raise SparsifyError(REENTRANT.format(name=tensor.name))
        is_alone = not collector.anchors.waits(tensor)  # no eager node uses the tensor
        root = collector.anchors.current
        is_wanted = root is not None and is_reached(root.output) and collector.wants(tensor)
        own = gradient() if is_wanted else None
        waiting = self._waiting[tensor]
        self._waiting[tensor] = max(waiting - 1, 0)  # none waits where a graph that was kept runs backward again
        if own is None:
            return
        whole = is_alone and waiting > 0 and self._uses[tensor] == 1
        if not whole or is_small(tensor):  # it is held, and copied, since a compiled graph uses its buffers again
            with without_autocast(own.device):
                own = own.dense().own()
        collector.collect(tensor, own, whole=whole)
        if is_alone and waiting == 1:
            collector.finish(tensor)

    def waits(self, tensor: MaskedTensor) -> bool:
        """Whether uses of the tensor still wait for their backward."""
        return self._waiting[tensor] > 0

    def pass_done(self) -> None:
        """A backward pass has ended."""
        self._recomputed.clear()

    def step_done(self) -> None:
        """Drops uses of graphs that were built before an optimizer step: those that still wait were dropped."""
        self._uses.clear()
        self._waiting.clear()
