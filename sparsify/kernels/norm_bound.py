"""The entries of a product left^T right that could reach a threshold, found without computing all of it.

Norms rule out most entries. Any scales s > 0 of the tokens bound an entry (Cauchy-Schwarz):

    |sum_t l_ti r_tj| <= sum_t |l_ti s_t| |r_tj / s_t| <= L_i R_j       with the norms L_i = |l_i s|, R_j = |r_j / s|

and the sum of all L_i^2 R_j^2 is least for s_t^2 = |r_t| / |l_t|, the norms of the token's own rows. So a few tokens
with large gradients, such as those that a classifier reads, do not count for all others. With rows and columns in the
order of their norms, the entries that could reach the threshold form a staircase in one corner. The compiled forms, on
a CPU and on a GPU, multiply only these, tile by tile, and compare; no tile is written. Matrix units multiply in
bfloat16 (AMX) or, float32 numbers on a GPU, in tf32. With u the rounding of a number, 2^-8 for bfloat16 and 2^-10 for
tf32, a screened value is off by no more than

    L_i R_j 2u         where float32 factors are rounded
    L_i R_j n 2^-23    by the accumulation over n tokens
    L_i R_j u          where the product is rounded too: bfloat16 factors in the plain form

entry by entry, so that no entry is missed that the full product would have shown above the threshold. Those that could
reach it are computed again as float32 dot products, unless nothing was rounded. A norm is a sum of squares in float32,
in which the square of a number below 2^-63 is lost: so each norm is taken to be sqrt(n) 2^-63 larger. That covers what
matrix units take for zero, numbers below 2^-126, as long as no scale is so large as to make up for it.

On a CPU, screening gives up where the norms leave too much, or where an entry might not be finite. On a GPU the host
does not wait to learn of it: there :func:`sparsify.kernels.select.select_product` adds what it finds to the candidates.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.kernels.cpu.library import Address, Size, library
from sparsify.kernels.sddmm import sddmm

ROUNDING = 1.02 * 2.0**-8  # of one number, with the terms of higher order
SQUARES_UNDERFLOW = 2.0**-63  # of numbers below it; norms.h
SMALLEST_THRESHOLD = 1e-20  # units flush numbers near a lower one to zero, and bounds underflow there
LARGEST_SCALE = 2.0**40  # times what the units take for zero, still below that times the smallest rounding; norms.h
LOOPS = {torch.float32: "screen_float32", torch.bfloat16: "screen_bfloat16"}


class Limits(NamedTuple):
    """How much screening may do before it gives up."""

    candidates: int  # entries that it may find
    multiplied: int  # entries that it may multiply


class Screened(NamedTuple):
    """What screening found."""

    taken: Tensor  # (k,) float32, the wanted entries
    indices: Tensor  # (m,) int64, flat, in no order: the entries that could reach the threshold
    values: Tensor  # (m,) float32, these entries
    most: Tensor  # (m,) float32, upper bounds of abs(entry)
    rounded: bool  # whether values may be worse than float32 dot products: rounded, or summed by matrix units
    left_sum: Tensor  # (rows,) float32, the left factor's sum over the tokens
    multiplied: int  # number of entries that the norms did not rule out, so that they were multiplied


def has_matrix_units() -> bool:
    """Whether the compiled form multiplies in bfloat16, on matrix units (AMX)."""
    native = library()
    return native is not None and native.has_matrix_units()


def screen(
    left: Tensor, right: Tensor, wanted: Tensor, excluded: Tensor, least: Tensor, limits: Limits
) -> Screened | None:
    """Computes the wanted entries of a product on a CPU, and finds those that could reach their row's threshold.

    Args:
        left: (n, rows), float32 or bfloat16.
        right: (n, cols), in the same dtype.
        wanted: (k,) int64 flat indices.
        excluded: (e,) int64 flat indices of entries that are not to be found.
        least: (rows,) float32, at least 0: the thresholds of abs(entry).
        limits: when to give up.

    Returns:
        ``None`` where it gave up, or where an entry might not be finite.
    """
    native = library()
    if native is None:
        return plain_screen(left, right, wanted, excluded, least, limits)
    units = has_matrix_units()
    left, right, wanted, excluded = (part.contiguous() for part in (left, right, wanted, excluded))
    taken, left_sum = _floats(wanted.numel()), _floats(left.shape[1])
    values, most = _floats(limits.candidates), _floats(limits.candidates)
    found, multiplied = torch.empty(limits.candidates, dtype=torch.int64, device="cpu"), Size(0)
    rounding = rounding_of(left.shape[0], 2 * ROUNDING if units and left.dtype == torch.float32 else 0)
    number = getattr(native, LOOPS[left.dtype])(
        *(ctypes.c_bool(units), Address(left), Address(right)),
        *(Size(left.shape[0]), Size(left.shape[1]), Size(right.shape[1])),
        *(Address(wanted), Size(wanted.numel()), Address(taken), Address(left_sum)),
        *(Address(excluded), Size(excluded.numel()), Address(least.float().contiguous()), ctypes.c_float(rounding)),
        *(Address(found), Address(values), Address(most), Size(limits.candidates)),
        *(Size(limits.multiplied), ctypes.byref(multiplied)),
    )
    if not 0 <= number <= limits.candidates:
        return None
    return Screened(taken, found[:number], values[:number], most[:number], units, left_sum, multiplied.value)


def plain_screen(
    left: Tensor, right: Tensor, wanted: Tensor, excluded: Tensor, least: Tensor, limits: Limits
) -> Screened | None:
    """The plain torch form of :func:`screen`: computes all of the rows and columns that could reach the threshold."""
    n, cols = left.shape[0], right.shape[1]
    row_norm, column_norm = _norms(left, right)
    if not (2 * row_norm.max() * column_norm.max()).isfinite():
        return None
    slack = norms_slack(n)
    rows = (row_norm * column_norm.max() * slack >= least).nonzero().squeeze(1)
    columns = ((row_norm / least).max() * column_norm * slack >= 1).nonzero().squeeze(1)
    if rows.numel() * columns.numel() > limits.multiplied:
        return None
    products = (left.index_select(1, rows).t() @ right.index_select(1, columns)).float()
    rounded = left.dtype == torch.bfloat16 or torch.get_float32_matmul_precision() != "highest"
    roundings = 1 if left.dtype == torch.bfloat16 else 2 * rounded
    row_error = row_norm[rows] * rounding_of(n, roundings * ROUNDING) + underflow(n)
    most = products.abs().addcmul_(row_error[:, None], column_norm[columns])
    row, column = (most >= least[rows][:, None]).nonzero(as_tuple=True)
    indices = rows[row] * cols + columns[column]
    found = torch.isin(indices, excluded, invert=True)
    row, column, indices = row[found], column[found], indices[found]
    if indices.numel() > limits.candidates:
        return None
    taken, left_sum = sddmm(left, right, wanted), left.float().sum(0)
    return Screened(taken, indices, products[row, column], most[row, column], rounded, left_sum, products.numel())


def _floats(number: int) -> Tensor:
    """Memory for the compiled form: float32 on the CPU, whatever torch's defaults are."""
    return torch.empty(number, dtype=torch.float32, device="cpu")


def _norms(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """L (rows,) and R (cols,), which bound the entries; not a number where a factor's numbers are too large."""
    left, right = left.float(), right.float()
    of_left, of_right = (part.square().sum(1).sqrt_() + underflow(part.shape[1]) for part in (left, right))
    scales = (of_right / of_left).sqrt_().clamp_(1 / LARGEST_SCALE, LARGEST_SCALE)
    scales[~(of_left.isfinite() & of_right.isfinite())] = torch.nan
    scaled = left * scales[:, None], right / scales[:, None]
    row_norm, column_norm = (part.square().sum(0).sqrt_() + underflow(part.shape[0]) for part in scaled)
    return row_norm, column_norm


def norms_slack(tokens: int) -> float:
    """Factor for the rounding of two norms, and of an entry."""
    return 1 + (tokens + 8) * 2.0**-22


def underflow(number: int) -> float:
    """Largest amount that the norm of so many numbers lacks."""
    return max(1, number) ** 0.5 * SQUARES_UNDERFLOW


def rounding_of(tokens: int, factors: float) -> float:
    """Largest error of a product, relative to its norms, of factors that are rounded by so much together."""
    return factors + tokens * 2.0**-23
