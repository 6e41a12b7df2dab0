"""Selects by gradients that are computed only as far as their entries could be among the best.

On a CPU the norms of a product's factors rule out most of it (``kernels/norm_bound.py``). The rest is multiplied, and
offered to the top-k, which sees what the full product would have shown it. On a GPU a large product is multiplied out
in blocks of rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sparsify.core.gradients import DenseGradient, Gradient, Product
from sparsify.core.importance import Importance
from sparsify.core.policy import Selector
from sparsify.core.tensor import MaskedTensor
from sparsify.kernels.norm_bound import screening_limit, size_of, staircase
from sparsify.kernels.sddmm import sampling_pays, sddmm
from sparsify.masked.tensor import matrix_shape
from sparsify.selection.device_topk import DeviceTopK
from sparsify.selection.small import SmallGradients

MOST_MULTIPLIED = 1 << 26  # entries of a product that a GPU has in memory at once
SMALLEST_THRESHOLD = 1e-20  # bounds underflow near a lower one
SMALLEST_SCREENED = 1 << 16  # entries; below, the full product is as fast


@dataclass
class Work:
    """Entries that a selection looked at, by the way it took, known from shapes; each rank counts its own.

    Attributes:
        screened: not ruled out by the norms of a product's factors, so computed and compared.
        dense: taken from a whole gradient, entries that are no candidates included.
        skipped: ruled out by the norms, so not computed.
    """

    screened: int = 0
    dense: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        """Describes the work.

        Example:
            >>> print(Work(screened=84_312, dense=600_123, skipped=84_934_656))
            84,312 entries screened, 0.6 M entries dense, 84.9 M entries skipped
        """
        short = {way: f"{n:,}" if n < 100_000 else f"{n / 1e6:,.1f} M" for way, n in asdict(self).items() if n}
        return ", ".join(f"{number} entries {way}" for way, number in short.items()) or "no entry was looked at"


def sampled(product: Product, indices: Tensor) -> Tensor | None:
    """Entries (k,) of a product, each as a dot product over the tokens; ``None`` where the whole product is faster."""
    left, right = product.left, product.right
    return sddmm(left, right, indices) if sampling_pays(left, right, indices.numel()) else None


Product.sampler = staticmethod(sampled)


class StreamingSelector(Selector):
    """Selects the best entries on one rank by a ``TopK`` or a ``DeviceTopK``, screened where that pays."""

    batches_small = True  # whether it may be offered the small tensors together, after the others
    _topk: Any

    def __init__(self, topk: Any, importance: Importance, work: Work, masked_only: bool) -> None:
        super().__init__(topk, importance)
        self._work, self._masked_only = work, masked_only

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        excluded = self._excluded(tensor)
        if isinstance(gradient, Product):
            if not isinstance(self._topk, DeviceTopK):
                unmasked = self.screen(tensor, gradient, excluded)
                if unmasked is not None:
                    return unmasked
            elif gradient.numel > MOST_MULTIPLIED:
                return self._offer_blocks(tensor, gradient, excluded)
        unmasked, dense = self._compute(tensor, gradient, excluded)
        self._topk.offer(self._importance, tensor.matrix, dense.values, dense.rows, tensor.offset)
        return unmasked

    def skip(self, tensor: MaskedTensor) -> None:
        """Takes note that a tensor's gradient is empty, for want of tokens."""

    def offer_small(self, small: SmallGradients) -> None:
        """Takes the whole gradients of all small tensors."""
        self._work.dense += small.numel
        weight, grad, ids = small.entries([self._excluded(tensor) for tensor in small.tensors])
        self._topk.offer(self._importance, weight[None], grad[None], None, 0, ids)

    def _excluded(self, tensor: MaskedTensor) -> Tensor:
        return tensor.not_candidates if self._masked_only else tensor.never_candidates

    def _compute(self, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor) -> tuple[Tensor, DenseGradient]:
        """Returns the gradient of the unmasked entries (k,), and the whole one, zero at the excluded entries (e,)."""
        self._work.dense += gradient.numel
        dense = gradient.dense()
        unmasked = dense.take(tensor.indices)
        if excluded.numel():
            dense.clear(excluded)  # an entry whose gradient is zero is never offered
        return unmasked, dense

    def _offer_blocks(self, tensor: MaskedTensor, gradient: Product, excluded: Tensor) -> Tensor:
        """Offers a large product in blocks of rows; returns the gradient of the unmasked entries (k,)."""
        self._work.dense += gradient.numel
        (height, cols), weight = matrix_shape(tensor), tensor.matrix
        blocks, at_once = RowBlocks(gradient, tensor.indices, excluded), max(1, MOST_MULTIPLIED // cols)
        for start in range(0, height, at_once):
            values = blocks.rows(start, min(start + at_once, height))
            rows = weight[start : start + at_once]
            self._topk.offer(self._importance, rows, values, None, tensor.offset + start * cols)
        return blocks.taken

    def screen(self, tensor: MaskedTensor, product: Product, excluded: Tensor) -> Tensor | None:
        """Offers what can reach the threshold; returns the unmasked entries' gradient, ``None`` if it does not pay."""
        left, right, size = product.left, product.right, product.numel
        most = screening_limit(left, right, tensor.count) if product.looked_up is None else 0
        has_threshold = self._importance.monotone and float(self._topk.threshold) > SMALLEST_THRESHOLD
        if not most or size < SMALLEST_SCREENED or not has_threshold:
            return None
        least = self._importance.least_gradient(self._topk.threshold.float(), tensor.matrix)  # (rows,)
        steps = staircase(left, right, least, most)
        if steps is None:
            return None
        self._work.screened += size_of(steps)
        self._work.skipped += size - size_of(steps)
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
        return sddmm(left, right, tensor.indices)


def some_rows(gradient: DenseGradient, start: int, stop: int) -> Tensor:
    """Returns some consecutive rows of the weight (stop - start, cols), with zeros where the gradient covers none."""
    if gradient.rows is None:
        return gradient.values[start:stop].contiguous()
    at, last = gradient.rows - start, stop - start - 1
    values = gradient.values.where(((at >= 0) & (at <= last))[:, None], 0)
    return values.new_zeros(stop - start, values.shape[1]).index_add_(0, at.clamp(0, last), values)


class RowBlocks:
    """A large product in blocks of rows; ``taken`` (k,) is the gradient of the ``unmasked`` entries so far."""

    def __init__(self, gradient: Product, unmasked: Tensor, excluded: Tensor) -> None:
        self._gradient, self._unmasked, self._excluded = gradient, unmasked, excluded
        self.taken = torch.zeros_like(unmasked)

    def rows(self, start: int, stop: int) -> Tensor:
        """Multiplies out some rows (stop - start, cols); to be called once for each row."""
        product = self._gradient
        values = product.left[:, start:stop].t() @ product.right
        if product.looked_up is not None:
            values = values + some_rows(product.looked_up, start, stop)
        block = DenseGradient(values, torch.arange(start, stop, device=values.device))
        self.taken = self.taken + block.take(self._unmasked)
        block.clear(self._excluded)
        return block.values
