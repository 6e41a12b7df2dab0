"""Counts the calls that would make the host wait for a GPU: by operator, or by name where a CPU's tensor needs none."""

from collections import Counter
from contextlib import ExitStack
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READ = (aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.allclose)  # a number off the device
SIZED = (aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount)
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index)
METHODS = ("tolist", "cpu", "numpy")


class HostWaits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self._patches = ExitStack()

    @property
    def total(self):
        return self.counts.total()

    def __enter__(self):
        for name in METHODS:
            self._patches.enter_context(mock.patch.object(torch.Tensor, name, self._counted(name)))
        self._patches.enter_context(mock.patch("torch.tensor", self._tensor(torch.tensor)))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = function.overloadpacket
        if packet in READ + SIZED or (packet in INDEXING and _has_mask(args)) or _repeats_freely(packet, kwargs):
            self.counts[packet.__name__] += 1
        return function(*args, **kwargs)

    def _counted(self, name):
        method = getattr(torch.Tensor, name)

        def call(tensor, *args, **kwargs):
            self.counts[name] += 1
            return method(tensor, *args, **kwargs)

        return call

    def _tensor(self, make):
        def call(*args, device=None, **kwargs):
            if device is not None:  # torch waits for the copy to the device
                self.counts["tensor"] += 1
            return make(*args, device=device, **kwargs)

        return call


def _has_mask(args):
    """Whether a bool mask picks what is read or written; one that is filled with a single number needs no sizes."""
    indices = [index for index in args[1] if index is not None]
    masks = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    return masks and not (len(args) > 2 and len(indices) == 1 and args[2].numel() == 1)


def _repeats_freely(packet, kwargs):
    return packet is aten.repeat_interleave and kwargs.get("output_size") is None
