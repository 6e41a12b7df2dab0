"""A streaming top-k for GPUs, which waits for them once in a step and not at every tensor.

Only the device knows how many entries reach the threshold, and the host counts as if all of them did. Where by its
count the candidates could be too many, it launches a cut, which the device carries out if its own count calls for one.
A step's first parts are small: the sooner there is a threshold, the fewer entries join.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.core.importance import Importance
from sparsify.core.topk import Winners, best_first
from sparsify.kernels.candidates import Candidates, Part
from sparsify.kernels.select import cut, may_overflow, select

SMALLEST_CUT = 1 << 12  # candidates beyond the best that are cheaper to keep than to cut
FEWEST_AT_ONCE = 1 << 14  # entries in a step's first part
MOST_AT_ONCE = 1 << 20  # entries in a part, all of which may become candidates, at 20 bytes each


class ScoredEntries(NamedTuple):
    """Some entries; those with a score of 0 are none, and their other attributes mean nothing."""

    ids: Tensor  # (n,) int64, global
    scores: Tensor  # (n,)
    grads: Tensor  # (n,)
    weights: Tensor  # (n,)

    def best(self, number: int) -> ScoredEntries:
        """Returns the best of them, highest score first, equal scores by ascending id."""
        order = best_first(self.ids, self.scores)[:number]
        return ScoredEntries(*(array[order] for array in self))

    def winners(self) -> Winners:
        return Winners(self.ids.where(self.scores > 0, -1), self.grads, self.weights)


class _Held:
    """The candidates on one device, and what the host knows of them."""

    def __init__(self, size: int, total: int, dtype: torch.dtype, device: torch.device) -> None:
        limit = size + max(size, SMALLEST_CUT)  # candidates that may stay until a cut
        self.candidates = Candidates(size, limit, limit + min(total, MOST_AT_ONCE), total, dtype, device)
        self._most = 0  # an upper bound of their number
        self._seen = 0  # entries offered so far
        self._is_cut = False  # whether none was offered since the last cut

    def offer(self, importance: Importance, whole: Part) -> None:
        """Offers the entries of one tensor in parts."""
        most_at_once = whole.stop if may_overflow(self.candidates, importance, whole) else MOST_AT_ONCE
        start = 0
        while start < whole.stop:
            number = min(whole.stop - start, most_at_once, max(FEWEST_AT_ONCE, self._seen))
            self._offer(importance, whole._replace(start=start, stop=start + number))
            start += number

    def _offer(self, importance: Importance, part: Part) -> None:
        candidates, number = self.candidates, part.stop - part.start
        expected = candidates.limit + min(MOST_AT_ONCE, max(FEWEST_AT_ONCE, self._seen))
        if self._most + number > min(expected, candidates.capacity) and not self._is_cut:
            self._cut(candidates.limit)
        overflows = self._most + number > candidates.capacity
        select(candidates, importance, part, overflows=overflows)
        self._most = candidates.limit if overflows else self._most + number
        self._seen += number
        self._is_cut = overflows

    def _cut(self, limit: int) -> None:
        cut(self.candidates, limit)
        self._most, self._is_cut = min(self._most, limit), True

    def best(self) -> ScoredEntries:
        """Returns the best (size,), in no order."""
        size = self.candidates.size
        self._cut(size)
        ids, scores, grads, weights = (array[:size] for array in self.candidates.arrays)
        return ScoredEntries(ids, scores.where(self.candidates.held[:size], 0), grads, weights)


class DeviceTopK:
    """The best ``size`` of all entries of a model, of which there are ``total``, kept on the devices they came from.

    The scores have a ``dtype``, and the winners are those of :class:`sparsify.core.topk.TopK`, on a ``device``.
    """

    def __init__(self, size: int, total: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.dtype, self._settings = size, dtype, (size, total, dtype)
        self._held = {device: _Held(*self._settings, device)}  # that of the winners first

    @property
    def finite(self) -> Tensor:
        """Bool scalar: whether all gradients so far were finite."""
        finite = (held.candidates.finite[0] for held in self._held.values())
        return reduce(lambda one, other: one & other.to(one.device), finite)

    def offer(
        self, importance: Importance, weight: Tensor, grad: Tensor, rows: Tensor | None, offset: int,
        ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Offers the entries of one tensor; see :meth:`sparsify.core.topk.TopK.offer`."""
        if grad.device not in self._held:
            self._held[grad.device] = _Held(*self._settings, grad.device)
        self._held[grad.device].offer(importance, Part(weight, grad, rows, offset, ids, 0, grad.numel()))

    def candidates(self) -> ScoredEntries:
        """Returns the entries (n,) that may be the best, at least ``size``, in no order; scores are 0 where none is."""
        best = zip(*(held.best() for held in self._held.values()), strict=True)
        return ScoredEntries(*(torch.cat([part.to(parts[0].device) for part in parts]) for parts in best))

    def winners(self) -> Winners:
        """Returns the best entries, highest score first, equal scores by ascending id; -1 where there are too few."""
        return self.candidates().best(self.size).winners()
