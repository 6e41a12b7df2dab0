"""Finding a linear layer's candidates without its full-precision gradient: screen in bfloat16, verify in float32.

The product left^T right in bfloat16 costs a fraction of float32's where the CPU has units for it. Every entry that
could reach the pool's floor by the error bound (``kernels/survey.py``) and by its weight is computed in float32, and
there are few: the pool sees what the full product would have shown it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.costs import costs_of
from sparsify.counters import Work
from sparsify.importance import ROUNDING_SLACK, GradientImportance
from sparsify.kernels.sddmm import sddmm
from sparsify.kernels.survey import has_bfloat16_units, survey
from sparsify.masked.product import Product
from sparsify.masked.tensor import Gradient, MaskedTensor
from sparsify.masked.tied import TiedGradient
from sparsify.selection import Pool, offer_entries, offer_gradient

SMALLEST_SCREENED = 1 << 16  # entries; below, the full product is as fast


def can_screen(gradient: Gradient, importance: GradientImportance, pool: Pool) -> bool:
    """Whether a gradient can be screened, and a screen is likely to be faster than the full product.

    Args:
        gradient: has to be a product, not multiplied out yet.
        importance: has to grow with abs(grad).
        pool: has to be full, so that there is a floor to screen by.
    """
    return (
        isinstance(gradient, Product)
        and gradient.left.device.type == "cpu"
        and gradient.left.dtype in (torch.float32, torch.bfloat16)
        and importance.monotone
        and gradient.numel >= SMALLEST_SCREENED
        and has_bfloat16_units()
        and pool.has_floor
        and costs_of(gradient.left, gradient.right).room() > 0
    )


def offer_screened(
    pool: Pool,
    importance: GradientImportance,
    tensor: MaskedTensor,
    product: Product,
    excluded: Tensor,
    work: Work,
    left_out: Tensor | None = None,
) -> Tensor | None:
    """Offers the entries of a product that can reach the pool's floor.

    Args:
        pool: takes the candidates.
        importance: scores them.
        tensor: whose gradient it is.
        product: the gradient.
        excluded: (e,) flat indices that are no candidates.
        work: is added to.
        left_out: (r,) rows of which no entry is offered.

    Returns:
        The gradient (k,) of the tensor's unmasked entries, finite; ``None`` where a screen would be slower than the
        full product, or found too many to verify, or where not everything might be finite: nothing was offered then.
    """
    room = costs_of(product.left, product.right).room(tensor.count)
    if not room:
        return None
    weight = tensor.matrix
    least, numel = importance.least_gradient(pool.floor.float(), weight), product.numel
    if left_out is not None:
        least = least.index_fill(0, left_out, torch.inf)
        numel -= left_out.numel() * weight.shape[1]
    found = survey(product.left, product.right, tensor.indices, excluded, least, room=room)
    if found is None:
        work.vain += numel
        return None
    product.left_sum = found.left_sum.to(product.left.dtype)
    multiplied = min(found.multiplied, numel)  # whole tiles, beyond the product's edge
    work.screened += multiplied
    work.skipped += numel - multiplied
    if found.indices.numel():
        near = weight.take(found.indices)
        reach = (importance.score(near.float(), found.most) * ROUNDING_SLACK >= pool.floor).nonzero().squeeze(1)
        if reach.numel():
            work.verified += reach.numel()
            candidates = found.indices[reach]
            grads = sddmm(product.left, product.right, candidates)
            offer_entries(pool, importance, candidates + tensor.offset, near[reach], grads)
    return found.taken


def offer_tied(
    pool: Pool,
    importance: GradientImportance,
    tensor: MaskedTensor,
    gradient: TiedGradient,
    excluded: Tensor,
    work: Work,
) -> tuple[Tensor, Tensor] | None:
    """Likewise for a table's gradient: where no row was looked up its product is screened, the other rows are made.

    Returns:
        The gradient (k,) of the tensor's unmasked entries, and a bool scalar: whether the others of the rows that were
        made are finite. ``None`` as of :func:`offer_screened`.
    """
    product, looked_up = gradient.product, gradient.looked_up
    assert isinstance(product, Product)
    assert looked_up.rows is not None
    taken = offer_screened(pool, importance, tensor, product, excluded, work, left_out=looked_up.rows)
    if taken is None:
        return None
    values = product.left[:, looked_up.rows].t() @ product.right + looked_up.values
    made = Gradient(values, looked_up.rows)
    work.multiplied += made.numel
    if excluded.numel():
        made.clear(excluded)  # an entry whose gradient is zero is never offered
    finite = offer_gradient(pool, importance, tensor.matrix, made.values, made.rows, tensor.offset)
    return taken + looked_up.take(tensor.indices), finite
