"""The entries of a product left^T right that could reach a threshold, found in bfloat16, and some entries in full.

With u = 2^-8, the rounding of a number to bfloat16, and sum |l r| <= |l_i| |r_j| (Cauchy-Schwarz),

    |product - product of the rounded factors| <= |l_i| |r_j| 2u           (nothing, where they are bfloat16 already)
                                                + |l_i| |r_j| n 2^-23      the float32 accumulation over n tokens
                                                + |l_i| |r_j| u            where the product is rounded too: plain form

Entry by entry, so that none is missed that the full product would have shown above the threshold. A norm is a sum of
squares in float32, in which the square of a number below 2^-63 is lost, and the units take the smallest numbers for
zero: so each norm is taken to be sqrt(n) 2^-63 larger.

The norms alone rule out most of a trained model's product. With rows and columns in the order of their norms, what is
left is a staircase in one corner: the compiled form multiplies no more than that.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.kernels.native import Address, Size, library
from sparsify.kernels.reach import Errors, reaching
from sparsify.kernels.sddmm import sddmm

ROUNDING = 1.02 * 2.0**-8  # of one number, and what is of a higher order
SQUARES_UNDERFLOW = 2.0**-63  # of numbers below it
NATIVE = {torch.float32: "survey_float32", torch.bfloat16: "survey_bfloat16"}


class Survey(NamedTuple):
    """What a survey found.

    Attributes:
        taken: (k,) float32, the entries that were asked for.
        indices: (m,) int64, flat, in no order: the entries that could reach the threshold.
        most: (m,) float32, what abs(entry) is at most.
        left_sum: (rows,) float32, the left factor's sum over the tokens.
        multiplied: how many entries the norms did not rule out, so that they were multiplied.
    """

    taken: Tensor
    indices: Tensor
    most: Tensor
    left_sum: Tensor
    multiplied: int


def has_bfloat16_units() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32 (AVX512-BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def survey(left: Tensor, right: Tensor, wanted: Tensor, excluded: Tensor, least: Tensor, *, room: int) -> Survey | None:
    """Takes the wanted entries of a product on a CPU, and finds those that could have abs(entry) >= least of their row.

    Args:
        left: (n, rows), float32 or bfloat16.
        right: (n, cols), likewise.
        wanted: (k,) int64 flat indices.
        excluded: (e,) int64 flat indices of entries that are not to be found.
        least: (rows,) float32.
        room: give up on more entries than this.

    Returns:
        ``None`` where there are more, or where an entry might not be finite.
    """
    native = library()
    if native is None or not native.can_survey():
        return plain_survey(left, right, wanted, excluded, least, room=room)
    left, right, wanted, excluded = (part.contiguous() for part in (left, right, wanted, excluded))
    taken, found, most = torch.empty(wanted.numel()), torch.empty(room, dtype=torch.int64), torch.empty(room)
    left_sum, multiplied = torch.empty(left.shape[1]), Size(0)
    number = getattr(native, NATIVE[left.dtype])(
        Address(left),
        Address(right),
        Size(left.shape[0]),
        Size(left.shape[1]),
        Size(right.shape[1]),
        Address(wanted),
        Size(wanted.numel()),
        Address(taken),
        Address(left_sum),
        Address(excluded),
        Size(excluded.numel()),
        Address(least.contiguous()),
        ctypes.c_float(_rounding(left, result=False)),
        Address(found),
        Address(most),
        Size(room),
        ctypes.byref(multiplied),
    )
    return Survey(taken, found[:number], most[:number], left_sum, multiplied.value) if 0 <= number <= room else None


def plain_survey(
    left: Tensor, right: Tensor, wanted: Tensor, excluded: Tensor, least: Tensor, *, room: int
) -> Survey | None:
    """What :func:`survey` says, in torch."""
    row_norm, column_norm = (factor.float().square().sum(0).sqrt() for factor in (left, right))
    if not (2 * row_norm.max() * column_norm.max()).isfinite():
        return None
    rounded = left.bfloat16().t() @ right.bfloat16()  # (rows, cols)
    rounded.view(-1).index_fill_(0, excluded, torch.nan)  # which reaches nothing
    underflow = left.shape[0] ** 0.5 * SQUARES_UNDERFLOW
    errors = Errors(row_norm * _rounding(left, result=True) + underflow, column_norm + underflow)
    found, _ = reaching(rounded, least, errors, room=room)
    if found is None:
        return None
    row, column = found.div(right.shape[1], rounding_mode="floor"), found % right.shape[1]
    most = rounded.take(found).float().abs_().addcmul_(errors.row[row], errors.column[column])
    return Survey(sddmm(left, right, wanted), found, most, left.float().sum(0), rounded.numel())


def _rounding(factor: Tensor, *, result: bool) -> float:
    """What a product of two factors like this one may be off by, to the norms of its columns."""
    roundings = (0 if factor.dtype == torch.bfloat16 else 2) + result
    return roundings * ROUNDING + factor.shape[0] * 2.0**-23
