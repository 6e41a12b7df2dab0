"""Single entries of a product left^T right, as dot products."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.kernels.native import Address, Size, library

TOKENS_AT_ONCE = 32  # rows of left and right whose gathered columns stay in the cache
NATIVE = {torch.float32: "sample_float32", torch.bfloat16: "sample_bfloat16"}


def sample(left: Tensor, right: Tensor, indices: Tensor) -> Tensor:
    """The entries of left^T right at flat indices.

    Args:
        left: (n, rows).
        right: (n, cols).
        indices: (k,) int64.

    Returns:
        (k,) float32, or float64 where the factors are: sums of that precision.

    Example:
        >>> sample(torch.ones(3, 2), torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1]))
        tensor([6.])
    """
    native = library() if left.device.type == "cpu" and left.dtype in NATIVE else None
    if native is None:
        return plain_sample(left, right, indices)
    left, right, indices = left.contiguous(), right.contiguous(), indices.contiguous()
    out = torch.empty(indices.numel())
    getattr(native, NATIVE[left.dtype])(
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


def plain_sample(left: Tensor, right: Tensor, indices: Tensor) -> Tensor:
    """What :func:`sample` says, in torch."""
    row, column = indices.div(right.shape[1], rounding_mode="floor"), indices % right.shape[1]
    dtype = left.dtype if left.dtype == torch.float64 else torch.float32
    total = torch.zeros(indices.numel(), dtype=dtype, device=left.device)
    for some_left, some_right in zip(left.split(TOKENS_AT_ONCE), right.split(TOKENS_AT_ONCE), strict=True):
        total += some_left.index_select(1, row).to(dtype).mul_(some_right.index_select(1, column)).sum(0)
    return total
