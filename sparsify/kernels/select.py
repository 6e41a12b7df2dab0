"""Candidates for a selection, gathered on their device without the host ever knowing how many there are.

    select   of some entries of a tensor, those that reach the threshold join the candidates
    cut      where there are many by now, the best stay and the threshold rises

What is selected are the entries with the highest score and, among equal ones, the lowest id, whatever order they came
in: :class:`sparsify.selection.topk.TopK`'s order. Before ``select`` there has to be room for every entry that it is
given; the caller makes it, with numbers that the host knows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.kernels import has_triton
from sparsify.kernels.candidates import Candidates
from sparsify.strategies.importance import D3, GradientImportance

SHORT = (torch.float32, torch.bfloat16, torch.float16)  # what the Triton form computes with, in float32
MOST_CUT = 1 << 22  # candidates; beyond, sorting them on the whole GPU is faster than one program's loop over them


def select(
    candidates: Candidates,
    importance: GradientImportance,
    weight: Tensor,
    grad: Tensor,
    rows: Tensor | None,
    offset: int,
    start: int,
    stop: int,
) -> None:
    """Entries whose gradient is not zero, and whose score is finite, above 0 and at or above the threshold, join.

    Args:
        candidates: with room for ``stop - start`` more.
        importance: scores the entries.
        weight: (n_rows, cols), the whole tensor.
        grad: (n, cols), the gradient of all rows, or of some.
        rows: (n,) int64, which rows of the weight ``grad`` is about; ``None`` for all of them, in order.
        offset: global id of the tensor's first entry.
        start: the first entry of ``grad``, flat, to look at.
        stop: the one after the last.
    """
    short = weight.dtype in SHORT and grad.dtype in SHORT and candidates.scores.dtype == torch.float32
    if has_triton(grad.device) and type(importance) is D3 and short:
        from sparsify.kernels.triton.select import select_d3

        select_d3(candidates, importance.exp, importance.eps, weight, grad, rows, offset, start, stop)
        return
    plain_select(candidates, importance, weight, grad, rows, offset, start, stop)


def cut(candidates: Candidates, size: int, limit: int) -> None:
    """Where there are more than ``limit`` candidates, the ``size`` best stay and the worst of them is the threshold.

    Args:
        candidates: those so far.
        size: how many are wanted, at least 1 and at most ``limit``.
        limit: at most the room.
    """
    if has_triton(candidates.ids.device) and candidates.scores.dtype == torch.float32 and candidates.room <= MOST_CUT:
        from sparsify.kernels.triton.select import cut as fused_cut

        fused_cut(candidates, size, limit)
        return
    plain_cut(candidates, size, limit)


def plain_select(
    candidates: Candidates,
    importance: GradientImportance,
    weight: Tensor,
    grad: Tensor,
    rows: Tensor | None,
    offset: int,
    start: int,
    stop: int,
) -> None:
    """The plain torch form of :func:`select`."""
    own = _at_least_float32(grad.reshape(-1)[start:stop])
    places = torch.arange(start, stop, device=grad.device)  # flat in the weight
    if rows is not None:
        cols = grad.shape[1]
        places = rows[places // cols] * cols + places % cols
    scores = importance.score(_at_least_float32(weight.take(places)), own).to(candidates.threshold)
    keep = (scores >= candidates.threshold) & (scores > 0) & scores.isfinite() & (own != 0)
    position = torch.where(keep, candidates.count + keep.cumsum(0) - 1, candidates.room)
    for kept, new in ((candidates.ids, places + offset), (candidates.scores, scores), (candidates.grads, own)):
        kept.index_put_((position,), new.to(kept))
    candidates.count += keep.sum()
    candidates.finite &= own.isfinite().all()


def plain_cut(candidates: Candidates, size: int, limit: int) -> None:
    """The plain torch form of :func:`cut`."""
    due = candidates.count > limit
    order = candidates.order()
    worst = candidates.scores[order[size - 1 : size]]  # (1,): a scalar index would wait for the device
    order = torch.where(due, order, torch.arange(candidates.room + 1, device=order.device))
    for kept in (candidates.ids, candidates.scores, candidates.grads):
        kept.copy_(kept[order])
    candidates.threshold.copy_(torch.where(due, worst, candidates.threshold))
    candidates.count.copy_(torch.where(due, size, candidates.count))


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
