"""The gradient of a table that is looked up in and multiplied by: an embedding that is the output layer too.

The output layer's part is a product over all rows, the look-ups' part is about a few rows. Added up they would be as
large as the table; apart they take no more memory than their nodes had.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.masked.tensor import Gradient


class TiedGradient(Gradient):
    """The sum of a product and a gradient of some rows.

    Args:
        product: of the table's whole shape, not multiplied out yet.
        looked_up: the rows that were used.
    """

    def __init__(self, product: Gradient, looked_up: Gradient) -> None:
        self.product = product
        self.looked_up = looked_up
        self.rows = None

    @property
    def device(self) -> torch.device:
        return self.product.device

    @property
    def numel(self) -> int:
        return self.product.numel

    def dense(self) -> Gradient:
        return self.product.dense().add(self.looked_up)

    def take(self, indices: Tensor) -> Tensor:
        return self.product.take(indices) + self.looked_up.take(indices)

    def add(self, other: Gradient) -> Gradient:
        if other.rows is not None:
            return TiedGradient(self.product, self.looked_up.add(other))
        return self.product.add(other).add(self.looked_up)
