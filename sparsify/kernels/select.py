"""Candidates for a selection, gathered on their device without the host ever knowing how many there are.

    select   adds the entries of a part of a tensor that reach the threshold
    cut      keeps the best candidates, where there are many, and raises the threshold

The order of the best is :class:`sparsify.core.topk.TopK`'s. ``select`` needs free places for all entries that it is
given: the caller counts as if each of them joined, and cuts in time. The Triton form can do with fewer.
"""

from __future__ import annotations

import torch

from sparsify.core.importance import D3, Importance
from sparsify.core.topk import at_least_float32, best_first
from sparsify.kernels import has_triton
from sparsify.kernels.candidates import Candidates, Part
from sparsify.kernels.sddmm import SHORT

MOST_CUT = 1 << 22  # candidates; beyond, sorting them on the whole GPU is faster than one program's loop over them


def may_overflow(candidates: Candidates, importance: Importance, part: Part) -> bool:
    """Whether :func:`select` takes a part with more entries than there are free places."""
    return _has_fused_select(candidates, importance, part) and _has_fused_cut(candidates)


def select(candidates: Candidates, importance: Importance, part: Part, *, overflows: bool = False) -> None:
    """Adds the entries whose gradient is not zero, and whose score is finite, above 0 and at or above the threshold.

    Args:
        candidates: with a free place for each entry of the part, unless ``overflows``.
        importance: scores the entries.
        part: the entries.
        overflows: whether places may run out (:func:`may_overflow`). The call before was a :func:`cut`, or of this
            kind; afterwards there are at most ``limit`` candidates, as after a cut.
    """
    if _has_fused_select(candidates, importance, part):
        from sparsify.kernels.triton.select import select_d3

        select_d3(candidates, importance, part, overflows)
    else:
        plain_select(candidates, importance, part)


def cut(candidates: Candidates, limit: int) -> None:
    """Keeps the ``size`` best of more than ``limit`` candidates, and makes the worst of these the threshold."""
    if _has_fused_cut(candidates):
        from sparsify.kernels.triton.select import cut as fused_cut

        fused_cut(candidates, limit)
    else:
        plain_cut(candidates, limit)


def plain_select(candidates: Candidates, importance: Importance, part: Part) -> None:
    """The plain torch form of :func:`select`, where the places suffice."""
    weight, grad, rows, offset, ids, start, stop = part
    own = at_least_float32(grad.reshape(-1)[start:stop])
    places = torch.arange(start, stop, device=grad.device)  # flat in the weight
    if rows is not None:
        cols = grad.shape[1]
        places = rows[places // cols] * cols + places % cols
    weights = at_least_float32(weight.take(places))
    scores = importance.score(weights, own).to(candidates.threshold)
    keep = (scores >= candidates.threshold) & (scores > 0) & scores.isfinite() & (own != 0)
    position = torch.where(keep, candidates.count[0] + keep.cumsum(0) - 1, candidates.capacity)
    new_ids = places + offset if ids is None else ids[start:stop]
    for kept, new in zip(candidates.arrays, (new_ids, scores, own, weights), strict=True):
        kept.index_put_((position,), new.to(kept))
    candidates.count[0] += keep.sum()
    candidates.finite &= own.isfinite().all()


def plain_cut(candidates: Candidates, limit: int) -> None:
    """The plain torch form of :func:`cut`."""
    size, count = candidates.size, candidates.count[0]
    due = count > limit
    order = best_first(candidates.ids, candidates.scores.where(candidates.held, -torch.inf))
    worst = candidates.scores[order[size - 1 : size]]  # (1,): a scalar index would wait for the device
    order = torch.where(due, order, torch.arange(candidates.capacity + 1, device=order.device))
    for kept in candidates.arrays:
        kept.copy_(kept[order])
    candidates.threshold.copy_(torch.where(due, worst, candidates.threshold))
    count.copy_(torch.where(due, size, count))


def _has_fused_select(candidates: Candidates, importance: Importance, part: Part) -> bool:
    short = part.weight.dtype in SHORT and part.grad.dtype in SHORT and candidates.scores.dtype == torch.float32
    return short and type(importance) is D3 and has_triton(part.grad.device)


def _has_fused_cut(candidates: Candidates) -> bool:
    short = candidates.scores.dtype == torch.float32 and candidates.capacity <= MOST_CUT
    return short and has_triton(candidates.ids.device)
