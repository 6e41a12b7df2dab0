"""The gradients (rows, cols) that the nodes of masked modules hand to a collector, in two forms.

    DenseGradient   values, of all rows of the weight or of the rows that were used
    Product         left^T right: a linear layer's factors, not multiplied out

The collector decides how much of a gradient to compute: all of it, or single entries. Both forms have

    numel, device         number of entries that may have a gradient, and where it is
    rows                  the weight's rows that it covers, ascending; ``None`` for all of them in order
    dense()               the gradient with its values computed
    take(indices)         the gradient (k,) at flat indices (k,) of the weight; zero in rows that it does not cover
    add(other)            the sum with that of another use of the same weight; neither is used afterwards
    held()                the gradient in a form that is small enough to wait for another use
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

LARGEST_HELD = 4  # factors are held for another use of their weight while they take at most this times the product


class DenseGradient:
    """A gradient with its values (n, cols), of some rows (n,) int64; the last one may be repeated, with zeros.

    The values may be written to if they are ``owned``: autograd shares some gradients between nodes. ``dtype`` is the
    one that the gradient came in, where the values are sums in a longer one.
    """

    def __init__(
        self, values: Tensor, rows: Tensor | None = None, *, owned: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        self.values, self.rows = values, rows
        self.numel, self.device = values.numel(), values.device
        self._owned, self._dtype, self.covers_all = owned, dtype, rows is None

    def dense(self) -> DenseGradient:
        return self

    held = dense

    def take(self, indices: Tensor) -> Tensor:
        if self.covers_all:
            return self.values.take(indices)
        if not self.numel:
            return self.values.new_zeros(indices.shape)
        at, used = self._locate(indices)
        return torch.where(used, self.values.take(at), 0)

    def own(self, dtype: torch.dtype | None = None) -> DenseGradient:
        """Returns the gradient with contiguous values that are not shared, in their dtype or another."""
        dtype = self.values.dtype if dtype is None else dtype
        if not self._owned or not self.values.is_contiguous() or self.values.dtype != dtype:
            self.values = self.values.to(dtype, copy=True, memory_format=torch.contiguous_format)
            self._owned = True
        return self

    def clear(self, indices: Tensor) -> None:
        """Sets the gradient at flat indices (k,) of the weight to zero."""
        self.own()
        if self.covers_all:
            self.values.view(-1).index_fill_(0, indices, 0)
        elif self.numel:
            at, used = self._locate(indices)
            cleared = torch.zeros(self.numel + 1, dtype=torch.bool, device=at.device)  # one more for the others
            cleared.index_fill_(0, at.where(used, self.numel), True)
            self.values.masked_fill_(cleared[:-1].view_as(self.values), 0)

    def add(self, other: Gradient) -> DenseGradient:
        other = other.dense()
        # under autocast short gradients meet longer ones; long sums over a few rows do not lengthen a whole gradient
        dtype = torch.promote_types(self._dtype or self.values.dtype, other._dtype or other.values.dtype)
        if self.rows is not None and other.rows is not None:
            return sum_rows(torch.cat([self.rows, other.rows]), torch.cat([self.values, other.values]), dtype)
        if self.rows is not None:
            return other.add(self)
        self.own(dtype)
        if other.rows is None:
            self.values += other.values
        else:
            self.values.index_add_(0, other.rows, other.values.to(dtype))
        return self

    def _locate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the places of the weight's flat indices in ``values``, and which of them are covered."""
        assert self.rows is not None
        cols = self.values.shape[1]
        row = indices.div(cols, rounding_mode="floor")
        position = torch.searchsorted(self.rows, row).clamp_(max=self.rows.numel() - 1)
        return position * cols + indices % cols, self.rows[position] == row


class Product:
    """A linear layer's gradient left^T right, not multiplied out, with left (n, rows) and right (n, cols) of n tokens.

    ``looked_up`` are rows to be added to it, of a table that is an embedding and the output layer.
    """

    rows = None
    # computes entries (k,) of left^T right at flat indices; None: by the whole product
    sampler: ClassVar[Callable[[Product, Tensor], Tensor | None] | None] = None

    def __init__(self, left: Tensor, right: Tensor, looked_up: DenseGradient | None = None) -> None:
        self.left, self.right, self.looked_up = left, right, looked_up
        self.numel = left.shape[1] * right.shape[1] if left.shape[0] else 0
        self.device = left.device

    def dense(self) -> DenseGradient:
        product = DenseGradient(self.left.t() @ self.right)
        return product if self.looked_up is None else product.add(self.looked_up)

    def take(self, indices: Tensor) -> Tensor:
        sampler = type(self).sampler
        taken = None if sampler is None else sampler(self, indices)
        if taken is None:
            return self.dense().take(indices)
        return taken if self.looked_up is None else taken + self.looked_up.take(indices)

    def add(self, other: Gradient) -> Gradient:
        left, right, rows = self.left, self.right, None
        if isinstance(other, Product) and other.left.dtype == left.dtype:  # two sums over tokens: one over all of them
            left, right, rows = torch.cat([left, other.left]), torch.cat([right, other.right]), other.looked_up
        elif isinstance(other, DenseGradient) and other.rows is not None:
            rows = other
        else:
            return self.dense().add(other)
        if not _can_wait(left, right):
            return self.dense().add(other)
        if self.looked_up is not None:
            rows = self.looked_up if rows is None else self.looked_up.add(rows)
        return rows if rows is not None and not left.shape[0] else Product(left, right, rows)

    def held(self) -> Gradient:
        return self if _can_wait(self.left, self.right) else self.dense()


Gradient = DenseGradient | Product


def _can_wait(left: Tensor, right: Tensor) -> bool:
    """Whether factors (n, rows) and (n, cols) are small enough to be held instead of their product."""
    return left.numel() + right.numel() <= LARGEST_HELD * left.shape[1] * right.shape[1]


def linear_gradient(x: Tensor, grad_rows: Tensor, transposed: bool) -> Product:
    """Returns the gradient of a linear layer's weight for inputs (..., in) and output gradients (n, out)."""
    rows = x.to_dense().reshape(-1, x.shape[-1])  # (n, in)
    return Product(rows, grad_rows) if transposed else Product(grad_rows, rows)


def row_gradient(ids: Tensor, grad: Tensor, height: int) -> DenseGradient:
    """Returns the gradient of an embedding's table (height, dim) for ids (...) and output gradients (..., dim)."""
    rows, values = ids.reshape(-1).long(), grad.reshape(-1, grad.shape[-1])
    if rows.numel() < height:
        return sum_rows(rows, values)
    return DenseGradient(_add_rows(height, rows, values), dtype=values.dtype)


def tap_gradient(grad: Tensor) -> DenseGradient:
    """Returns the gradient of a parameter of any shape that the module's own autograd has computed."""
    if grad.is_sparse:  # an embedding's, with sparse=True
        return row_gradient(grad._indices()[0], grad._values(), grad.shape[0])
    return DenseGradient(as_matrix(grad), owned=False)


def as_matrix(tensor: Tensor) -> Tensor:
    """Views a tensor of any shape as (rows, cols): its last dimension is kept, a vector or a scalar is one row."""
    if tensor.dim() == 2:
        return tensor
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 2 else tensor.reshape(1, -1)


def sum_rows(rows: Tensor, values: Tensor, dtype: torch.dtype | None = None) -> DenseGradient:
    """Returns the gradient whose row r is the sum of ``values`` (n, cols) where ``rows`` (n,) is r.

    It has n rows, distinct ones and the last one repeated, so that no host waits for a GPU to count them.
    """
    unique, place = padded_unique(rows)
    return DenseGradient(_add_rows(rows.numel(), place, values), unique, dtype=dtype or values.dtype)


def _add_rows(height: int, rows: Tensor, values: Tensor) -> Tensor:
    """Sums ``values`` (n, cols) to rows (n,) of a new table (height, cols), in float32 at least."""
    values = values.to(torch.promote_types(values.dtype, torch.float32))  # in bfloat16 a sum of ones stays at 256
    total = values.new_zeros(height, values.shape[1])
    if total.is_cuda:  # index_add_ adds in another order at every run, and index_put_ waits to check the places
        return torch._index_put_impl_(total, [rows], values, accumulate=True, unsafe=True)
    return total.index_add_(0, rows, values)


def padded_unique(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``rows.unique(return_inverse=True)`` of ``rows`` (n,), filled up to (n,) by repeating the largest."""
    ordered, order = rows.sort()
    place = ordered.clone()
    place[:1] = 0
    place[1:] = ordered[1:] != ordered[:-1]
    place = place.cumsum(0)
    unique = ordered[-1:].expand_as(ordered).clone().index_put_((place,), ordered)
    return unique, torch.empty_like(place).index_put_((order,), place)
