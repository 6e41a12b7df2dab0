"""Finding a linear layer's candidates without its gradient: bound it, screen what is left, take what comes through.

The norms of the factors left and right rule out most of the product left^T right, and what they leave is multiplied and
compared tile by tile (``kernels/survey.py``). Every entry that could reach the pool's floor by the error bound and by
its weight is offered, and there are few. Where tiles are rounded it is computed in full before: the pool sees what the
full product would have shown it, summed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.kernels.costs import costs_of
from sparsify.kernels.norm_bound import survey
from sparsify.kernels.sddmm import sddmm
from sparsify.masked.product import Product
from sparsify.masked.tensor import Gradient, MaskedTensor
from sparsify.masked.tied import TiedGradient
from sparsify.selection.context import Offered, Search, offer_whole
from sparsify.selection.topk import offer_entries
from sparsify.strategies.importance import ROUNDING_SLACK

SMALLEST_SCREENED = 1 << 16  # entries; below, the full product is as fast


def can_screen(search: Search, gradient: Gradient) -> bool:
    """Whether a gradient can be screened.

    Args:
        search: its importance has to grow with abs(grad), its pool has to be full, so that there is a floor.
        gradient: has to be a product, not multiplied out yet, or to have one.
    """
    product = gradient.product if isinstance(gradient, TiedGradient) else gradient
    return (
        isinstance(product, Product)
        and product.left.device.type == "cpu"
        and product.left.dtype in (torch.float32, torch.bfloat16)
        and search.importance.monotone
        and product.numel >= SMALLEST_SCREENED
        and search.pool.has_floor
    )


def offer_screened(search: Search, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor) -> Offered | None:
    """Offers the entries of a product that can reach the pool's floor.

    Args:
        search: has the pool.
        tensor: whose gradient it is.
        gradient: one that can be screened.
        excluded: (e,) flat indices that are no candidates.

    Returns:
        ``None`` where a screen is slower than the full product, found too many to verify, or where not everything might
        be finite: nothing was offered then.
    """
    if isinstance(gradient, TiedGradient):
        return _offer_tied(search, tensor, gradient, excluded)
    assert isinstance(gradient, Product)
    unmasked = _screen(search, tensor, gradient, excluded)
    if unmasked is None:
        return None
    return Offered(unmasked, gradient, torch.ones_like(search.pool.floor, dtype=torch.bool))


def _offer_tied(search: Search, tensor: MaskedTensor, gradient: TiedGradient, excluded: Tensor) -> Offered | None:
    """Likewise for a tied table's gradient: its product is screened where no row was looked up, the others are made."""
    product, looked_up = gradient.product, gradient.looked_up
    assert isinstance(product, Product)
    assert looked_up.rows is not None
    unmasked = _screen(search, tensor, product, excluded, left_out=looked_up.rows)
    if unmasked is None:
        return None
    made = Gradient(product.left[:, looked_up.rows].t() @ product.right + looked_up.values, looked_up.rows)
    finite = offer_whole(search, tensor, made, excluded).finite
    return Offered(unmasked + looked_up.take(tensor.indices), gradient, finite)


def _screen(
    search: Search, tensor: MaskedTensor, product: Product, excluded: Tensor, left_out: Tensor | None = None
) -> Tensor | None:
    """Offers the entries of a product, but for the rows (r,) left out; returns those of the unmasked entries (k,)."""
    room = costs_of(product.left, product.right).room(tensor.count)
    if room is None:
        return None
    pool, work, weight = search.pool, search.work, tensor.matrix
    least, numel = search.importance.least_gradient(pool.floor.float(), weight), product.numel
    if left_out is not None:
        least = least.index_fill(0, left_out, torch.inf)
        numel -= left_out.numel() * weight.shape[1]
    found = survey(product.left, product.right, tensor.indices, excluded, least, room)
    if found is None:
        work.vain += numel
        return None
    product.left_sum = found.left_sum.to(product.left.dtype)
    multiplied = min(found.multiplied, numel)  # whole tiles, beyond the product's edge
    work.screened += multiplied
    work.skipped += numel - multiplied
    if found.indices.numel():
        near = weight.take(found.indices)
        scores = search.importance.score(near.float(), found.most)
        reach = (scores * ROUNDING_SLACK >= pool.floor).nonzero().squeeze(1)
        if reach.numel():
            work.verified += reach.numel()
            candidates, grads = found.indices[reach], found.values[reach]
            if found.rounded:
                grads = sddmm(product.left, product.right, candidates)
            offer_entries(pool, search.importance, candidates + tensor.offset, near[reach], grads)
    return found.taken
