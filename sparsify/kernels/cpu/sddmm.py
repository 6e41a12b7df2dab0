"""The C++ form of ``sddmm.py``.

Reading a column of a factor for each entry would miss the cache at every token. A few tokens of both factors are
transposed at a time instead, so that an entry costs two short contiguous reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.kernels.cpu.library import Address, Size, library

LOOPS = {torch.float32: "sddmm_float32", torch.bfloat16: "sddmm_bfloat16"}


def sddmm(left: Tensor, right: Tensor, indices: Tensor) -> Tensor:
    """:func:`sparsify.kernels.sddmm.sddmm`, where there is a library, for factors of a dtype that has a loop."""
    native = library()
    assert native is not None
    left, right, indices = left.contiguous(), right.contiguous(), indices.contiguous()
    out = torch.empty(indices.numel(), dtype=torch.float32, device="cpu")  # whatever torch's defaults are
    getattr(native, LOOPS[left.dtype])(
        Address(left),
        Address(right),
        Size(left.shape[0]),
        Size(left.shape[1]),
        Size(right.shape[1]),
        Address(indices),
        Size(indices.numel()),
        Address(out),
    )
    return out
