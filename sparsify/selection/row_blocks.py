"""A gradient that is too large to be multiplied out at once, some rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.core.gradients import Product, TiedGradient


class RowBlocks:
    """A large product, or tied table, of which only some rows are in memory at a time.

    Args:
        gradient: what is multiplied out.
        unmasked: (k,) int64, flat indices of entries whose gradient is wanted.
        excluded: (e,) int64, flat indices of entries that are set to zero.

    Attributes:
        taken: (k,) the gradient of the unmasked entries in the rows so far.
    """

    def __init__(self, gradient: Product | TiedGradient, unmasked: Tensor, excluded: Tensor) -> None:
        self._product = gradient.product if isinstance(gradient, TiedGradient) else gradient
        self._looked_up = gradient.looked_up if isinstance(gradient, TiedGradient) else None
        self._unmasked, self._excluded = unmasked, excluded
        self._dtype = self._product.left.dtype
        if self._looked_up is not None:
            self._dtype = torch.promote_types(self._dtype, self._looked_up.values.dtype)
        self.taken = torch.zeros_like(unmasked, dtype=self._dtype)

    def rows(self, start: int, stop: int) -> Tensor:
        """Multiplies out some rows (stop - start, cols); to be called once for each row."""
        left, right = self._product.left[:, start:stop].t(), self._product.right
        values = left.new_empty(left.shape[0] * right.shape[1] + 1)
        torch.mm(left, right, out=values[:-1].view(-1, right.shape[1]))
        values[-1:].zero_()  # the place of other rows' entries
        values = values.to(self._dtype)
        rows = values[:-1].view(-1, right.shape[1])
        if self._looked_up is not None:
            rows += self._looked_up.some_rows(start, stop)
        first, last = start * right.shape[1], rows.numel()
        unmasked, excluded = (
            places.where((places >= 0) & (places < last), last)
            for places in (self._unmasked - first, self._excluded - first)
        )
        self.taken = self.taken + values.take(unmasked)
        values.index_fill_(0, excluded, 0)
        return rows
