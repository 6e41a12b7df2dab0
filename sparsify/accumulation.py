"""accumulation="exact": one choice for all micro-batches of an optimizer step, as if they were one batch.

No backward pass knows that it is the last of its step. So each chooses anew, by the sum of the gradients so far, and
returns what the flat gradient has to grow by: autograd adds that to what the micro-batches before it have returned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.masked.tensor import Gradient, MaskedTensor

ACCUMULATIONS = ("first", "exact")


class Sums:
    """The gradients of all entries, summed over the micro-batches so far: as large as the gradients of a dense model.

    Args:
        first: number of entries that were unmasked before the step; those unmasked in it are chosen anew.
        dtype: of the sums.
    """

    def __init__(self, first: int, dtype: torch.dtype) -> None:
        self.first = first
        self._dtype = dtype
        self._sums: dict[MaskedTensor, Gradient] = {}
        self._returned: Tensor | None = None

    @property
    def tensors(self) -> list[MaskedTensor]:
        """Those that have a gradient in this step."""
        return list(self._sums)

    def add(self, tensor: MaskedTensor, gradient: Gradient) -> Gradient:
        """The sum with a further gradient, not to be written to."""
        gradient = gradient.dense()
        if tensor in self._sums:
            self._sums[tensor] = self._sums[tensor].add(gradient)
        else:
            self._sums[tensor] = Gradient(gradient.values.to(self._dtype, copy=True), gradient.rows)
        return self.of(tensor)

    def of(self, tensor: MaskedTensor) -> Gradient:
        """A tensor's sum, not to be written to."""
        total = self._sums[tensor]
        return Gradient(total.values, total.rows, owned=False)

    def take_back(self, grad: Tensor) -> None:
        """Takes what the step's own entries got out of the flat gradient (capacity,): their slots are free again.

        Should the backward pass that is to choose them anew fail, an optimizer step leaves free slots at zero.
        """
        grad[self.first :] = 0
        if self._returned is not None:
            self._returned[self.first :] = 0

    def growth(self, total: Tensor) -> Tensor:
        """What has to be added to the flat gradients returned so far to make them ``total`` (capacity,)."""
        before, self._returned = self._returned, total
        return total.clone() if before is None else total - before
