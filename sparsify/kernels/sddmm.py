"""Single entries of a product left^T right: sampled dense-dense matrix multiplication (SDDMM), k dot products."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.common.devices import runs_ahead
from sparsify.kernels import has_triton
from sparsify.kernels.cpu import sddmm as native_sddmm
from sparsify.kernels.cpu.library import library

SHORT = (torch.float32, torch.bfloat16, torch.float16)
TOKENS_AT_ONCE = 32  # rows of the factors whose gathered columns stay in a cache


def sddmm(left: Tensor, right: Tensor, indices: Tensor) -> Tensor:
    """The entries of left^T right, (rows, cols), at some places.

    Args:
        left: (n, rows).
        right: (n, cols), in the same dtype.
        indices: (k,) int64, flat in (rows, cols).

    Returns:
        (k,) the dot products, summed in float32, or in float64 where the factors are.

    Example:
        >>> sddmm(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0]]), torch.tensor([0, 5]))
        tensor([ 3., 10.])
    """
    if left.device.type == "cpu" and not runs_ahead(left.device):
        if left.dtype in native_sddmm.LOOPS and left.dtype == right.dtype and library() is not None:
            return native_sddmm.sddmm(left, right, indices)
    elif has_triton(left.device) and left.dtype in SHORT and right.dtype in SHORT and left.shape[0] and indices.numel():
        from sparsify.kernels.triton.sddmm import sddmm as fused

        return fused(left, right, indices)
    return plain_sddmm(left, right, indices)


def plain_sddmm(left: Tensor, right: Tensor, indices: Tensor) -> Tensor:
    """The plain torch form of :func:`sddmm`."""
    row, column = indices.div(right.shape[1], rounding_mode="floor"), indices % right.shape[1]
    dtype = torch.promote_types(left.dtype, torch.float32)
    total = torch.zeros(indices.numel(), dtype=dtype, device=left.device)
    for some_left, some_right in zip(left.split(TOKENS_AT_ONCE), right.split(TOKENS_AT_ONCE), strict=True):
        total += some_left.index_select(1, row).to(dtype).mul_(some_right.index_select(1, column)).sum(0)
    return total
