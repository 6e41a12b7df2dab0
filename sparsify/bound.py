"""Finding a linear layer's candidates in the part of its gradient that can have any.

    abs(gradient[i, j]) <= |left_i| |right_j|        (Cauchy-Schwarz)

Rows and columns whose norms are too small to reach the pool's floor, however the others fall, are left out of the
product. Early in a run few entries of a few outlying features beat all others, and next to nothing is multiplied.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.costs import costs_of
from sparsify.kernels.reach import reaching
from sparsify.masked.product import Product
from sparsify.masked.tensor import Gradient, MaskedTensor
from sparsify.search import Offered, Search
from sparsify.selection import offer_entries

SMALLEST_BOUNDED = 1 << 16  # entries; below, the full product costs as little as its norms
BLOCK_NUMBERS = 1 << 16  # of a factor, that stay in a core's cache
LARGEST_PART = 0.5  # of the product: with more left, gathering the factors' columns eats up what is saved


class Part(NamedTuple):
    """The rows and columns of a product that can reach what their row has to.

    Attributes:
        rows: (r,) int64, ascending.
        columns: (c,) int64, ascending.
    """

    rows: Tensor
    columns: Tensor

    @property
    def numel(self) -> int:
        """Number of entries."""
        return self.rows.numel() * self.columns.numel()


def can_bound(search: Search, gradient: Gradient) -> bool:
    """Whether a gradient is a product of which a part may be enough, and whose norms cost little beside it.

    Args:
        search: its importance has to grow with abs(grad), its pool has to be full, so that there is a floor.
        gradient: has to be a product, not multiplied out yet; in bfloat16 the norms cost too much.
    """
    return (
        isinstance(gradient, Product)
        and gradient.left.device.type == "cpu"
        and gradient.left.dtype in (torch.float32, torch.float64)
        and search.importance.monotone
        and gradient.numel >= SMALLEST_BOUNDED
        and search.pool.has_floor
    )


def offer_bounded(search: Search, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor) -> Offered | None:
    """Offers the entries of a product that can reach the pool's floor.

    Args:
        search: has the pool.
        tensor: whose gradient it is.
        gradient: one that can be bounded.
        excluded: (e,) flat indices that are no candidates.

    Returns:
        ``None`` where the full product is better, or where its entries might not all be finite: nothing was offered
        then.
    """
    assert isinstance(gradient, Product)
    if not costs_of(gradient.left, gradient.right).samples(tensor.count):
        return None
    pool, weight = search.pool, tensor.matrix
    least = search.importance.least_gradient(pool.floor.to(gradient.left.dtype), weight)
    part = part_that_reaches(gradient, least)
    if part is None or part.numel > LARGEST_PART * gradient.numel:
        return None
    search.work.multiplied += part.numel
    search.work.skipped += gradient.numel - part.numel
    if part.numel:
        indices, values = _reaching(gradient, part, least, excluded)
        offer_entries(pool, search.importance, indices + tensor.offset, weight.take(indices), values)
    unmasked = gradient.take(tensor.indices)
    return Offered(unmasked, gradient, unmasked.isfinite().all().to(pool.floor.device))


def _reaching(product: Product, part: Part, least: Tensor, excluded: Tensor) -> tuple[Tensor, Tensor]:
    """Flat indices and values (n,) of a part's entries that reach ``least`` (rows,), but for the excluded ones."""
    values = product.left.index_select(1, part.rows).t() @ product.right.index_select(1, part.columns)
    values.view(-1).index_fill_(0, _places(part, excluded, product.shape), 0)
    found, _ = reaching(values, least[part.rows])
    assert found is not None
    width = part.columns.numel()
    indices = part.rows[found.div(width, rounding_mode="floor")] * product.shape[1] + part.columns[found % width]
    return indices, values.take(found)


def part_that_reaches(product: Product, least: Tensor) -> Part | None:
    """The part of a product outside which no entry has abs(entry) >= least (rows,), as computed in its dtype.

    Returns:
        ``None`` where a norm is not finite, or so large that an entry might not be.

    Example:
        >>> product = Product(torch.tensor([[1.0, 5.0]]), torch.tensor([[3.0, 1.0, 0.0]]))
        >>> part_that_reaches(product, torch.tensor([4.0, 4.0])).columns
        tensor([0, 1])
    """
    row_norm, column_norm = _norms(product.left), _norms(product.right)
    if not (row_norm.max() * column_norm.max()).isfinite():
        return None
    rows = row_norm * column_norm.max() >= least
    columns = (row_norm / least).max() * column_norm >= 1
    return Part(rows.nonzero().squeeze(1), columns.nonzero().squeeze(1))


def _norms(factor: Tensor) -> Tensor:
    """At least the norms of the columns of (n, width), and enough more that their products bound a computed entry.

    An entry's sum is off by less than n eps of the sum of its terms' sizes, a norm by less than n eps of itself; what
    squares lose by underflow is added.
    """
    n, limits = factor.shape[0], torch.finfo(factor.dtype)
    squares = factor.new_zeros(factor.shape[1])
    for block in factor.split(max(1, BLOCK_NUMBERS // factor.shape[1])):  # 20 times as fast as torch's vector_norm
        squares += block.square().sum(0)
    return (squares.sqrt() + math.sqrt(n * limits.tiny)) * (1 + 2 * (n + 4) * limits.eps)


def _places(part: Part, indices: Tensor, shape: tuple[int, int]) -> Tensor:
    """Where those of the flat indices that lie in a part are in it, flat."""
    row_at, column_at = (torch.full((size,), -1) for size in shape)
    row_at[part.rows], column_at[part.columns] = torch.arange(part.rows.numel()), torch.arange(part.columns.numel())
    row, column = row_at[indices.div(shape[1], rounding_mode="floor")], column_at[indices % shape[1]]
    inside = (row >= 0) & (column >= 0)
    return row[inside] * part.columns.numel() + column[inside]
