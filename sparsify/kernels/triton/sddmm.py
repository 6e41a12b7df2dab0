"""The Triton form of ``kernels/sddmm.py``.

A program takes a block of entries and a share of the tokens, and the shares are summed afterwards: so few entries keep
the whole GPU busy, and the sum is the same at every run. The factors are transposed first, so that a dot product reads
consecutive numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ENTRIES = 64  # of a program
TOKENS = 16  # at once
SHARE = 256  # tokens of a program


def sddmm(left: Tensor, right: Tensor, indices: Tensor) -> Tensor:
    """See :func:`sparsify.kernels.sddmm.sddmm`; takes at least one token and one entry."""
    tokens, number = left.shape[0], indices.numel()
    left, right = left.t().contiguous(), right.t().contiguous()
    shares = triton.cdiv(tokens, SHARE)
    partial = torch.empty(shares, number, dtype=torch.float32, device=left.device)
    with torch.cuda.device_of(left):
        _sddmm[(triton.cdiv(number, ENTRIES), shares)](
            *(left, right, indices.contiguous(), partial, tokens, number, right.shape[0]),
            *(ENTRIES, TOKENS, SHARE),
        )
    return partial.sum(0)


@triton.jit(do_not_specialize=["number"])
def _sddmm(
    left, right, indices, partial, tokens, number, cols,
    entries: tl.constexpr, at_once: tl.constexpr, share: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64) * entries + tl.arange(0, entries)
    inside = entry < number
    index = tl.load(indices + entry, mask=inside, other=0)
    row, col = (index // cols)[None, :] * tokens, (index % cols)[None, :] * tokens
    total = tl.zeros((entries,), dtype=tl.float32)
    start = tl.program_id(1).to(tl.int64) * share
    for first in range(0, share, at_once):
        token = (start + first + tl.arange(0, at_once))[:, None]
        there = (token < tokens) & inside[None, :]
        factor = tl.load(left + row + token, mask=there, other=0.0).to(tl.float32)
        other = tl.load(right + col + token, mask=there, other=0.0).to(tl.float32)
        total += tl.sum(factor * other, axis=0)
    tl.store(partial + tl.program_id(1).to(tl.int64) * number + entry, total, mask=inside)
