"""Finds a linear layer's candidates without computing all of its gradient.

The norms of the factors left and right rule out most of the product left^T right, and the rest is multiplied and
compared tile by tile (``kernels/norm_bound.py``). The few entries that could reach the top-k's threshold, by the error
bound and by their weight, are offered to it. Where tiles are rounded, these are computed again in full: the top-k sees
what the full product would have shown it, summed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.core.gradients import DenseGradient, Gradient, Product, TiedGradient
from sparsify.core.importance import ROUNDING_SLACK
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import TopK
from sparsify.kernels.candidates import Factors
from sparsify.kernels.costs import costs_of
from sparsify.kernels.norm_bound import screen
from sparsify.kernels.sddmm import sddmm
from sparsify.selection.context import SelectionContext, scan_dense
from sparsify.selection.device_topk import DeviceTopK
from sparsify.selection.row_blocks import RowBlocks

MOST_MULTIPLIED = 1 << 26  # entries of a product that a GPU has in memory at once
SMALLEST_SCREENED = 1 << 16  # entries; below, the full product is as fast


def sampled(product: Product, indices: Tensor) -> Tensor | None:
    """Entries (k,) of a product, each as a dot product over the tokens; ``None`` where the whole product is faster."""
    if not costs_of(product.left, product.right).samples(indices.numel()):
        return None
    return sddmm(product.left, product.right, indices)


Product.sampler = staticmethod(sampled)


def scan(
    context: SelectionContext, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor
) -> tuple[Tensor, Gradient]:
    """Offers a gradient's entries, but the excluded ones (e,), to the top-k: screened where that pays, else densely.

    Returns:
        The gradient of the unmasked entries (k,), and the whole gradient in the form that was scanned.
    """
    if isinstance(context.topk, DeviceTopK) and isinstance(gradient, (Product, TiedGradient)):
        unmasked = _scan_product_on_device(context, tensor, gradient, excluded)
        if unmasked is not None:
            return unmasked, gradient
    if can_screen(context, gradient):
        unmasked = scan_screened(context, tensor, gradient, excluded)
        if unmasked is not None:
            return unmasked, gradient
    return scan_dense(context, tensor, gradient, excluded)


def _scan_product_on_device(
    context: SelectionContext, tensor: MaskedTensor, gradient: Product | TiedGradient, excluded: Tensor
) -> Tensor | None:
    """Offers the entries of a product that is screened, or multiplied out in blocks; ``None`` where it is neither."""
    topk, (height, cols) = context.topk, tensor.matrix_shape
    assert isinstance(topk, DeviceTopK)
    if isinstance(gradient, Product):
        factors = Factors(gradient.left, gradient.right, tensor.matrix, tensor.offset, tensor.indices, excluded)
        unmasked = topk.screen(context.importance, factors)
        if unmasked is not None:
            context.work.screened += gradient.numel
            return unmasked
    if gradient.numel <= MOST_MULTIPLIED:
        return None
    context.work.dense += gradient.numel
    blocks, weight = RowBlocks(gradient, tensor.indices, excluded), tensor.matrix
    at_once = max(1, MOST_MULTIPLIED // cols)
    for start in range(0, height, at_once):
        rows = slice(start, min(start + at_once, height))
        values = blocks.rows(rows.start, rows.stop)
        topk.offer(context.importance, weight[rows], values, None, tensor.offset + start * cols)
    return blocks.taken


def can_screen(context: SelectionContext, gradient: Gradient) -> bool:
    """Whether a gradient on a CPU is a product, or has one, and the top-k has a threshold to compare with."""
    product = gradient.product if isinstance(gradient, TiedGradient) else gradient
    return (
        isinstance(product, Product)
        and product.left.device.type == "cpu"
        and product.left.dtype in (torch.float32, torch.bfloat16)
        and context.importance.monotone
        and product.numel >= SMALLEST_SCREENED
        and isinstance(context.topk, TopK)
        and context.topk.has_threshold
    )


def scan_screened(
    context: SelectionContext, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor
) -> Tensor | None:
    """Offers the entries of a product, or a tied table, that can reach the top-k's threshold.

    Returns:
        The gradient of the unmasked entries (k,); ``None`` where screening costs more than the full product, found too
        many entries, or where not everything might be finite: nothing was offered then.
    """
    if isinstance(gradient, Product):
        return _screen(context, tensor, gradient, excluded)
    assert isinstance(gradient, TiedGradient)
    product, looked_up = gradient.product, gradient.looked_up
    assert looked_up.rows is not None
    unmasked = _screen(context, tensor, product, excluded, left_out=looked_up.rows)
    if unmasked is None:
        return None
    # the rows that were looked up are computed
    rows = DenseGradient(product.left[:, looked_up.rows].t() @ product.right + looked_up.values, looked_up.rows)
    scan_dense(context, tensor, rows, excluded)
    return unmasked + looked_up.take(tensor.indices)


def _screen(
    context: SelectionContext, tensor: MaskedTensor, product: Product, excluded: Tensor, left_out: Tensor | None = None
) -> Tensor | None:
    """Offers the entries of a product but for the rows (r,) left out; returns those of the unmasked entries (k,)."""
    limits = costs_of(product.left, product.right).limits(tensor.count)
    if limits is None:
        return None
    topk, work, weight = context.topk, context.work, tensor.matrix
    assert isinstance(topk, TopK)
    least, numel = context.importance.least_gradient(topk.threshold.float(), weight), product.numel
    if left_out is not None:
        least = least.index_fill(0, left_out, torch.inf)
        numel -= left_out.numel() * weight.shape[1]
    found = screen(product.left, product.right, tensor.indices, excluded, least, limits)
    if found is None:
        work.wasted += numel
        return None
    multiplied = min(found.multiplied, numel)  # whole tiles reach beyond the product's edge
    work.screened += multiplied
    work.skipped += numel - multiplied
    if not found.indices.numel():
        return found.taken
    near = weight.take(found.indices)
    scores = context.importance.score(near.float(), found.most)
    could_win = (scores * ROUNDING_SLACK >= topk.threshold).nonzero().squeeze(1)
    if could_win.numel():
        work.verified += could_win.numel()
        candidates, grads = found.indices[could_win], found.values[could_win]
        if found.rounded:
            grads = sddmm(product.left, product.right, candidates)
        topk.offer_entries(context.importance, candidates + tensor.offset, near[could_win], grads)
    return found.taken
