"""A streaming top-k for GPUs, which waits for them once in a step and not at every tensor.

Only the device knows how many entries reach the threshold. So a tensor is offered in parts, none larger than the places
that are free in any case. Where the host cannot be sure of enough free places, it launches a cut, which the device
carries out if its own count calls for one. No candidate can be lost, and the winners are those of
:class:`sparsify.selection.topk.TopK`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsify.kernels.candidates import Candidates, Part, best_first
from sparsify.kernels.select import cut, select
from sparsify.selection.topk import Winners
from sparsify.strategies.importance import Importance

SMALLEST_CUT = 1 << 12  # candidates beyond the best that are cheaper to keep than to cut
FEWEST_AT_ONCE = 1 << 14  # entries in a step's first part: the sooner there is a threshold, the fewer entries join
MOST_AT_ONCE = 1 << 20  # entries in a part, all of which may become candidates, at 16 bytes each


@dataclass
class _Held:
    """The candidates on one device."""

    candidates: Candidates
    most: int = 0  # an upper bound of their number
    seen: int = 0  # entries offered so far


class DeviceTopK:
    """The best ``size`` of all entries offered so far, kept on the devices that they came from.

    Args:
        size: how many entries to keep, at least 1.
        total: number of entries of the model.
        dtype: of the scores.
        device: of the winners.
    """

    def __init__(self, size: int, total: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size = size
        self._total = total
        self._dtype = dtype
        self._limit = size + max(size, SMALLEST_CUT)  # candidates that may stay until a cut
        self._held = {device: self._on(device)}  # that of the winners first

    def _on(self, device: torch.device) -> _Held:
        capacity = self._limit + min(self._total, MOST_AT_ONCE)
        return _Held(Candidates(capacity, self._total, self._dtype, device))

    @property
    def finite(self) -> Tensor:
        """Bool scalar: whether all gradients so far were finite."""
        first, *others = (held.candidates.finite[0] for held in self._held.values())
        for other in others:
            first = first & other.to(first.device)
        return first

    def offer(self, importance: Importance, weight: Tensor, grad: Tensor, rows: Tensor | None, offset: int) -> None:
        """Offers the entries of one tensor; see :meth:`sparsify.selection.topk.TopK.offer`."""
        if grad.device not in self._held:
            self._held[grad.device] = self._on(grad.device)
        held = self._held[grad.device]
        start, end = 0, grad.numel()
        while start < end:
            at_once = min(MOST_AT_ONCE, max(FEWEST_AT_ONCE, held.seen))
            number = min(end - start, at_once)
            if held.most + number > self._limit + at_once:
                cut(held.candidates, self.size, self._limit)
                held.most = self._limit
            select(held.candidates, importance, Part(weight, grad, rows, offset, start, start + number))
            start += number
            held.most += number
            held.seen += number

    def winners(self) -> Winners:
        """Returns the best entries, highest score first, equal scores by ascending id."""
        best = [self._best(held) for held in self._held.values()]
        ids, scores, grads = (
            torch.cat([part.to(parts[0].device) for part in parts]) for parts in zip(*best, strict=True)
        )
        order = best_first(ids, scores)[: min(self.size, int((scores > 0).sum()))]
        return Winners(ids[order], grads[order])

    def _best(self, held: _Held) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ids, scores and gradients (size,) of the best, in no order; scores are 0 where there are too few."""
        candidates = held.candidates
        cut(candidates, self.size, self.size)
        held.most = min(held.most, self.size)
        scores = candidates.scores.where(candidates.held, 0)
        return candidates.ids[: self.size], scores[: self.size], candidates.grads[: self.size]
