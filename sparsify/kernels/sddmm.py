"""Single entries of a product left^T right: sampled dense-dense matrix multiplication (SDDMM), k dot products."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.core.devices import runs_ahead
from sparsify.kernels import has_triton

SHORT = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of the Triton form
SECTOR = 32  # bytes that a GPU reads at least
TOKENS_AT_ONCE = 32  # rows of the factors whose gathered columns stay in a cache


def sddmm(left: Tensor, right: Tensor, indices: Tensor) -> Tensor:
    """Computes entries of left^T right, with left (n, rows) and right (n, cols), at flat indices (k,).

    Returns:
        (k,) the dot products, summed in float32, or in float64 where the factors are.
    """
    short = left.dtype in SHORT and right.dtype in SHORT
    if short and runs_ahead(left.device) and has_triton(left.device) and left.shape[0] and indices.numel():
        from sparsify.kernels.triton.sddmm import sddmm as fused

        # transposing reads and writes each number; after it, a dot product reads consecutive ones, not whole sectors
        size, numbers = left.itemsize, left.shape[1] + right.shape[1]
        transposes = left.dtype == right.dtype and indices.numel() * (SECTOR - size) > numbers * size
        return fused(left, right, indices, transposes=transposes)
    return plain_sddmm(left, right, indices)


def plain_sddmm(left: Tensor, right: Tensor, indices: Tensor) -> Tensor:
    """The plain torch form of :func:`sddmm`."""
    row, column = indices.div(right.shape[1], rounding_mode="floor"), indices % right.shape[1]
    dtype = torch.promote_types(left.dtype, torch.float32)
    total = torch.zeros(indices.numel(), dtype=dtype, device=left.device)
    for some_left, some_right in zip(left.split(TOKENS_AT_ONCE), right.split(TOKENS_AT_ONCE), strict=True):
        total += some_left.to(dtype).index_select(1, row).mul_(some_right.to(dtype).index_select(1, column)).sum(0)
    return total
