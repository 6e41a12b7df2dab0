"""A streaming top-k for GPUs, which waits for them once in a step and not at every tensor.

Only the device knows how many entries reach the threshold, and the host counts as if all of them did. Where by its
count the candidates could be too many, it launches a cut, which the device carries out if its own count calls for one.
A step's first parts are small: the sooner there is a threshold, the fewer entries join. No candidate can be lost, and
the winners are those of :class:`sparsify.selection.topk.TopK`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.kernels.candidates import Candidates, Factors, Part, best_first
from sparsify.kernels.select import cut, may_overflow, screens, select, select_product
from sparsify.selection.topk import Winners
from sparsify.strategies.importance import Importance

SMALLEST_CUT = 1 << 12  # candidates beyond the best that are cheaper to keep than to cut
FEWEST_AT_ONCE = 1 << 14  # entries in a step's first part
SEEN = 2  # entries for each candidate that may stay until a cut; once as many were offered, there is a threshold
MOST_MULTIPLIED = 1 << 26  # entries of a product that are multiplied out at once
MOST_AT_ONCE = 1 << 20  # entries in a part, all of which may become candidates, at 20 bytes each


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

    def offer_product(self, importance: Importance, factors: Factors) -> tuple[Tensor, bool]:
        """Offers the entries of one tensor."""
        if self._seen > SEEN * self.candidates.limit and screens(self.candidates, importance, factors):
            if not self._is_cut:
                self._cut(self.candidates.limit)
            unmasked = select_product(self.candidates, importance, factors)
            self._most, self._seen = self.candidates.limit, self._seen + factors.weight.numel()
            return unmasked, True
        if factors.weight.numel() > MOST_MULTIPLIED:
            return self._offer_by_rows(importance, factors), False
        grad = factors.left.t() @ factors.right
        unmasked = grad.take(factors.unmasked)
        if factors.excluded.numel():
            grad.view(-1).index_fill_(0, factors.excluded, 0)  # and so never selected
        self.offer(importance, Part(factors.weight, grad, None, factors.offset, None, 0, grad.numel()))
        return unmasked, False

    def _offer_by_rows(self, importance: Importance, factors: Factors) -> Tensor:
        """Offers the entries of a large product, of which only some rows are in memory; returns the unmasked ones."""
        left, right, weight, offset, unmasked, excluded = factors
        (rows, cols), taken = weight.shape, left.new_zeros(())
        at_once = max(1, MOST_MULTIPLIED // cols)
        for first in range(0, rows, at_once):
            block = slice(first, first + at_once)
            own, part = left[:, block].t(), weight[block]
            grad = left.new_zeros(part.numel() + 1)  # the last place is that of entries of other blocks
            product = torch.mm(own, right, out=grad[:-1].view(-1, cols))
            ours, others = (_places(indices, first * cols, part.numel()) for indices in (unmasked, excluded))
            taken = taken + grad.take(ours)
            grad.index_fill_(0, others, 0)  # and so never selected
            self.offer(importance, Part(part, product, None, offset + first * cols, None, 0, part.numel()))
        return taken

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

    def best(self) -> list[Tensor]:
        """Returns ids, scores, gradients and weights (size,) of the best, in no order; scores are 0 where none is."""
        size = self.candidates.size
        self._cut(size)
        ids, scores, grads, weights = (array[:size] for array in self.candidates.arrays)
        return [ids, scores.where(self.candidates.held[:size], 0), grads, weights]


def _places(indices: Tensor, start: int, number: int) -> Tensor:
    """Where entries (n,) are among so many from a start on; ``number`` for those that are not."""
    places = indices - start
    return places.where((places >= 0) & (places < number), number)


class DeviceTopK:
    """The best ``size`` of all entries offered so far, kept on the devices that they came from.

    Args:
        size: how many entries to keep, at least 1.
        total: number of entries of the model.
        dtype: of the scores.
        device: of the winners.
    """

    def __init__(self, size: int, total: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self._settings = size, (size, total, dtype)
        self._held = {device: _Held(*self._settings, device)}  # that of the winners first

    @property
    def finite(self) -> Tensor:
        """Bool scalar: whether all gradients so far were finite."""
        first, *others = (held.candidates.finite[0] for held in self._held.values())
        for other in others:
            first = first & other.to(first.device)
        return first

    def offer(
        self, importance: Importance, weight: Tensor, grad: Tensor, rows: Tensor | None, offset: int,
        ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Offers the entries of one tensor; see :meth:`sparsify.selection.topk.TopK.offer`."""
        self._on(grad.device).offer(importance, Part(weight, grad, rows, offset, ids, 0, grad.numel()))

    def offer_product(self, importance: Importance, factors: Factors) -> tuple[Tensor, bool]:
        """Offers the entries of one tensor but the excluded ones.

        Returns:
            The gradient of the unmasked entries (k,), and whether the product was screened.
        """
        return self._on(factors.left.device).offer_product(importance, factors)

    def _on(self, device: torch.device) -> _Held:
        if device not in self._held:
            self._held[device] = _Held(*self._settings, device)
        return self._held[device]

    def winners(self) -> Winners:
        """Returns the best entries, highest score first, equal scores by ascending id; -1 where there are too few."""
        best = [held.best() for held in self._held.values()]
        ids, scores, grads, weights = (
            torch.cat([part.to(parts[0].device) for part in parts]) for parts in zip(*best, strict=True)
        )
        order = best_first(ids, scores)[: self.size]
        return Winners(ids.where(scores > 0, -1)[order], grads[order], weights[order])
