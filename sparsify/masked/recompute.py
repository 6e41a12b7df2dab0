"""A layer's input that need not be kept for backward, since autograd can make it again.

    h --> activation --> x --> linear layer

The layer's weight gradient needs x, the activation's own gradient needs h. Autograd keeps h as long as x could be asked
for, so x is computed a second time in backward, by the same operation on the same numbers, and never kept. Half of what
a transformer's feed-forward block would keep goes that way; a frozen layer keeps no input either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# autograd's node of an operation -> the operation's inputs that the node keeps, and the operation itself
_OPERATIONS: dict[str, tuple[tuple[str, ...], Callable[[Any], Tensor]]] = {
    "GeluBackward0": (
        ("_saved_self",),
        lambda node: F.gelu(node._saved_self, approximate=node._saved_approximate),
    ),
    "SiluBackward0": (("_saved_self",), lambda node: F.silu(node._saved_self)),
    # the product of a gated block, and the last operation of an activation that is written out in Python
    "MulBackward0": (("_saved_self", "_saved_other"), lambda node: node._saved_self * node._saved_other),
}


def recomputable(x: Tensor) -> Callable[[], Tensor] | None:
    """A function that makes ``x`` again in a backward pass, bit for bit; ``None`` where ``x`` has to be kept.

    Example:
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

    def again() -> Tensor:
        with torch.no_grad():
            return operation(node)

    return again
