"""The forward passes of a model's root, and the one node that has the taps of all small vectors in each of them.

A model has more biases and norms than weights: a node of its own for each would take longer than their gradients.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sparsify.core.taps import Tap
from sparsify.core.tensor import MaskedTensor
from sparsify.masked.tensor import ModelTensor
from sparsify.selection.joined import is_small

ALIGNED = 8  # numbers: 16 bytes of the shortest


class Forward:
    """One forward pass of the root, as long as it runs."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self.around = torch._C._current_graph_task_id()  # the backward pass inside which it runs, as in a cached loss
        self.unread: set[MaskedTensor] = set()  # those that have a tap which nothing has asked for

    @cached_property
    def taps(self) -> dict[MaskedTensor, Any]:
        """Those of all small vectors, a node for each device and dtype; what FSDP2 shards has its own."""
        kinds: defaultdict[Any, list[MaskedTensor]] = defaultdict(list)
        found: dict[MaskedTensor, Any] = {}
        with torch._C.DisableTorchFunctionSubclass():  # takes longer than all taps
            for tensor in () if self._step.was_sharded else self._step.vectors:
                kinds[tensor.parameter.device, tensor.parameter.dtype].append(tensor)
            for tensors in kinds.values():
                if (use := self._step.use(tensors)) is not None:
                    use.unread = self.unread
                    self.unread.update(use.tensors)
                    with torch.no_grad():
                        values = torch.cat([tensor.parameter for tensor in use.tensors])
                    taps = Tap.apply(values, use, use.root).split([tensor.numel for tensor in use.tensors])
                    found |= zip(use.tensors, taps, strict=True)
        for tap in found.values():
            tap.is_tap = True  # for core/taps.py
        return found


class Forwards(threading.local):
    """The root's forward passes that run in this thread, the outermost first; what has failed is among them."""

    def __init__(self) -> None:
        self.running: list[Forward] = []

    def tap(self, tensor: ModelTensor) -> Tensor | None:
        """Its part of the node of all small vectors; not where checkpointing will compute, or computes, it again."""
        forward = self.running[-1] if self.running else None
        checkpointed = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if forward is None or checkpointed or tensor.dormant or not torch.is_grad_enabled():
            return None
        found = forward.taps.get(tensor) if torch._C._current_graph_task_id() == forward.around else None
        if found is not None:
            forward.unread.discard(tensor)
        return found


def vectors(tensors: Iterable[ModelTensor]) -> list[MaskedTensor]:
    """The tensors whose taps are shared; the first ones in a copy of all stay aligned, for kernels that ask for it."""
    plain = (tensor for tensor in tensors if not (tensor.is_parallel or tensor.is_quantized))
    found = [tensor for tensor in plain if len(tensor.shape) == 1 and is_small(tensor)]
    return sorted(found, key=lambda tensor: tensor.numel % ALIGNED != 0)
