"""Selects by gradients that are computed only as far as their entries could be among the best.

On a CPU the norms of a product's factors rule out most of it. The rest is multiplied, and offered to the top-k, which
sees what the full product would have shown it. Any scales s > 0 of the tokens bound an entry (Cauchy-Schwarz):

    |sum_t l_ti r_tj| <= sum_t |l_ti s_t| |r_tj / s_t| <= L_i R_j       with the norms L_i = |l_i s|, R_j = |r_j / s|

and the sum of all L_i^2 R_j^2 is least for s_t^2 = |r_t| / |l_t|, the norms of the token's own rows. With rows and
columns in the order of their norms, the entries that could reach the threshold form a staircase in one corner. Its size
is first estimated by some rows and columns: where too much would be left, this takes a hundredth of the product's time.

On a GPU a large product is multiplied out in blocks of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsify.core.gradients import DenseGradient, Gradient, Product
from sparsify.core.importance import Importance
from sparsify.core.policy import Selector
from sparsify.core.tensor import MaskedTensor
from sparsify.kernels.sddmm import ENTRY, sampling_pays, sddmm
from sparsify.masked.tensor import matrix_shape
from sparsify.selection.device_topk import DeviceTopK
from sparsify.selection.joined import Joined

SCREENED = (torch.float32, torch.bfloat16)  # dtypes
# costs on a CPU, counted as in ``kernels/sddmm.py``; deliberately overestimated
NORMS = 48  # of each row and column
TILE = 1.5  # of each entry that is multiplied and compared
SQUARES_UNDERFLOW = 2.0**-63  # the square of a smaller number is lost: a norm is taken to be sqrt(n) times this larger
LARGEST_SCALE = 2.0**40  # of a token; its square and that of its inverse are far from overflow and underflow
NUMBERS_AT_ONCE = 1 << 18  # of a factor, scaled and squared together: they stay in a cache
SAMPLE = 32  # rows, and columns, by which the staircase is estimated
STEP = 128  # rows of a step of the staircase
MOST_MULTIPLIED = 1 << 26  # entries of a product that a GPU has in memory at once
SMALLEST_THRESHOLD = 1e-20  # bounds underflow near a lower one
SMALLEST_SCREENED = 1 << 16  # entries; below, the full product is as fast


def sampled(product: Product, indices: Tensor) -> Tensor | None:
    """Entries (k,) of a product, each as a dot product over the tokens; ``None`` where the whole product is faster."""
    left, right = product.left, product.right
    return sddmm(left, right, indices) if sampling_pays(left, right, indices.numel()) else None


Product.sampler = staticmethod(sampled)


class StreamingSelector(Selector):
    """Selects the best entries on one rank by a ``TopK`` or a ``DeviceTopK``, screened where that pays."""

    joins = True
    _topk: Any

    def __init__(self, topk: Any, importance: Importance, work: Counter[str], masked_only: bool) -> None:
        super().__init__(topk, importance)
        self._work, self._masked_only = work, masked_only
        self.known: dict[MaskedTensor, Tensor] = {}  # flat indices (k,) whose gradients are returned, and not offered

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        wanted, excluded = self._wanted_and_excluded(tensor)
        if isinstance(gradient, Product):
            if not isinstance(self._topk, DeviceTopK):
                if (taken := self.screen(tensor, gradient, wanted, excluded)) is not None:
                    return taken
            elif gradient.numel > MOST_MULTIPLIED:
                return self._offer_blocks(tensor, RowBlocks(gradient, wanted, excluded))
        taken, dense = self._compute(gradient, wanted, excluded)
        self._topk.offer(self._importance, tensor.matrix, dense.values, dense.rows, tensor.offset)
        return taken

    def offer_joined(self, batches: Sequence[Joined]) -> None:
        """Takes the whole gradients of joined tensors."""
        for own in batches:
            weight, grad, offset, ids = own.entries(self._excluded_places(own))
            self._work["dense"] += grad.numel()
            self._topk.offer(self._importance, weight[None], grad[None], None, offset, ids)

    def _wanted_and_excluded(self, tensor: MaskedTensor) -> tuple[Tensor, Tensor]:
        """Flat indices of the entries whose gradients are returned, and of those that are not offered."""
        wanted = torch.cat([tensor.indices, self.known[tensor]]) if self.known else tensor.indices
        if self._masked_only and tensor.frozen_row is None:
            return wanted, wanted
        others = wanted if self._masked_only else self.known.get(tensor, wanted[:0])
        return wanted, torch.cat([tensor.never_candidates, others])

    def _excluded_places(self, joined: Joined) -> Tensor:
        """The entries of joined tensors that are not offered: places among their gradients."""
        some = [own for own in joined.tensors if own.frozen_row is not None or own.rows is not None]
        never = {tensor: tensor.never_candidates for tensor in some}
        known = {tensor: self.known[tensor] for tensor in joined.tensors} if self.known else {}
        if self._masked_only and not never and not known:
            return joined.unmasked[1]
        places = [joined.places(never), joined.places(known)]
        return torch.cat([*places, joined.unmasked[1]] if self._masked_only else places)

    def _compute(self, gradient: Gradient, wanted: Tensor, excluded: Tensor) -> tuple[Tensor, DenseGradient]:
        """Returns the gradient of the wanted entries (k,), and the whole one, zero at the excluded entries (e,)."""
        self._work["dense"] += gradient.numel
        dense = gradient.dense()
        taken = dense.take(wanted)
        if excluded.numel():
            dense.clear(excluded)  # an entry whose gradient is zero is never offered
        return taken, dense

    def _offer_blocks(self, tensor: MaskedTensor, blocks: RowBlocks) -> Tensor:
        """Offers a large product in blocks of rows; returns the gradient of the wanted entries (k,)."""
        self._work["dense"] += tensor.numel
        (height, cols), weight = matrix_shape(tensor), tensor.matrix
        at_once = max(1, MOST_MULTIPLIED // cols)
        for start in range(0, height, at_once):
            values = blocks.rows(start, min(start + at_once, height))
            rows = weight[start : start + at_once]
            self._topk.offer(self._importance, rows, values, None, tensor.offset + start * cols)
        return blocks.taken

    def screen(self, tensor: MaskedTensor, product: Product, wanted: Tensor, excluded: Tensor) -> Tensor | None:
        """Offers what can reach the threshold; returns the wanted entries' gradient, ``None`` if it does not pay."""
        left, right, size = product.left, product.right, product.numel
        most = screening_limit(left, right, wanted.numel()) if product.looked_up is None else 0
        has_threshold = self._importance.monotone and float(self._topk.threshold) > SMALLEST_THRESHOLD
        if not most or size < SMALLEST_SCREENED or not has_threshold:
            return None
        least = self._importance.least_gradient(self._topk.threshold.float(), tensor.matrix)  # (rows,)
        if (steps := staircase(left, right, least, most)) is None:
            return None
        self._work["screened"] += size_of(steps)
        self._work["skipped"] += size - size_of(steps)
        multiplied = right.index_select(1, steps[0][1]).float() if steps else right
        for rows, columns in steps:  # the columns are a beginning of the first step's
            grads = left.index_select(1, rows).float().t() @ multiplied[:, : columns.numel()]
            row, column = (grads.abs() >= least[rows][:, None]).nonzero(as_tuple=True)
            indices = rows[row] * right.shape[1] + columns[column]
            kept = torch.isin(indices, excluded, invert=True)
            indices = indices[kept]
            if indices.numel():
                weights, grads = tensor.matrix.take(indices), grads[row[kept], column[kept]]
                self._topk.offer_entries(self._importance, indices + tensor.offset, weights, grads)
        return sddmm(left, right, wanted)


def add_rows(values: Tensor, gradient: DenseGradient, start: int) -> Tensor:
    """Adds a gradient's rows from ``start`` on to values (n, cols) of as many rows, in their dtype."""
    if gradient.rows is None:
        return values.add_(gradient.values[start : start + values.shape[0]])
    at, last = gradient.rows - start, values.shape[0] - 1
    rows = gradient.values.where(((at >= 0) & (at <= last))[:, None], 0).to(values.dtype)
    return values.index_add_(0, at.clamp(0, last), rows)


def some_rows(gradient: DenseGradient, start: int, stop: int) -> Tensor:
    """Returns some consecutive rows of the weight (stop - start, cols), with zeros where the gradient covers none."""
    if gradient.rows is None:
        return gradient.values[start:stop].contiguous()
    return add_rows(gradient.values.new_zeros(stop - start, gradient.values.shape[1]), gradient, start)


class RowBlocks:
    """A large product in blocks of rows; ``taken`` (k,) is the gradient of the ``wanted`` entries so far."""

    def __init__(self, gradient: Product, wanted: Tensor, excluded: Tensor) -> None:
        self._gradient, self._wanted, self._excluded = gradient, wanted, excluded
        self.taken = torch.zeros_like(wanted)

    def rows(self, start: int, stop: int) -> Tensor:
        """Multiplies out some rows (stop - start, cols); to be called once for each row."""
        product = self._gradient
        values = product.left[:, start:stop].t() @ product.right
        if product.looked_up is not None:
            add_rows(values, product.looked_up, start)
        block = DenseGradient(values, torch.arange(start, stop, device=values.device))
        self.taken = self.taken + block.take(self._wanted)
        block.clear(self._excluded)
        return block.values


def screening_limit(left: Tensor, right: Tensor, sampled: int) -> int:
    """Number of entries that screening may multiply at the dense product's cost, which it samples from too."""
    if left.device.type != "cpu" or left.dtype not in SCREENED:
        return 0
    rows, cols = left.shape[1], right.shape[1]
    return max(0, int((rows * cols - NORMS * (rows + cols) - ENTRY * sampled) / TILE))


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
    return sum(rows.numel() * columns.numel() for rows, columns in steps)


def _norms(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor) -> tuple[Tensor, Tensor]:
    """L (rows,) and R (cols,), by the norms of the tokens (n,); not a number where a factor's numbers are too large."""
    scales = (of_right / of_left).sqrt_().clamp_(1 / LARGEST_SCALE, LARGEST_SCALE)
    scales[~(of_left.isfinite() & of_right.isfinite())] = torch.nan
    return _scaled_norms(left, scales), _scaled_norms(right, 1 / scales)


def _token_norms(factor: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(factor, dim=1, dtype=torch.float32)
    return norms + max(1, factor.shape[1]) ** 0.5 * SQUARES_UNDERFLOW


def _scaled_norms(factor: Tensor, scales: Tensor) -> Tensor:
    """The norms (cols,) of a factor's columns, in float32, with each token (n,) scaled."""
    total = torch.zeros(factor.shape[1], dtype=torch.float32, device=factor.device)
    at_once = max(1, NUMBERS_AT_ONCE // max(1, factor.shape[1]))
    for tokens, some in zip(factor.split(at_once), scales.split(at_once), strict=True):
        total += (tokens * some[:, None]).square_().sum(0)
    return total.sqrt_() + max(1, factor.shape[0]) ** 0.5 * SQUARES_UNDERFLOW
