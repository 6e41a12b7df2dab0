"""A layer's input that need not be kept for backward, since autograd can make it again.

    h --> activation --> x --> linear layer

The layer's weight gradient needs x, the activation's own gradient needs h. Autograd keeps h as long as x could be asked
for, so x is computed a second time in backward, by the same operation on the same numbers, and never kept. Half of what
a transformer's feed-forward block would keep goes that way; a frozen layer keeps no input either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten
# autograd's node of an operation -> the operation's inputs that the node keeps, and the operation itself
_OPERATIONS: dict[str, tuple[tuple[str, ...], Callable[[Any, Tensor], Tensor]]] = {
    "GeluBackward0": (
        ("_saved_self",),
        lambda node, out: _ATEN.gelu.out(node._saved_self, approximate=node._saved_approximate, out=out),
    ),
    "SiluBackward0": (("_saved_self",), lambda node, out: _ATEN.silu.out(node._saved_self, out=out)),
    # the product of a gated block, and the last operation of an activation that is written out in Python
    "MulBackward0": (
        ("_saved_self", "_saved_other"),
        lambda node, out: _ATEN.mul.out(node._saved_self, node._saved_other, out=out),
    ),
}


class _Memory(threading.local):
    """What inputs are made in, one after the other, so that the system is asked for memory once in a backward pass."""

    buffer: Tensor | None = None

    def empty(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        nbytes = shape.numel() * dtype.itemsize
        if self.buffer is None or self.buffer.nbytes < nbytes or self.buffer.device != device:
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self.buffer[:nbytes].view(dtype).view(shape)


_MEMORY = _Memory()


def release_memory() -> None:
    """Nothing more will be made again for now."""
    _MEMORY.buffer = None


def recomputable(x: Tensor) -> Callable[[], Tensor] | None:
    """A function that makes ``x`` again in a backward pass, bit for bit; ``None`` where ``x`` has to be kept.

    What it makes is good until the next one is made.

    Example:
        >>> from torch.nn import functional as F
        >>> h = torch.randn(3, requires_grad=True)
        >>> torch.equal(recomputable(F.gelu(h))(), F.gelu(h))
        True
        >>> recomputable(h) is None
        True
    """
    node = x.grad_fn
    inputs, operation = _OPERATIONS.get(node.name() if node is not None else "", ((), None))
    # Where hooks pack what is saved (checkpointing, offloading), saved tensors may be asked for only once.
    if operation is None or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    if any(getattr(node, name) is None for name in inputs):
        return None

    shape, dtype, device = x.shape, x.dtype, x.device

    def again() -> Tensor:
        with torch.no_grad():
            return operation(node, _MEMORY.empty(shape, dtype, device))

    return again
