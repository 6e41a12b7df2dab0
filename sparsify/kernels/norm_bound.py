"""The parts of a product left^T right that could hold an entry above a threshold, by the norms of its factors.

Any scales s > 0 of the tokens bound an entry (Cauchy-Schwarz):

    |sum_t l_ti r_tj| <= sum_t |l_ti s_t| |r_tj / s_t| <= L_i R_j       with the norms L_i = |l_i s|, R_j = |r_j / s|

and the sum of all L_i^2 R_j^2 is least for s_t^2 = |r_t| / |l_t|, the norms of the token's own rows. With rows and
columns in the order of their norms, the entries that could reach the threshold form a staircase in one corner. Its size
is first estimated by some rows and columns: where too much would be left, this takes a hundredth of the product's time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.kernels.sddmm import ENTRY, FACTORS

SCREENED = (torch.float32, torch.bfloat16)  # dtypes
# costs on a CPU, counted as in ``sddmm.py``; deliberately overestimated
NORMS = 48  # of each row and column
TILE = 1.5  # of each entry that is multiplied and compared
SQUARES_UNDERFLOW = 2.0**-63  # the square of a smaller number is lost: a norm is taken to be sqrt(n) times this larger
LARGEST_SCALE = 2.0**40  # of a token; its square and that of its inverse are far from overflow and underflow
NUMBERS_AT_ONCE = 1 << 18  # of a factor, scaled and squared together: they stay in a cache
SAMPLE = 32  # rows, and columns, by which the staircase is estimated
STEP = 128  # rows of a step of the staircase


def screening_limit(left: Tensor, right: Tensor, sampled: int) -> int:
    """Number of entries that screening may multiply at the dense product's cost, which it samples from too."""
    if left.device.type != "cpu" or left.dtype not in SCREENED:
        return 0
    rows, cols, factor = left.shape[1], right.shape[1], FACTORS.get(left.dtype, 1)
    return max(0, int((rows * cols / factor - NORMS * (rows + cols) - ENTRY * sampled) / TILE))


def staircase(left: Tensor, right: Tensor, least: Tensor, most: int) -> list[tuple[Tensor, Tensor]] | None:
    """Finds where abs(entry) of left^T right, (n, rows) and (n, cols), could reach the thresholds ``least`` (rows,).

    Returns:
        The steps, each as some rows (r,) int64 and the columns (c,) int64 where these could: those of the first step,
        or a beginning of them. ``None`` for more than ``most`` entries, or where one might not be finite.
    """
    rows, cols = left.shape[1], right.shape[1]
    of_left, of_right = _token_norms(left), _token_norms(right)
    every, other = rows // SAMPLE or 1, cols // SAMPLE or 1
    row_norm, column_norm = _norms(left[:, ::every], right[:, ::other], of_left, of_right)
    share = (row_norm[:, None] * column_norm >= least[::every, None]).float().mean()
    if float(share) * rows * cols > most:
        return None
    row_norm, column_norm = _norms(left, right, of_left, of_right)
    if not (2 * row_norm.max() * column_norm.max()).isfinite():
        return None
    slack = 1 + (left.shape[0] + 8) * 2.0**-22  # for the rounding of two norms, and of an entry
    needed, row = (least / (row_norm * slack)).sort(stable=True)  # of a column's norm
    norms, column = column_norm.sort(descending=True, stable=True)
    counts = cols - torch.searchsorted(norms.flip(0), needed)  # columns that could reach, for each row
    counts = counts[counts > 0]  # the first ones: no row has more columns than the one before
    row = row[: counts.numel()]
    steps = [(some, column[:count]) for some, count in zip(row.split(STEP), counts[::STEP].tolist(), strict=False)]
    return steps if size_of(steps) <= most else None


def size_of(steps: list[tuple[Tensor, Tensor]]) -> int:
    """Number of entries in the steps of a staircase."""
    return sum(rows.numel() * columns.numel() for rows, columns in steps)


def _norms(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor) -> tuple[Tensor, Tensor]:
    """L (rows,) and R (cols,), by the norms of the tokens (n,); not a number where a factor's numbers are too large."""
    scales = (of_right / of_left).sqrt_().clamp_(1 / LARGEST_SCALE, LARGEST_SCALE)
    scales[~(of_left.isfinite() & of_right.isfinite())] = torch.nan
    return _scaled_norms(left, scales), _scaled_norms(right, 1 / scales)


def _token_norms(factor: Tensor) -> Tensor:
    """The norms (n,) of a factor's tokens, above 0."""
    norms = torch.linalg.vector_norm(factor, dim=1, dtype=torch.float32)
    return norms + max(1, factor.shape[1]) ** 0.5 * SQUARES_UNDERFLOW


def _scaled_norms(factor: Tensor, scales: Tensor) -> Tensor:
    """The norms (cols,) of a factor's columns, in float32, with each token (n,) scaled."""
    total = torch.zeros(factor.shape[1], dtype=torch.float32, device=factor.device)
    at_once = max(1, NUMBERS_AT_ONCE // max(1, factor.shape[1]))
    for tokens, some in zip(factor.split(at_once), scales.split(at_once), strict=True):
        total += (tokens * some[:, None]).square_().sum(0)
    return total.sqrt_() + max(1, factor.shape[0]) ** 0.5 * SQUARES_UNDERFLOW
