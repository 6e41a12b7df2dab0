"""Finding a linear layer's candidates without its full-precision gradient: screen in bfloat16, verify in float32.

The product left^T right in bfloat16 costs half of float32's or less where the CPU has units for it. Its error is
bounded entry by entry, so every entry that could reach the pool's floor is kept; only those few are computed in
float32. The pool sees what the full product would have shown it.

The bound: with u = 2^-8 the rounding of a factor or of a result, sum |l r| <= |l_i| |r_j| (Cauchy-Schwarz), and so

    |product - rounded product| <= |l_i| |r_j| (2u + u)      + the float32 accumulation over n tokens, n 2^-23
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.importance import ROUNDING_SLACK, GradientImportance
from sparsify.masked.product import DOT_COST, Product
from sparsify.selection import BLOCK_ENTRIES, Pool

SMALLEST_SCREENED = 1 << 16  # entries; below, the full product is as fast
SMALLEST_FLOOR = 1e-20  # a lower floor is too near the numbers that bfloat16 units flush to zero
ROUNDING = 1.02 * 3 * 2.0**-8


def can_screen(product: Product, importance: GradientImportance, pool: Pool, num_unmasked: int) -> bool:
    """Whether screening is exact for this product and cheaper than multiplying it out.

    Args:
        product: the gradient.
        importance: has to grow with abs(grad).
        pool: has to be full, so that there is a floor to screen by.
        num_unmasked: entries whose gradient is computed as dot products beside the screen.
    """
    return (
        product.left.device.type == "cpu"
        and product.left.dtype == torch.float32
        and importance.monotone
        and product.numel >= SMALLEST_SCREENED
        and num_unmasked * DOT_COST < 0.4 * product.numel
        and _has_bfloat16_units()
        and float(pool.floor) > SMALLEST_FLOOR
    )


def offer_screened(
    pool: Pool, importance: GradientImportance, weight: Tensor, product: Product, unmasked: Tensor, offset: int
) -> bool:
    """Offers the masked entries of a product that can reach the pool's floor.

    Args:
        pool: takes the candidates.
        importance: scores them.
        weight: (rows, cols).
        product: the gradient.
        unmasked: (k,) flat indices that are no candidates.
        offset: global id of the tensor's first entry.

    Returns:
        False where the screen found too many to verify, or numbers that are not finite; nothing was offered then.
    """
    candidates = _candidates(pool, importance, weight, product)
    if candidates is None or candidates.numel() * DOT_COST > 0.5 * product.numel:
        return False
    candidates = candidates[torch.isin(candidates, unmasked, invert=True)]
    grads = product.take(candidates)
    if not grads.isfinite().all():
        return False
    scores = importance.score(weight.take(candidates), grads)
    keep = (scores >= pool.floor.to(scores.dtype)) & (scores > 0)
    pool.add(candidates[keep] + offset, scores[keep], grads[keep])
    return True


def _candidates(pool: Pool, importance: GradientImportance, weight: Tensor, product: Product) -> Tensor | None:
    """Flat indices of all entries that can reach the floor; ``None`` where the rounded product is not finite."""
    left, right = product.left, product.right
    rounded = left.bfloat16().t() @ right.bfloat16()  # (rows, cols)
    rounding = ROUNDING + left.shape[0] * 2.0**-23
    left_norm = left.square().sum(dim=0).sqrt() * rounding  # (rows,)
    right_norm = right.square().sum(dim=0).sqrt()  # (cols,)
    largest = torch.maximum(rounded.amax(dim=1), -rounded.amin(dim=1)).float()
    reach = largest + left_norm * right_norm.max()
    if not reach.isfinite().all():
        return None
    near = (importance.bound(reach, weight) >= pool.floor).nonzero().squeeze(1)
    found = []
    cols = product.shape[1]
    for block in near.split(max(1, BLOCK_ENTRIES // cols)):
        most = rounded[block].float().abs_().addcmul_(left_norm[block, None], right_norm)  # no entry is larger
        row, col = (importance.score(weight[block], most) * ROUNDING_SLACK >= pool.floor).nonzero(as_tuple=True)
        found.append(block[row] * cols + col)
    return torch.cat(found) if found else near


def _has_bfloat16_units() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32 (AVX512-BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
