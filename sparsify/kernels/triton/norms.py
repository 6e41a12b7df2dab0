"""The norms that bound a product's entries (``kernels/norm_bound.py``), of all rows and columns and in their order.

``_scales``   the scale of each token, by the norms of its own rows
``_norms``    the norms of the scaled factors' columns, and keys that sort them
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsify.kernels.norm_bound import LARGEST_SCALE, underflow

AT_ONCE = 4, 512  # tokens, and numbers of each, that a program reads at once for scales
WIDTH, TOKENS = 64, 64  # columns of a program that computes norms, and tokens that it reads at once


def norms_of(left: Tensor, right: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the norms of left (n, rows) and right (n, cols).

    Args:
        left: factor.
        right: factor.
        finite: (1,) int8, which becomes 0 where a factor is not finite.

    Returns:
        (rows + cols,) float32, the product's row norms and then its column norms; and (rows + cols,) int64, the places
        of the row norms and then of the column norms, the largest first. NaN, where numbers are too large, is largest.
    """
    (tokens, rows), cols = left.shape, right.shape[1]
    scales, norms = (torch.empty(size, dtype=torch.float32, device=left.device) for size in (tokens, rows + cols))
    keys = torch.empty_like(norms, dtype=torch.int64)
    strides = *left.stride(), *right.stride()
    _scales[(triton.cdiv(tokens, AT_ONCE[0]),)](
        *(left, right, scales, finite, tokens, rows, cols, *strides),
        *(underflow(rows), underflow(cols), LARGEST_SCALE, *AT_ONCE),
    )
    _norms[(triton.cdiv(rows, WIDTH) + triton.cdiv(cols, WIDTH),)](
        *(left, right, scales, norms, keys, tokens, rows, cols, *strides, underflow(tokens), WIDTH, TOKENS)
    )
    return norms, keys.argsort()


@triton.jit
def _scales(
    left, right, scales, finite, tokens, rows, cols, left_token, left_column, right_token, right_column,
    left_underflow, right_underflow, largest, block: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    of_left, left_bad = _row_norm(left, token, tokens, rows, left_token, left_column, block, at_once)
    of_right, right_bad = _row_norm(right, token, tokens, cols, right_token, right_column, block, at_once)
    if tl.sum(left_bad + right_bad) > 0:
        tl.store(finite, 0)
    of_left, of_right = of_left + left_underflow, of_right + right_underflow
    scale = tl.minimum(tl.maximum(tl.sqrt_rn(tl.div_rn(of_right, of_left)), tl.div_rn(1.0, largest)), largest)
    usable = (of_left < float("inf")) & (of_right < float("inf"))
    tl.store(scales + token, tl.where(usable, scale, float("nan")), mask=token < tokens)


@triton.jit
def _row_norm(factor, token, tokens, number, token_stride, column_stride, block: tl.constexpr, at_once: tl.constexpr):
    """The norms (block,) of tokens' rows, and how many of a row's numbers are not finite."""
    squares = tl.zeros((block,), tl.float32)
    bad = tl.zeros((block,), tl.int32)
    for first in range(0, number, at_once):
        column = first + tl.arange(0, at_once).to(tl.int64)
        inside = (token < tokens)[:, None] & (column < number)[None, :]
        place = token[:, None] * token_stride + column[None, :] * column_stride
        x = tl.abs(tl.load(factor + place, mask=inside, other=0.0).to(tl.float32))
        squares += tl.sum(x * x, axis=1)
        bad += tl.sum(((x < float("inf")) == 0).to(tl.int32), axis=1)
    return tl.sqrt_rn(squares), bad


@triton.jit
def _norms(
    left, right, scales, norms, keys, tokens, rows, cols, left_token, left_column, right_token, right_column, underflow,
    width: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    of_rows = tl.cdiv(rows, width)
    if block < of_rows:
        _column_norms(
            left, scales, norms, keys, block * width, tokens, rows, left_token, left_column, underflow, False, width,
            at_once,
        )  # fmt: skip
    else:
        _column_norms(
            right, scales, norms + rows, keys + rows, (block - of_rows) * width, tokens, cols, right_token,
            right_column, underflow, True, width, at_once,
        )  # fmt: skip


@triton.jit
def _column_norms(
    factor, scales, norms, keys, first, tokens, number, token_stride, column_stride, underflow, is_right: tl.constexpr,
    width: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    column = first + tl.arange(0, width).to(tl.int64)
    squares = tl.zeros((width,), tl.float32)
    for start in range(0, tokens, at_once):
        token = (start + tl.arange(0, at_once)).to(tl.int64)
        inside = (token < tokens)[:, None] & (column < number)[None, :]
        place = token[:, None] * token_stride + column[None, :] * column_stride
        x = tl.load(factor + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + token, mask=token < tokens, other=1.0)
        scale = tl.div_rn(1.0, scale) if is_right else scale
        scaled = x * scale[:, None]
        squares += tl.sum(scaled * scaled, axis=0)
    norm = tl.sqrt_rn(squares) + underflow
    tl.store(norms + column, norm, mask=column < number)
    # one sort orders both: the left factor's first, and each by falling norms, which NaN leads
    key = is_right * (1 << 32) - tl.abs(norm).to(tl.int32, bitcast=True).to(tl.int64)
    tl.store(keys + column, key, mask=column < number)
