"""A streaming selector for a GPU, which waits for the GPU once in a step and not at every tensor.

Only the device knows how many entries reach the threshold, and the host counts as if all did. Where by its count the
candidates could be too many, it launches a cut, which the device carries out if its own count calls for one. The
first parts of a step are small: the sooner there is a threshold, the fewer entries join. No candidate can be lost, and
the winners are those of :class:`sparsify.selection.topk.TopK`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.kernels.candidates import Candidates, Part, best_first
from sparsify.kernels.select import cut, may_overflow, select
from sparsify.masked.gradients import Gradient
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.context import Work
from sparsify.selection.selectors import Selector
from sparsify.selection.topk import Winners
from sparsify.strategies.importance import GradientImportance

SMALLEST_CUT = 1 << 12  # candidates beyond the best that are cheaper to keep than to cut
FEWEST_AT_ONCE = 1 << 14  # entries in a step's first part
MOST_AT_ONCE = 1 << 20  # entries in a part, all of which may become candidates, at 20 bytes each


class DeviceTopK:
    """The best ``size`` of all entries offered so far, on their device.

    Args:
        size: how many entries to keep, at least 1.
        total: number of entries of the model.
        dtype: of the scores.
        device: of the entries and the top-k.
    """

    def __init__(self, size: int, total: int, dtype: torch.dtype, device: torch.device) -> None:
        limit = size + max(size, SMALLEST_CUT)  # candidates that may stay until a cut
        self._candidates = Candidates(size, limit, limit + min(total, MOST_AT_ONCE), total, dtype, device)
        self._most = 0  # an upper bound of the number of candidates
        self._seen = 0  # entries offered so far
        self._is_cut = False  # whether none was offered since the last cut

    @property
    def finite(self) -> Tensor:
        """Bool scalar: whether all gradients so far were finite."""
        return self._candidates.finite[0]

    def offer(
        self,
        importance: GradientImportance,
        weight: Tensor,
        grad: Tensor,
        rows: Tensor | None,
        offset: int,
        ids: Tensor | None = None,
    ) -> None:
        """Offers entries; see :func:`sparsify.selection.topk.offer_gradient`.

        Args:
            importance: scores the entries.
            weight: (n_rows, cols).
            grad: (n, cols).
            rows: (n,) int64, the weight's rows that ``grad`` has; ``None`` for all of them in order.
            offset: global id of the first entry.
            ids: (n * cols,) int64, the entries' global ids where they do not follow from the offset.
        """
        whole = Part(weight, grad, rows, offset, ids, 0, grad.numel())
        most_at_once = whole.stop if may_overflow(self._candidates, importance, whole) else MOST_AT_ONCE
        start = 0
        while start < whole.stop:
            number = min(whole.stop - start, most_at_once, max(FEWEST_AT_ONCE, self._seen))
            self._offer(importance, whole._replace(start=start, stop=start + number))
            start += number

    def _offer(self, importance: GradientImportance, part: Part) -> None:
        candidates, number = self._candidates, part.stop - part.start
        overflows = self._most + number > candidates.capacity
        late = self._most + number > candidates.limit + min(MOST_AT_ONCE, max(FEWEST_AT_ONCE, self._seen))
        if (overflows or late) and not self._is_cut:
            self._cut(candidates.limit)
            overflows = self._most + number > candidates.capacity
        select(candidates, importance, part, overflows=overflows)
        self._most = candidates.limit if overflows else self._most + number
        self._seen += number
        self._is_cut = overflows

    def _cut(self, limit: int) -> None:
        cut(self._candidates, limit)
        self._most, self._is_cut = min(self._most, limit), True

    def best(self) -> list[Tensor]:
        """Returns ids, scores, gradients and weights (size,) of the best, in no order; scores are 0 where there is none.

        The weights are those at the time when the entries were offered.
        """
        candidates = self._candidates
        self._cut(candidates.size)
        ids, scores, *rest = (array[: candidates.size] for array in candidates.arrays)
        return [ids, scores.where(candidates.held[: candidates.size], 0), *rest]


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
        ids, scores, grads, weights = map(torch.cat, zip(*best, strict=True))
        order = best_first(ids, scores)[: self._size]
        return Winners(ids.where(scores > 0, -1)[order], grads[order], weights[order])

    def finite(self) -> list[Tensor]:
        return [topk.finite.to(self._device) for topk in self._topks.values()]
