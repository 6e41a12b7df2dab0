"""A streaming top-k over all tensors, which arrive one at a time: exact, and in O(k) memory.

It holds the best entries so far and a threshold, the score that an entry has to reach to join: selection costs one
comparison an entry. The winners are ordered by score, then id, whatever order the tensors came in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsify.core.importance import Importance

BLOCK_ENTRIES = 1 << 18  # compared together: small enough for a cache, large enough for a kernel launch
CUT_SHARE = 4  # a top-k is cut once it has grown by a quarter: the sooner its threshold rises, the fewer entries join
SMALLEST_CUT = 1 << 7  # and by so many entries at least: a cut is a dozen small operations


@dataclass(frozen=True)
class Winners:
    """The selected entries, best first."""

    ids: Tensor  # (n,) int64, global; -1 in the last places where there were fewer, and only the device knows how many
    grads: Tensor  # (n,) their gradients; the scores where these do not come from gradients
    weights: Tensor | None = None  # (n,) their weights, where the selection has read them

    def first(self, number: int) -> Winners:
        """Returns the best ``number`` of them."""
        weights = None if self.weights is None else self.weights[:number]
        return Winners(self.ids[:number], self.grads[:number], weights)


class TopK:
    """The best ``size`` (at least 1) of all entries offered so far.

    ``threshold`` is the score that an entry has to reach, at first any; ``finite`` whether all gradients were finite.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.size = size
        self.threshold = torch.full((), -torch.inf, dtype=dtype, device=device)
        self.finite = torch.ones((), dtype=torch.bool, device=device)
        none = torch.empty(0, dtype=dtype, device=device)
        # ids, scores, gradients, weights
        self._best: list[Tensor] = [torch.empty(0, dtype=torch.int64, device=device), none, none, none]
        self._waiting: list[tuple[Tensor, ...]] = []
        self._num_waiting = 0

    def offer(
        self, importance: Importance, weight: Tensor, grad: Tensor, rows: Tensor | None, offset: int,
        ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Offers the entries of a weight, or of several small ones, whose gradient is not zero.

        The gradient (n, cols) is that of the weight's ``rows`` (n,), of all where these are ``None``. The global ids
        (n * cols,) follow from the offset, that of the first entry, where ``ids`` is ``None``.
        """
        cols = grad.shape[1]
        at_once = max(1, BLOCK_ENTRIES // max(1, cols))
        for first in range(0, grad.shape[0], at_once):
            some = slice(first, first + at_once)
            block, touched = grad[some], weight[some if rows is None else rows[some]]
            size, least = block.abs(), importance.least_gradient(self.threshold.to(grad.device), touched)
            self.finite &= size.amax().isfinite().to(self.finite.device)
            found = (size >= least[:, None]).reshape(-1).nonzero().squeeze(1)
            if found.numel():
                row, column = found.div(cols, rounding_mode="floor") + first, found % cols
                places = (row if rows is None else rows[row]) * cols + column
                own = places + offset if ids is None else ids[places]
                self.offer_entries(importance, own, touched.take(found), block.take(found))

    def offer_entries(self, importance: Importance, ids: Tensor, weight: Tensor, grad: Tensor) -> None:
        """Offers those of some entries (n,) that reach the threshold and whose gradient is not zero."""
        grad = at_least_float32(grad)
        weight = at_least_float32(weight)
        scores = importance.score(weight, grad)
        keep = (scores >= self.threshold.to(scores.device, scores.dtype)) & (scores > 0)
        if not importance.monotone:  # then a gradient of zero may score
            keep &= grad != 0
        self.add(ids[keep], scores[keep], grad[keep], weight[keep])

    def add(self, ids: Tensor, scores: Tensor, grads: Tensor, weights: Tensor) -> None:
        """Offers entries (n,); those with a score that is not finite are refused."""
        finite, numbers = scores.isfinite(), [scores, grads, weights]
        if not finite.all():
            ids, numbers = ids[finite], [own[finite] for own in numbers]
        self._waiting.append((ids.to(self.threshold.device), *[own.to(self.threshold) for own in numbers]))
        self._num_waiting += ids.numel()
        missing = self.size - self._best[0].numel()
        if self._num_waiting >= (missing or max(self.size // CUT_SHARE, SMALLEST_CUT)):
            self.cut()

    def winners(self) -> Winners:
        """Returns the best entries, highest score first, equal scores by ascending id."""
        self.cut()
        ids, scores, grads, weights = self._best
        order = best_first(ids, scores)
        return Winners(ids[order], grads[order], weights[order])

    def best(self) -> list[Tensor]:
        """Returns ids, scores, gradients and weights (size,) each, in no order; all are 0 where there are too few."""
        self.cut()
        return [torch.nn.functional.pad(part, (0, self.size - part.numel())) for part in self._best]

    def cut(self) -> None:
        """Takes in the entries that wait and keeps the ``size`` best."""
        self._best = list(map(torch.cat, zip(self._best, *self._waiting, strict=True)))
        self._waiting, self._num_waiting = [], 0
        ids, scores, *_ = self._best
        if scores.numel() >= self.size:
            # kthvalue is not deterministic on a GPU
            self.threshold = scores.topk(self.size, sorted=False).values.amin()
            above = (scores > self.threshold).nonzero().squeeze(1)
            level = (scores == self.threshold).nonzero().squeeze(1)
            level = level[ids[level].argsort()[: self.size - above.numel()]]
            kept = torch.cat([above, level])
            self._best = [own[kept] for own in self._best]


def best_first(ids: Tensor, scores: Tensor) -> Tensor:
    """Returns the places (n,) of some entries (n,), highest score first, equal scores by ascending id."""
    by_id = ids.argsort()
    return by_id[scores[by_id].argsort(descending=True, stable=True)]


def at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
