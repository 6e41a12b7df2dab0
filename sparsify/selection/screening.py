"""Finds a linear layer's candidates without computing all of its gradient.

The norms of the factors left and right rule out most of the product left^T right (``kernels/norm_bound.py``). The rest
is multiplied, and the entries that reach the top-k's threshold are offered to it: the top-k sees what the full product
would have shown it, summed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.core.gradients import DenseGradient, Gradient, Product, TiedGradient
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import TopK
from sparsify.kernels.costs import SCREENED, costs_of
from sparsify.kernels.norm_bound import size_of, staircase
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
        if gradient.numel > MOST_MULTIPLIED:
            return _scan_blocks(context, tensor, gradient, excluded), gradient
    elif can_screen(context, gradient):
        unmasked = scan_screened(context, tensor, gradient, excluded)
        if unmasked is not None:
            return unmasked, gradient
    return scan_dense(context, tensor, gradient, excluded)


def _scan_blocks(
    context: SelectionContext, tensor: MaskedTensor, gradient: Product | TiedGradient, excluded: Tensor
) -> Tensor:
    """Offers the entries of a product on a GPU, multiplied out in blocks of rows."""
    topk, (height, cols) = context.topk, tensor.matrix_shape
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
        and product.left.dtype in SCREENED
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
        The gradient of the unmasked entries (k,); ``None`` where screening costs more than the full product, or where
        not everything might be finite: nothing was offered then.
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
    left, right, topk, work = product.left, product.right, context.topk, context.work
    most = costs_of(left, right).most_screened(tensor.count)
    if not most:
        return None
    assert isinstance(topk, TopK)
    least, numel = context.importance.least_gradient(topk.threshold.float(), tensor.matrix), product.numel
    if left_out is not None:
        least = least.index_fill(0, left_out, torch.inf)
        numel -= left_out.numel() * right.shape[1]
    steps = staircase(left, right, least, most)
    if steps is None:
        return None
    work.screened += size_of(steps)
    work.skipped += numel - size_of(steps)
    if steps:
        right_part = right.index_select(1, steps[0][1]).float()
    for rows, columns in steps:
        grads = left.index_select(1, rows).float().t() @ right_part[:, : columns.numel()]
        _offer_step(context, tensor, grads, least, rows, columns, excluded)
    return sddmm(left, right, tensor.indices)


def _offer_step(
    context: SelectionContext, tensor: MaskedTensor, grads: Tensor, least: Tensor, rows: Tensor, columns: Tensor,
    excluded: Tensor,
) -> None:  # fmt: skip
    """Offers the entries of a gradient (r, c) at some rows (r,) and columns (c,) that reach their row's threshold."""
    topk = context.topk
    assert isinstance(topk, TopK)
    row, column = (grads.abs() >= least[rows][:, None]).nonzero(as_tuple=True)
    indices = rows[row] * tensor.matrix_shape[1] + columns[column]
    kept = torch.isin(indices, excluded, invert=True)
    indices = indices[kept]
    if indices.numel():
        weights, grads = tensor.matrix.take(indices), grads[row[kept], column[kept]]
        topk.offer_entries(context.importance, indices + tensor.offset, weights, grads)
