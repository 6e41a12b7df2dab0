"""A streaming selector for a GPU, which waits for it once in a step and not at every tensor.

How many entries reach the threshold is known on the device only. So a tensor is offered a part at a time, none larger than
the room that is left in any case, and whenever the host cannot be sure of enough room the device is told to cut: it
does, or leaves it, by numbers of its own. No candidate can be lost, and the winners are those of
:class:`sparsify.selection.topk.TopK`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.kernels.candidates import Candidates, best_first
from sparsify.kernels.select import cut, select
from sparsify.masked.tensor import Gradient, MaskedTensor
from sparsify.selection.context import Work
from sparsify.selection.topk import Winners
from sparsify.strategies.importance import GradientImportance

SMALLEST_CUT = 1 << 12  # candidates beyond the best that are cheaper to keep than to cut
FEWEST_AT_ONCE = 1 << 14  # entries in the first part of a step: the sooner there is a threshold, the fewer pass
MOST_AT_ONCE = 1 << 20  # entries in a part; as many can be candidates before there is a cut, at 16 bytes each


class DeviceTopK:
    """The best ``size`` of all entries result so far, on their device.

    Args:
        size: how many entries to keep, at least 1.
        total: number of entries of the model.
        dtype: of the scores.
        device: of the entries and the topk.
    """

    def __init__(self, size: int, total: int, dtype: torch.dtype, device: torch.device) -> None:
        self._size = size
        self._limit = size + max(size, SMALLEST_CUT)  # candidates that may stay for now
        self._candidates = Candidates(self._limit + min(total, MOST_AT_ONCE), total, dtype, device)
        self._most = 0  # there are no more candidates than this
        self._seen = 0  # entries result so far

    @property
    def finite(self) -> Tensor:
        """Bool scalar: whether all gradients so far were finite."""
        return self._candidates.finite[0]

    def offer(
        self, importance: GradientImportance, weight: Tensor, grad: Tensor, rows: Tensor | None, offset: int
    ) -> None:
        """Offers the entries of one tensor whose gradient is not zero; as :func:`sparsify.kernels.select.select`."""
        start, end = 0, grad.numel()
        while start < end:
            room = min(MOST_AT_ONCE, max(FEWEST_AT_ONCE, self._seen))  # beyond the limit
            part = min(end - start, room)
            if self._most + part > self._limit + room:
                cut(self._candidates, self._size, self._limit)
                self._most = self._limit
            select(self._candidates, importance, weight, grad, rows, offset, start, start + part)
            start += part
            self._most += part
            self._seen += part

    def best(self) -> tuple[Tensor, Tensor, Tensor]:
        """(n,) each, in no order: ids, scores and gradients of the best; where there are too few, scores are 0."""
        candidates = self._candidates
        cut(candidates, self._size, self._size)
        self._most = min(self._most, self._size)
        scores = candidates.scores.where(candidates.held, 0)
        return candidates.ids[: self._size], scores[: self._size], candidates.grads[: self._size]


class DeviceSelector:
    """The best masked entries by their gradients, whichever GPUs these are on.

    Args:
        size: how many are wanted, at least 1.
        total: number of entries of the model.
        importance: scores the entries.
        like: the flat gradient, for its dtype and device.
        work: is added to.
        masked_only: whether entries that are unmasked already are no candidates.
    """

    offer_small = None

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
        self._pools: dict[torch.device, DeviceTopK] = {}

    def wants(self, tensor: MaskedTensor) -> bool:
        return True

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        gradient = gradient.dense()
        self._work.dense += gradient.numel
        unmasked = gradient.take(tensor.indices)
        excluded = tensor.not_candidates if self._masked_only else tensor.never_candidates
        if excluded.numel():
            gradient.clear(excluded)  # an entry whose gradient is zero is never a candidate
        device = gradient.values.device
        if device not in self._pools:
            self._pools[device] = DeviceTopK(self._size, self._total, self._dtype, device)
        weight = tensor.matrix
        self._pools[device].offer(self._importance, weight, gradient.values, gradient.rows, tensor.offset)
        return unmasked

    def skip(self, tensor: MaskedTensor) -> None:
        """No token came by, so nothing can be chosen."""

    def winners(self) -> Winners:
        best = [[part.to(self._device) for part in topk.best()] for topk in self._pools.values()]
        if not best:
            nothing = torch.empty(0, dtype=self._dtype, device=self._device)
            return Winners(nothing.long(), nothing)
        ids, scores, grads = map(torch.cat, zip(*best, strict=True))
        order = best_first(ids, scores)[: min(self._size, int((scores > 0).sum()))]
        return Winners(ids[order], grads[order])

    def finite(self) -> list[Tensor]:
        return [topk.finite.to(self._device) for topk in self._pools.values()]
