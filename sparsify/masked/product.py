"""A linear layer's weight gradient, left^T right, before it is multiplied out.

Whoever collects it decides how much of the product to compute: all of it, or single entries as dot products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.common.devices import runs_ahead
from sparsify.kernels.costs import costs_of
from sparsify.kernels.sddmm import sddmm
from sparsify.masked.recompute import lasting
from sparsify.masked.tensor import Gradient
from sparsify.masked.tied import TiedGradient

# one entry as a dot product takes about as long as this many entries of the whole product on a GPU, by its data sheet:
# two 32-byte sectors a token at 3 TB/s, against 2 operations at 400 TFLOP/s
GPU_DOT_COST = 4096
LARGEST_HELD = 4  # times the product's memory, that factors may take which wait for another use of their weight


class Product(Gradient):
    """The gradient (rows, cols) = left^T right of a weight.

    Args:
        left: (n, rows), with n the tokens of the batch.
        right: (n, cols).

    Attributes:
        left_sum: (rows,) the sum of ``left`` over the tokens, where somebody who looked at the product came to know it.
    """

    left_sum: Tensor | None = None

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left = left
        self.right = right
        self.rows = None

    @property
    def device(self) -> torch.device:
        return self.left.device

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[1], self.right.shape[1]

    @property
    def numel(self) -> int:
        return self.left.shape[1] * self.right.shape[1] if self.left.shape[0] else 0

    def dense(self) -> Gradient:
        return Gradient(self.left.t() @ self.right)

    def held(self) -> Gradient:
        if self._may_wait(self.left.shape[0]):
            return Product(lasting(self.left), lasting(self.right))
        return self.dense()

    def add(self, other: Gradient) -> Gradient:
        if other.rows is not None and self._may_wait(self.left.shape[0]):
            return TiedGradient(self, other) if self.numel else other
        if (
            isinstance(other, Product)
            and other.left.dtype == self.left.dtype
            and self._may_wait(self.left.shape[0] + other.left.shape[0])
        ):  # two sums over tokens are one over all of them
            return Product(torch.cat([self.left, other.left]), torch.cat([self.right, other.right]))
        return self.dense().add(other.dense())

    def _may_wait(self, tokens: int) -> bool:
        """Whether factors of so many tokens take little enough memory to be held in the product's place."""
        rows, cols = self.shape
        return tokens * (rows + cols) <= LARGEST_HELD * rows * cols

    def take(self, indices: Tensor) -> Tensor:
        """The entries (k,) at flat indices (k,), each as a dot product over the tokens where that is faster."""
        if runs_ahead(self.left.device) and indices.numel() * GPU_DOT_COST < self.numel:
            return sddmm(self.left, self.right, indices)
        if self.left.device.type != "cpu" or not costs_of(self.left, self.right).samples(indices.numel()):
            return self.dense().take(indices)
        return sddmm(self.left, self.right, indices)
