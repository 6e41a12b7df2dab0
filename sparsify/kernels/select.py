"""Candidates for a selection, gathered on their device without the host ever knowing how many there are.

    select   adds the entries of a part of a tensor that reach the threshold
    cut      keeps the best candidates, where there are many, and raises the threshold

The order of the best is :class:`sparsify.core.topk.TopK`'s. ``select`` needs free places for all entries that it is
given: the caller counts as if each of them joined, and cuts in time.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.core.importance import Importance
from sparsify.core.topk import at_least_float32, best_first


class Candidates:
    """At most ``capacity`` entries, ``limit`` after a cut, with ids below ``total``, counted by the device."""

    def __init__(
        self, size: int, limit: int, capacity: int, total: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.size, self.limit, self.capacity, self.total = size, limit, capacity, total
        self.most = 0  # an upper bound of their number, for the host
        self.is_fused = False  # whether Triton's forms run
        # (capacity + 1,) each; the plain form writes entries that are not kept to the last place
        self.ids = torch.empty(capacity + 1, dtype=torch.int64, device=device)  # global
        self.scores, self.grads, self.weights = (torch.empty_like(self.ids, dtype=dtype) for _ in range(3))
        self.arrays = self.ids, self.scores, self.grads, self.weights
        # (1,) each
        self.count = torch.zeros(1, dtype=torch.int64, device=device)  # the number of candidates
        self.threshold = torch.full((1,), -torch.inf, dtype=dtype, device=device)  # the score that is needed to join
        self.finite = torch.ones(1, dtype=torch.bool, device=device)  # whether all gradients so far were finite

    @property
    def held(self) -> Tensor:
        """(capacity + 1,) bool: which places have a candidate."""
        return torch.arange(self.capacity + 1, device=self.count.device) < self.count


class Part(NamedTuple):
    """Consecutive entries of the gradient of one tensor, or of several small ones."""

    weight: Tensor  # (n_rows, cols), the whole tensor
    grad: Tensor  # (n, cols), the gradient of all rows, or some
    rows: Tensor | None  # (n,) int64, the weight's rows that grad has; None for all of them in order
    offset: int  # global id of the tensor's first entry
    ids: Tensor | None  # (n * cols,) int64, the entries' global ids; None where they follow from the offset
    start: int  # the first entry of the part, flat in grad
    stop: int  # the one after the last


def plain_select(candidates: Candidates, importance: Importance, part: Part) -> None:
    """Adds the entries whose gradient is not zero, and whose score is finite, above 0 and at or above the threshold."""
    weight, grad, rows, offset, ids, start, stop = part
    own = at_least_float32(grad.reshape(-1)[start:stop])
    places = torch.arange(start, stop, device=grad.device)  # flat in the weight
    if rows is not None:
        cols = grad.shape[1]
        places = rows[places // cols] * cols + places % cols
    weights = at_least_float32(weight.take(places))
    scores = importance.score(weights, own).to(candidates.threshold)
    keep = (scores >= candidates.threshold) & (scores > 0) & scores.isfinite() & (own != 0)
    position = torch.where(keep, candidates.count + keep.cumsum(0) - 1, candidates.capacity)
    new_ids = places + offset if ids is None else ids[start:stop]
    for kept, new in zip(candidates.arrays, (new_ids, scores, own, weights), strict=True):
        kept.index_put_((position,), new.to(kept))
    candidates.count += keep.sum()
    candidates.finite &= own.isfinite().all()


def plain_cut(candidates: Candidates, limit: int) -> None:
    """Keeps the ``size`` best of more than ``limit`` candidates, and makes the worst of these the threshold."""
    due = candidates.count > limit
    order = best_first(candidates.ids, candidates.scores.where(candidates.held, -torch.inf))
    worst = candidates.scores[order[candidates.size - 1 : candidates.size]]  # (1,): an int would wait for the device
    order = torch.where(due, order, torch.arange(candidates.capacity + 1, device=order.device))
    for kept in candidates.arrays:
        kept.copy_(kept[order])
    candidates.threshold.copy_(torch.where(due, worst, candidates.threshold))
    candidates.count.masked_fill_(due, candidates.size)
