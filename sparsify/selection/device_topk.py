"""A streaming selector for a GPU, which waits for the GPU once in a step and not at every tensor.

Only the device knows how many entries reach the threshold. So a tensor is offered in parts, none larger than the places
that are free in any case. Where the host cannot be sure of enough free places, it launches a cut, which the device
carries out if its own count calls for one. No candidate can be lost, and the winners are those of
:class:`sparsify.selection.topk.TopK`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.kernels.candidates import Candidates, Part, best_first
from sparsify.kernels.select import cut, select
from sparsify.masked.gradients import Gradient
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.context import Work
from sparsify.selection.selectors import Selector
from sparsify.selection.topk import Winners
from sparsify.strategies.importance import GradientImportance

SMALLEST_CUT = 1 << 12  # candidates beyond the best that are cheaper to keep than to cut
FEWEST_AT_ONCE = 1 << 14  # entries in a step's first part: the sooner there is a threshold, the fewer entries join
MOST_AT_ONCE = 1 << 20  # entries in a part, all of which may become candidates, at 16 bytes each


class DeviceTopK:
    """The best ``size`` of all entries offered so far, on their device.

    Args:
        size: how many entries to keep, at least 1.
        total: number of entries of the model.
        dtype: of the scores.
        device: of the entries and the top-k.
    """

    def __init__(self, size: int, total: int, dtype: torch.dtype, device: torch.device) -> None:
        self._size = size
        self._limit = size + max(size, SMALLEST_CUT)  # candidates that may stay until a cut
        self._candidates = Candidates(self._limit + min(total, MOST_AT_ONCE), total, dtype, device)
        self._most = 0  # an upper bound of the number of candidates
        self._seen = 0  # entries offered so far

    @property
    def finite(self) -> Tensor:
        """Bool scalar: whether all gradients so far were finite."""
        return self._candidates.finite[0]

    def offer(
        self, importance: GradientImportance, weight: Tensor, grad: Tensor, rows: Tensor | None, offset: int
    ) -> None:
        """Offers the entries of one tensor; see :func:`sparsify.selection.topk.offer_gradient`."""
        start, end = 0, grad.numel()
        while start < end:
            at_once = min(MOST_AT_ONCE, max(FEWEST_AT_ONCE, self._seen))
            number = min(end - start, at_once)
            if self._most + number > self._limit + at_once:
                cut(self._candidates, self._size, self._limit)
                self._most = self._limit
            select(self._candidates, importance, Part(weight, grad, rows, offset, start, start + number))
            start += number
            self._most += number
            self._seen += number

    def best(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ids, scores and gradients (size,) of the best, in no order; scores are 0 where there are too few."""
        candidates = self._candidates
        cut(candidates, self._size, self._size)
        self._most = min(self._most, self._size)
        scores = candidates.scores.where(candidates.held, 0)
        return candidates.ids[: self._size], scores[: self._size], candidates.grads[: self._size]


class DeviceSelector(Selector):
    """Selects the best entries by their gradients, on one or several GPUs.

    Args:
        size: how many entries to select, at least 1.
        total: number of entries of the model.
        importance: scores the entries.
        like: the flat gradient, for its dtype and device.
        work: counts the entries.
        masked_only: whether unmasked entries are no candidates.
    """

    def __init__(
        self, size: int, total: int, importance: GradientImportance, like: Tensor, work: Work, *, masked_only: bool
    ) -> None:
        self._size = size
        self._total = total
        self._importance = importance
        self._dtype = like.dtype
        self._device = like.device
        self._work = work
        self._masked_only = masked_only
        self._topks: dict[torch.device, DeviceTopK] = {}

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        gradient = gradient.dense()
        self._work.dense += gradient.numel
        unmasked = gradient.take(tensor.indices)
        excluded = tensor.not_candidates if self._masked_only else tensor.never_candidates
        if excluded.numel():
            gradient.clear(excluded)  # an entry whose gradient is zero is never a candidate
        device = gradient.values.device
        if device not in self._topks:
            self._topks[device] = DeviceTopK(self._size, self._total, self._dtype, device)
        weight = tensor.matrix
        self._topks[device].offer(self._importance, weight, gradient.values, gradient.rows, tensor.offset)
        return unmasked

    def winners(self) -> Winners:
        best = [[part.to(self._device) for part in topk.best()] for topk in self._topks.values()]
        if not best:
            nothing = torch.empty(0, dtype=self._dtype, device=self._device)
            return Winners(nothing.long(), nothing)
        ids, scores, grads = map(torch.cat, zip(*best, strict=True))
        order = best_first(ids, scores)[: min(self._size, int((scores > 0).sum()))]
        return Winners(ids[order], grads[order])

    def finite(self) -> list[Tensor]:
        return [topk.finite.to(self._device) for topk in self._topks.values()]
