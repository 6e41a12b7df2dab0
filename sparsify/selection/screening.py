"""Finds a linear layer's candidates without computing all of its gradient.

The norms of the factors left and right rule out most of the product left^T right, and the rest is multiplied and
compared tile by tile (``kernels/norm_bound.py``). The few entries that could reach the top-k's threshold, by the error
bound and by their weight, are offered to it. Where tiles are rounded, these are computed again in full: the top-k sees
what the full product would have shown it, summed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.kernels.costs import costs_of
from sparsify.kernels.norm_bound import screen
from sparsify.kernels.sddmm import sddmm
from sparsify.masked.gradients import DenseGradient, Gradient, Product, TiedGradient
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.context import ScanResult, SelectionContext, scan_dense
from sparsify.selection.topk import offer_entries
from sparsify.strategies.importance import ROUNDING_SLACK

SMALLEST_SCREENED = 1 << 16  # entries; below, the full product is as fast


def scan(context: SelectionContext, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor) -> ScanResult:
    """Offers a gradient's entries to the top-k, screened where that is possible and pays, else densely.

    Args:
        context: has the top-k.
        tensor: whose gradient it is.
        gradient: may be written to.
        excluded: (e,) flat indices that are no candidates.
    """
    result = scan_screened(context, tensor, gradient, excluded) if can_screen(context, gradient) else None
    return result or scan_dense(context, tensor, gradient, excluded)


def can_screen(context: SelectionContext, gradient: Gradient) -> bool:
    """Whether a gradient can be screened.

    Args:
        context: its importance has to grow with abs(grad), and its top-k has to be full, so that there is a threshold.
        gradient: has to be a product, not computed yet, or to have one.
    """
    product = gradient.product if isinstance(gradient, TiedGradient) else gradient
    return (
        isinstance(product, Product)
        and product.left.device.type == "cpu"
        and product.left.dtype in (torch.float32, torch.bfloat16)
        and context.importance.monotone
        and product.numel >= SMALLEST_SCREENED
        and context.topk.has_threshold
    )


def scan_screened(
    context: SelectionContext, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor
) -> ScanResult | None:
    """Offers the entries of a product, or a tied table, that can reach the top-k's threshold.

    Returns:
        ``None`` where screening costs more than the full product, found too many entries, or where not everything might
        be finite: nothing was offered then.
    """
    if isinstance(gradient, TiedGradient):
        return _scan_tied(context, tensor, gradient, excluded)
    assert isinstance(gradient, Product)
    unmasked = _screen(context, tensor, gradient, excluded)
    if unmasked is None:
        return None
    return ScanResult(unmasked, gradient, torch.ones_like(context.topk.threshold, dtype=torch.bool))


def _scan_tied(
    context: SelectionContext, tensor: MaskedTensor, gradient: TiedGradient, excluded: Tensor
) -> ScanResult | None:
    """Screens the product of a tied table where no row was looked up, and computes the other rows."""
    product, looked_up = gradient.product, gradient.looked_up
    assert isinstance(product, Product)
    assert looked_up.rows is not None
    unmasked = _screen(context, tensor, product, excluded, left_out=looked_up.rows)
    if unmasked is None:
        return None
    rows = DenseGradient(product.left[:, looked_up.rows].t() @ product.right + looked_up.values, looked_up.rows)
    finite = scan_dense(context, tensor, rows, excluded).finite
    return ScanResult(unmasked + looked_up.take(tensor.indices), gradient, finite)


def _screen(
    context: SelectionContext, tensor: MaskedTensor, product: Product, excluded: Tensor, left_out: Tensor | None = None
) -> Tensor | None:
    """Offers the entries of a product but for the rows (r,) left out; returns those of the unmasked entries (k,)."""
    limits = costs_of(product.left, product.right).limits(tensor.count)
    if limits is None:
        return None
    topk, work, weight = context.topk, context.work, tensor.matrix
    least, numel = context.importance.least_gradient(topk.threshold.float(), weight), product.numel
    if left_out is not None:
        least = least.index_fill(0, left_out, torch.inf)
        numel -= left_out.numel() * weight.shape[1]
    found = screen(product.left, product.right, tensor.indices, excluded, least, limits)
    if found is None:
        work.wasted += numel
        return None
    product.left_sum = found.left_sum.to(product.left.dtype)
    multiplied = min(found.multiplied, numel)  # whole tiles reach beyond the product's edge
    work.screened += multiplied
    work.skipped += numel - multiplied
    if found.indices.numel():
        near = weight.take(found.indices)
        scores = context.importance.score(near.float(), found.most)
        could_win = (scores * ROUNDING_SLACK >= topk.threshold).nonzero().squeeze(1)
        if could_win.numel():
            work.verified += could_win.numel()
            candidates, grads = found.indices[could_win], found.values[could_win]
            if found.rounded:
                grads = sddmm(product.left, product.right, candidates)
            offer_entries(topk, context.importance, candidates + tensor.offset, near[could_win], grads)
    return found.taken
