"""The gradients that the nodes of masked modules hand to a collector, in three forms.

    DenseGradient   values, of all rows of the weight or of the rows that were used
    Product         left^T right: a linear layer's factors, not multiplied out
    TiedGradient    the sum of a product and some rows: an embedding that is the output layer too

The collector decides how much of a gradient to compute: all of it (``dense``), or single entries (``take``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from sparsify.common.devices import runs_ahead
from sparsify.kernels.costs import costs_of
from sparsify.kernels.sddmm import sddmm
from sparsify.masked.recompute import lasting

CAST_ENTRIES = 1 << 22  # entries of a short gradient that are cast to a longer type at once
LARGEST_HELD = 4  # factors are held for another use of their weight while they take at most this times the product


class Gradient(ABC):
    """The gradient (rows, cols) of one weight.

    Attributes:
        rows: (n,) int64, ascending: the weight's rows that it covers, ``None`` for all of them in order. The last row
            may be repeated, with values of zero.
        numel: number of entries that may have a gradient.
        device: of its tensors.
    """

    rows: Tensor | None = None
    numel: int
    device: torch.device

    @abstractmethod
    def dense(self) -> DenseGradient:
        """Returns the gradient with its values computed."""

    @abstractmethod
    def take(self, indices: Tensor) -> Tensor:
        """Returns the gradient (k,) at flat indices (k,) of the weight; zero in rows that it does not cover."""

    @abstractmethod
    def add(self, other: Gradient) -> Gradient:
        """Returns the sum with the gradient of another use of the same weight; neither is used afterwards."""

    def held(self) -> Gradient:
        """Returns the gradient in a form that outlives the node that saw it."""
        return self


class DenseGradient(Gradient):
    """A gradient with its values.

    Args:
        values: (n, cols).
        rows: (n,) int64, the rows of the weight that ``values`` belong to; ``None`` for all rows in order.
        owned: whether ``values`` may be written to; autograd shares some gradients between nodes.
        dtype: the dtype that the gradient came in, where ``values`` are sums in a longer one.
    """

    def __init__(
        self, values: Tensor, rows: Tensor | None = None, *, owned: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        self.values, self.rows = values, rows
        self.numel, self.device = values.numel(), values.device
        self._owned, self._dtype = owned, dtype

    def dense(self) -> DenseGradient:
        return self

    def take(self, indices: Tensor) -> Tensor:
        if self.rows is None:
            return self.values.take(indices)
        if not self.rows.numel():
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
        if self.rows is None:
            self.values.view(-1).index_fill_(0, indices, 0)
        elif self.rows.numel():
            at, used = self._locate(indices)
            cleared = torch.zeros(self.numel + 1, dtype=torch.bool, device=at.device)  # one more for rows not covered
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

    def some_rows(self, start: int, stop: int) -> Tensor:
        """Returns some consecutive rows of the weight (stop - start, cols), with zeros where it covers none."""
        if self.rows is None:
            return self.values[start:stop].contiguous()
        at, last = self.rows - start, stop - start - 1
        values = self.values.where(((at >= 0) & (at <= last))[:, None], 0)
        return values.new_zeros(stop - start, values.shape[1]).index_add_(0, at.clamp(0, last), values)

    def _locate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the places of the weight's flat indices in ``values``, and which of them are covered."""
        assert self.rows is not None
        cols = self.values.shape[1]
        row = indices.div(cols, rounding_mode="floor")
        position = torch.searchsorted(self.rows, row).clamp_(max=self.rows.numel() - 1)
        return position * cols + indices % cols, self.rows[position] == row


class Product(Gradient):
    """A linear layer's gradient left^T right, not multiplied out: left (n, rows) and right (n, cols), of n tokens."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right
        self.numel = left.shape[1] * right.shape[1] if left.shape[0] else 0
        self.device = left.device

    def dense(self) -> DenseGradient:
        return DenseGradient(self.left.t() @ self.right)

    def take(self, indices: Tensor) -> Tensor:
        """Returns the entries (k,), each as a dot product over the tokens where that is faster."""
        if costs_of(self.left, self.right).samples(indices.numel()):
            return sddmm(self.left, self.right, indices)
        return self.dense().take(indices)

    def add(self, other: Gradient) -> Gradient:
        if isinstance(other, DenseGradient) and other.rows is not None and self._can_wait(self.left.shape[0]):
            return TiedGradient(self, other) if self.numel else other
        if (
            isinstance(other, Product)
            and other.left.dtype == self.left.dtype
            and self._can_wait(self.left.shape[0] + other.left.shape[0])
        ):  # two sums over tokens are one over all of them
            return Product(torch.cat([self.left, other.left]), torch.cat([self.right, other.right]))
        return self.dense().add(other)

    def held(self) -> Gradient:
        if self._can_wait(self.left.shape[0]):
            return Product(lasting(self.left), lasting(self.right))
        return self.dense()

    def _can_wait(self, tokens: int) -> bool:
        """Whether factors of so many tokens are small enough to be held instead of the product."""
        rows, cols = self.left.shape[1], self.right.shape[1]
        return tokens * (rows + cols) <= LARGEST_HELD * rows * cols


class TiedGradient(Gradient):
    """The gradient of a table that is looked up in and multiplied by; added up, it would be as large as the table.

    ``product`` is the output layer's part, of the table's whole shape, ``looked_up`` the embedding's, some of the rows.
    """

    def __init__(self, product: Product, looked_up: DenseGradient) -> None:
        self.product, self.looked_up = product, looked_up
        self.numel, self.device = product.numel, product.device

    def dense(self) -> DenseGradient:
        return self.product.dense().add(self.looked_up)

    def take(self, indices: Tensor) -> Tensor:
        return self.product.take(indices) + self.looked_up.take(indices)

    def add(self, other: Gradient) -> Gradient:
        if other.rows is not None:
            return TiedGradient(self.product, self.looked_up.add(other))
        return self.product.add(other).add(self.looked_up)


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


def linear_gradient(x: Tensor, grad_rows: Tensor, transposed: bool) -> Product:
    """Returns the gradient of a linear layer's weight for inputs (..., in) and output gradients (n, out)."""
    rows = x.reshape(-1, x.shape[-1])  # (n, in)
    return Product(rows, grad_rows) if transposed else Product(grad_rows, rows)


def row_gradient(ids: Tensor, grad: Tensor, height: int) -> DenseGradient:
    """Returns the gradient of an embedding's table (height, dim) for ids (...) and output gradients (..., dim)."""
    rows, values = ids.reshape(-1).long(), grad.reshape(-1, grad.shape[-1])
    if runs_ahead(rows.device) and rows.numel() >= height:  # then the table is smaller than a row for each id
        total = torch.zeros(height, values.shape[1], dtype=_long(values), device=values.device)
        return DenseGradient(_add_rows(total, rows, values), dtype=values.dtype)
    return sum_rows(rows, values)


def tap_gradient(grad: Tensor) -> DenseGradient:
    """Returns the gradient of a parameter of any shape that the module's own autograd has computed."""
    if grad.is_sparse:  # an embedding's, with sparse=True
        return row_gradient(grad._indices()[0], grad._values(), grad.shape[0])
    return DenseGradient(as_matrix(grad), owned=False)


def as_matrix(tensor: Tensor) -> Tensor:
    """Views a tensor of any shape as (rows, cols): its last dimension is kept, a vector or a scalar is one row."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)


def sum_rows(rows: Tensor, values: Tensor, dtype: torch.dtype | None = None) -> DenseGradient:
    """Returns the gradient (unique rows, cols) whose row r is the sum of ``values`` (n, cols) where ``rows`` is r.

    The sums are float32 at least: in bfloat16 the sum of equal terms stays at 256 of them, in float16 at 2048. On a GPU
    they are (n, cols), so that the host need not wait for the number of distinct rows.
    """
    unique, inverse = padded_unique(rows) if runs_ahead(rows.device) else rows.unique(return_inverse=True)
    total = torch.zeros(unique.numel(), values.shape[1], dtype=_long(values), device=values.device)
    return DenseGradient(_add_rows(total, inverse, values), unique, dtype=dtype or values.dtype)


def _long(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _add_rows(total: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Adds ``values`` (n, cols) to the rows (n,) of ``total``, cast block by block where they are shorter."""
    whole = values.dtype == total.dtype
    at_once = max(1, values.shape[0] if whole else CAST_ENTRIES // max(1, values.shape[1]))
    for places, some in zip(rows.split(at_once), values.split(at_once), strict=True):
        if total.is_cuda:  # index_add_ adds in another order at every run, and index_put_ waits to check the places
            torch._index_put_impl_(total, [places], some.to(total.dtype), accumulate=True, unsafe=True)
        else:
            total.index_add_(0, places, some.to(total.dtype))
    return total


def padded_unique(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``rows.unique(return_inverse=True)`` of ``rows`` (n,), filled up to (n,) by repeating the largest."""
    ordered, order = rows.sort()
    place = ordered.clone()
    place[:1] = 0
    place[1:] = ordered[1:] != ordered[:-1]
    place = place.cumsum(0)
    unique = ordered[-1:].expand_as(ordered).clone().index_put_((place,), ordered)
    return unique, torch.empty_like(place).index_put_((order,), place)
