"""Single entries of a product left^T right: sampled dense-dense matrix multiplication (SDDMM), k dot products."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.kernels import has_triton

SHORT = (torch.float32, torch.bfloat16, torch.float16)
AT_ONCE = 1 << 20  # factors that the plain form gathers at a time


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
    if has_triton(left.device) and left.dtype in SHORT and right.dtype in SHORT and left.shape[0] and indices.numel():
        from sparsify.kernels.triton_sddmm import sddmm as fused

        return fused(left, right, indices)
    return plain_sddmm(left, right, indices)


def plain_sddmm(left: Tensor, right: Tensor, indices: Tensor) -> Tensor:
    """The plain torch form of :func:`sddmm`."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    cols = right.shape[1]
    parts = [
        (left[:, part // cols].to(dtype) * right[:, part % cols].to(dtype)).sum(0)
        for part in indices.split(max(1, AT_ONCE // max(1, left.shape[0])))
    ]
    return torch.cat(parts)
