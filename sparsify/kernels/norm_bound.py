"""The entries of a product left^T right that could reach a threshold, and some entries in full.

Norms rule out most of it. Any scales s > 0 of the tokens bound an entry (Cauchy-Schwarz):

    |sum_t l_ti r_tj| <= sum_t |l_ti s_t| |r_tj / s_t| <= L_i R_j       with the norms L_i = |l_i s|, R_j = |r_j / s|

and the sum of all L_i^2 R_j^2 is least for s_t^2 = |r_t| / |l_t|, the norms of the token's own rows. So a few tokens
with large gradients, such as those that a classifier reads, do not count for all others. With rows and columns in the
order of their norms, what can reach is a staircase in one corner: the compiled form multiplies no more than that, in
bfloat16 where the CPU has matrix units, else in float32. With u = 2^-8, the rounding of a number to bfloat16, what it
finds is off by no more than

    L_i R_j 2u         where float32 factors are rounded
    L_i R_j n 2^-23    by the accumulation over n tokens
    L_i R_j u          where the product is rounded too: bfloat16 factors in the plain form

Entry by entry, so that none is missed that the full product would have shown above the threshold. A norm is a sum of
squares in float32, in which the square of a number below 2^-63 is lost: so each is taken to be sqrt(n) 2^-63 larger.
That covers what matrix units take for zero, numbers below 2^-126, as long as no scale is so large as to make up for it.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.kernels.cpu.library import Address, Size, library
from sparsify.kernels.sddmm import sddmm
from sparsify.kernels.threshold import Errors, reaching

ROUNDING = 1.02 * 2.0**-8  # of one number, and what is of a higher order
SQUARES_UNDERFLOW = 2.0**-63  # of numbers below it; norms.h
LARGEST_SCALE = 2.0**40  # times what the units take for zero, still below that times the smallest rounding; norms.h
NATIVE = {torch.float32: "survey_float32", torch.bfloat16: "survey_bfloat16"}


class Room(NamedTuple):
    """How much a survey may do before it gives up.

    Attributes:
        candidates: entries that it may find.
        multiplied: entries that it may multiply.
    """

    candidates: int
    multiplied: int


class Survey(NamedTuple):
    """What a survey found.

    Attributes:
        taken: (k,) float32, the entries that were asked for.
        indices: (m,) int64, flat, in no order: the entries that could reach the threshold.
        values: (m,) float32, these entries.
        most: (m,) float32, what abs(entry) is at most.
        rounded: whether the values may be worse than dot products in float32: of rounded factors, rounded themselves,
            or summed by matrix units.
        left_sum: (rows,) float32, the left factor's sum over the tokens.
        multiplied: how many entries the norms did not rule out, so that they were multiplied.
    """

    taken: Tensor
    indices: Tensor
    values: Tensor
    most: Tensor
    rounded: bool
    left_sum: Tensor
    multiplied: int


def has_matrix_units() -> bool:
    """Whether the compiled form multiplies in bfloat16, on matrix units (AMX)."""
    native = library()
    return native is not None and native.has_matrix_units()


def survey(left: Tensor, right: Tensor, wanted: Tensor, excluded: Tensor, least: Tensor, room: Room) -> Survey | None:
    """Takes the wanted entries of a product on a CPU, and finds those that could have abs(entry) >= least of their row.

    Args:
        left: (n, rows), float32 or bfloat16.
        right: (n, cols), likewise.
        wanted: (k,) int64 flat indices.
        excluded: (e,) int64 flat indices of entries that are not to be found.
        least: (rows,) float32, at least 0.
        room: when to give up.

    Returns:
        ``None`` where there is more than room, or where an entry might not be finite.

    Example:
        >>> left, right = torch.tensor([[1.0, 5.0]]), torch.tensor([[3.0, 1.0, 0.0]])
        >>> nothing = torch.empty(0, dtype=torch.int64)
        >>> survey(left, right, nothing, nothing, torch.tensor([9.0, 9.0]), Room(6, 1024)).indices
        tensor([3])
    """
    native = library()
    if native is None:
        return plain_survey(left, right, wanted, excluded, least, room)
    units = has_matrix_units()
    left, right, wanted, excluded = (part.contiguous() for part in (left, right, wanted, excluded))
    taken, values, most, left_sum = map(_numbers, (wanted.numel(), room.candidates, room.candidates, left.shape[1]))
    found, multiplied = torch.empty(room.candidates, dtype=torch.int64, device="cpu"), Size(0)
    number = getattr(native, NATIVE[left.dtype])(
        ctypes.c_bool(units),
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
        Address(least.float().contiguous()),
        ctypes.c_float(_rounding(left, 2 if units and left.dtype == torch.float32 else 0)),
        Address(found),
        Address(values),
        Address(most),
        Size(room.candidates),
        Size(room.multiplied),
        ctypes.byref(multiplied),
    )
    if not 0 <= number <= room.candidates:
        return None
    return Survey(taken, found[:number], values[:number], most[:number], units, left_sum, multiplied.value)


def plain_survey(
    left: Tensor, right: Tensor, wanted: Tensor, excluded: Tensor, least: Tensor, room: Room
) -> Survey | None:
    """What :func:`survey` says, in torch: of the rows and columns that can reach at all, the whole product."""
    n, cols = left.shape[0], right.shape[1]
    row_norm, column_norm = _norms(left, right)
    if not (2 * row_norm.max() * column_norm.max()).isfinite():
        return None
    slack = 1 + (n + 8) * 2.0**-22  # for the rounding of the norms, and of an entry
    rows = (row_norm * column_norm.max() * slack >= least).nonzero().squeeze(1)
    columns = ((row_norm / least).max() * column_norm * slack >= 1).nonzero().squeeze(1)
    if rows.numel() * columns.numel() > room.multiplied:
        return None
    products = left.index_select(1, rows).t() @ right.index_select(1, columns)
    rounded = left.dtype == torch.bfloat16 or torch.get_float32_matmul_precision() != "highest"
    roundings = 1 if left.dtype == torch.bfloat16 else 2 * rounded
    errors = Errors(row_norm[rows] * _rounding(left, roundings) + _underflow(n), column_norm[columns])
    found, _ = reaching(products, least[rows], errors)
    width = max(1, columns.numel())
    row, column = found.div(width, rounding_mode="floor"), found % width
    indices = rows[row] * cols + columns[column]
    candidates = torch.isin(indices, excluded, invert=True).nonzero().squeeze(1)
    if candidates.numel() > room.candidates:
        return None
    row, column, values = row[candidates], column[candidates], products.take(found[candidates]).float()
    most = values.abs().addcmul_(errors.row[row], errors.column[column])
    left_sum = left.float().sum(0)
    return Survey(sddmm(left, right, wanted), indices[candidates], values, most, rounded, left_sum, products.numel())


def _numbers(number: int) -> Tensor:
    """Where the compiled form writes: float32 on the CPU, whatever torch's defaults are."""
    return torch.empty(number, dtype=torch.float32, device="cpu")


def _norms(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """L (rows,) and R (cols,), which bound the entries; not a number where a factor's numbers are too large."""
    left, right = left.float(), right.float()
    of_left, of_right = (part.square().sum(1).sqrt_() + _underflow(part.shape[1]) for part in (left, right))
    scales = (of_right / of_left).sqrt_().clamp_(1 / LARGEST_SCALE, LARGEST_SCALE)
    scales[~(of_left.isfinite() & of_right.isfinite())] = torch.nan
    scaled = left * scales[:, None], right / scales[:, None]
    row_norm, column_norm = (part.square().sum(0).sqrt_() + _underflow(part.shape[0]) for part in scaled)
    return row_norm, column_norm


def _underflow(number: int) -> float:
    """What the norm of so many numbers may lack."""
    return max(1, number) ** 0.5 * SQUARES_UNDERFLOW


def _rounding(factor: Tensor, roundings: int) -> float:
    """What a product of two factors like this one may be off by, to the norms of its columns."""
    return roundings * ROUNDING + factor.shape[0] * 2.0**-23
