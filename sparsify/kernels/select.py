"""Candidates for a selection, gathered on their device without the host ever knowing how many there are.

    select   adds the entries of a part of a tensor that reach the threshold
    cut      keeps the best candidates, where there are many, and raises the threshold

The best are those with the highest score and, among equal ones, the lowest id, in whatever order they came:
:class:`sparsify.selection.topk.TopK`'s order. ``select`` needs free places for all entries that it is given; the caller
cuts in time, by numbers on the host.
"""

from __future__ import annotations

import torch

from sparsify.kernels import has_triton
from sparsify.kernels.candidates import Candidates, Part, at_least_float32
from sparsify.strategies.importance import D3, Importance

SHORT = (torch.float32, torch.bfloat16, torch.float16)  # what the Triton form computes with, in float32
MOST_CUT = 1 << 22  # candidates; beyond, sorting them on the whole GPU is faster than one program's loop over them


def select(candidates: Candidates, importance: Importance, part: Part) -> None:
    """Adds the entries whose gradient is not zero, and whose score is finite, above 0 and at or above the threshold.

    There has to be a free place for each entry of the part.
    """
    short = part.weight.dtype in SHORT and part.grad.dtype in SHORT and candidates.scores.dtype == torch.float32
    if has_triton(part.grad.device) and type(importance) is D3 and short:
        from sparsify.kernels.triton.select import select_d3

        select_d3(candidates, importance, part)
        return
    plain_select(candidates, importance, part)


def cut(candidates: Candidates, size: int, limit: int) -> None:
    """Keeps the ``size`` best of more than ``limit`` candidates, and makes the worst of these the threshold."""
    fits = candidates.scores.dtype == torch.float32 and candidates.capacity <= MOST_CUT
    if has_triton(candidates.ids.device) and fits:
        from sparsify.kernels.triton.select import cut as fused_cut

        fused_cut(candidates, size, limit)
        return
    plain_cut(candidates, size, limit)


def plain_select(candidates: Candidates, importance: Importance, part: Part) -> None:
    """The plain torch form of :func:`select`."""
    weight, grad, rows, offset, start, stop = part
    own = at_least_float32(grad.reshape(-1)[start:stop])
    places = torch.arange(start, stop, device=grad.device)  # flat in the weight
    if rows is not None:
        cols = grad.shape[1]
        places = rows[places // cols] * cols + places % cols
    scores = importance.score(at_least_float32(weight.take(places)), own).to(candidates.threshold)
    keep = (scores >= candidates.threshold) & (scores > 0) & scores.isfinite() & (own != 0)
    position = torch.where(keep, candidates.count + keep.cumsum(0) - 1, candidates.capacity)
    for kept, new in ((candidates.ids, places + offset), (candidates.scores, scores), (candidates.grads, own)):
        kept.index_put_((position,), new.to(kept))
    candidates.count += keep.sum()
    candidates.finite &= own.isfinite().all()


def plain_cut(candidates: Candidates, size: int, limit: int) -> None:
    """The plain torch form of :func:`cut`."""
    due = candidates.count > limit
    order = candidates.order()
    worst = candidates.scores[order[size - 1 : size]]  # (1,): a scalar index would wait for the device
    order = torch.where(due, order, torch.arange(candidates.capacity + 1, device=order.device))
    for kept in (candidates.ids, candidates.scores, candidates.grads):
        kept.copy_(kept[order])
    candidates.threshold.copy_(torch.where(due, worst, candidates.threshold))
    candidates.count.copy_(torch.where(due, size, candidates.count))
