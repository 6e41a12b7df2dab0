"""The forward passes of a model's root, and the nodes that have the taps of several parameters in each of them.

A model has more biases and norms than weights, and on a GPU a small matrix is multiplied in less time than Python takes
for a node: all vectors share one, and so do neighbouring matrices, whose layers are then plain ones to autograd.
"""

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sparsify.core.devices import runs_ahead
from sparsify.core.layers import MaskedLinearModule
from sparsify.core.taps import Taps
from sparsify.core.tensor import MaskedTensor
from sparsify.masked.tensor import ModelTensor
from sparsify.selection import joined


class Forward:
    """One forward pass of the root, as long as it runs, and the ``taps`` that it has made."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self.taps: dict[MaskedTensor, Tensor | None] = {}
        self.around = torch._C._current_graph_task_id()  # the backward pass inside which it runs, as in a cached loss

    def make(self, tensor: ModelTensor) -> Tensor | None:
        """Makes a tensor's tap, with those of its group; ``None`` where it has a node of its own, as under FSDP2."""
        device, groups = tensor.parameter.device, self._step.groups
        group: list[MaskedTensor] = []
        if len(tensor.shape) < 2 or runs_ahead(device):
            group = [own for own in groups.get(tensor, ()) if own in groups and own.parameter.device == device]
        self.taps |= dict.fromkeys([tensor, *group])
        use = self._step.use(group) if group and not self._step.was_sharded else None
        if use is not None:
            taps: Any = Taps.apply(use, use.root, [own.parameter for own in use.tensors])
            for own, tap in zip(use.tensors, taps, strict=True):
                self.taps[own] = tap
                tap.is_tap = True  # for core/taps.py
        return self.taps[tensor]


class Running(threading.local):
    """What has begun in this thread and not ended, the outermost first; what has failed is among it."""

    def __init__(self) -> None:
        self.running: list[Any] = []


class Forwards(Running):
    """The root's forward passes."""

    def tap(self, tensor: ModelTensor) -> Tensor | None:
        """Its part of its group's node; not where checkpointing will compute, or computes, it again."""
        if not self.running or tensor.dormant or not torch.is_grad_enabled():
            return None
        forward = self.running[-1]
        is_inside = torch._C._current_graph_task_id() != forward.around
        if is_inside or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return None
        if tensor in forward.taps:
            return forward.taps[tensor]
        with torch._C.DisableTorchFunctionSubclass():  # takes longer than all taps
            return forward.make(tensor)


def groups(tensors: Iterable[ModelTensor]) -> dict[MaskedTensor, list[MaskedTensor]]:
    """The tensors that share a node, by each of them: all small vectors, and linear layers' neighbouring matrices."""
    found: dict[MaskedTensor, list[MaskedTensor]] = {}
    vectors: list[MaskedTensor] = []
    matrices: list[MaskedTensor] = []
    for tensor in tensors:
        if tensor.is_parallel or tensor.is_partial or tensor.is_quantized or tensor.rows is not None:
            continue
        if len(tensor.shape) == 1:
            if joined.is_small(tensor):
                vectors.append(tensor)
                found[tensor] = vectors
        elif isinstance(tensor.owner, MaskedLinearModule) and tensor.numel <= joined.LARGEST_AHEAD:
            if matrices and tensor.offset + tensor.numel - matrices[0].offset > joined.AT_ONCE:
                matrices = []
            matrices.append(tensor)
            found[tensor] = matrices
    return found
