"""A streaming selector for several ranks on CPUs, all of which select the same: the best entries of the mean gradient.

    each rank        proposes the entries that could be among the best by its own gradient
    all ranks        gather the proposals, average the gradient at their union, score it, and offer it to the top-k

So each rank's top-k holds the same entries at all times. The mean of the ranks' gradients is no larger than the largest
of them: as long as the importance grows with abs(grad), an entry whose mean reaches the threshold reaches it on one
rank at least, and that rank proposes it. Where proposals would take more bytes than the gradient, the ranks exchange
their best first, which raises the threshold; if that does not help, the whole gradient is averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsify.common.ranks import Ranks, num_ranks
from sparsify.core.gradients import DenseGradient, Gradient, Product, TiedGradient
from sparsify.core.importance import ROUNDING_SLACK, Importance
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import TopK
from sparsify.selection.screening import StreamingSelector, Work

MOST_ROUNDS = 2  # of raising the threshold for one tensor, before its whole gradient is averaged
RAISING = 4  # entries of a rank that are exchanged for that, per entry to be selected
ALL_ROWS = -1


class RanksSelector(StreamingSelector):
    """The common part of the selectors of several ``ranks``, of all masked ``tensors``, by number."""

    def __init__(
        self, topk: Any, importance: Importance, work: Work, masked_only: bool, ranks: Ranks,
        tensors: Sequence[MaskedTensor],
    ) -> None:  # fmt: skip
        super().__init__(topk, importance, work, masked_only)
        self._ranks, self._names = ranks, [tensor.name for tensor in tensors]

    def skip(self, tensor: MaskedTensor) -> None:
        nothing = torch.empty(0, dtype=torch.int64, device=tensor.parameter.device)
        self.offer(tensor, DenseGradient(torch.zeros(0, tensor.matrix_shape[1], device=nothing.device), nothing))

    def _headers(self, tensor: MaskedTensor, gradient: Gradient, *numbers: int) -> tuple[Tensor, ...]:
        """How many rows each rank's gradient has (ranks,), ``ALL_ROWS`` where it has all; and each rank's numbers."""
        rows = ALL_ROWS if gradient.rows is None else gradient.rows.numel()
        return self._ranks.headers(tensor.number, (rows, *numbers), self._names).unbind(1)


class DistributedSelector(RanksSelector):
    """Selects the best entries by the mean of the gradients of all ranks, which meet at each tensor."""

    batches_small = False  # one of the ranks may have to skip a tensor

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        unmasked, excluded, few = None, self._excluded(tensor), self._topk.size * RAISING
        for rounds_left in reversed(range(MOST_ROUNDS + 1)):
            proposed, complete, taken, gradient = self._propose(tensor, gradient, excluded)
            unmasked = taken if unmasked is None else unmasked
            rows, numbers, all_complete = self._headers(tensor, gradient, proposed.numel(), int(complete))
            last = self._pays(tensor, rows, numbers) and bool(all_complete.all())
            if not last:  # raise the threshold by the best
                proposed, numbers = proposed[:few], numbers.clamp(max=few)
                if not rounds_left or not self._pays(tensor, rows, numbers):
                    self._offer_whole_mean(tensor, gradient, excluded, rows)
                    break
            if numbers.any():
                union = self._ranks.union(proposed, int(numbers.max()), tensor.numel)
                self._offer_mean(tensor, gradient, union)
                excluded = torch.cat([excluded, union.to(excluded.device)])
            if last:
                break
        assert unmasked is not None
        return unmasked

    def _propose(
        self, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor
    ) -> tuple[Tensor, bool, Tensor, Gradient]:
        """Finds entries that could reach the threshold, by this rank's gradient.

        Returns:
            Their flat indices (n,), best first; whether these are all; the gradient of the unmasked entries (k,); and
            the whole gradient in the form that was scanned.
        """
        threshold = self._topk.threshold
        if not self._importance.monotone:
            self._work.dense += gradient.numel
            gradient = gradient.dense()
            return excluded[:0].to(threshold.device), False, gradient.take(tensor.indices), gradient
        # more proposals would take more bytes than the gradient
        most = max(self._topk.size * RAISING, 2 * gradient.numel // (3 * num_ranks())) + 1
        # rounding keeps no entry out: of a sum of so many float32 terms, and of its quotient, which may be squared
        slack = ROUNDING_SLACK * (1 + num_ranks() * 2.0**-22) ** 2
        own = TopK(most, threshold.dtype, threshold.device, threshold / slack)
        taken, gradient = StreamingSelector(own, self._importance, self._work).scan(tensor, gradient, excluded)
        self._topk.finite &= own.finite
        ids = own.winners().ids
        return ids - tensor.offset, ids.numel() < most, taken, gradient

    def _pays(self, tensor: MaskedTensor, rows: Tensor, numbers: Tensor) -> bool:
        """Whether exchanging so many proposals (ranks,) takes no more bytes than averaging the whole gradient."""
        if not self._importance.monotone:
            return False
        whole = tensor.numel
        if not (rows == ALL_ROWS).any():
            whole = min(whole, int(rows.sum()) * tensor.matrix_shape[1])
        # each rank's indices, as many as the longest list has, then the gradient at their union, twice on its way
        return 4 * int(numbers.max()) * numbers.numel() + 8 * int(numbers.sum()) <= 8 * whole

    def _offer_mean(self, tensor: MaskedTensor, gradient: Gradient, union: Tensor) -> None:
        """Offers the entries (k,) with the mean of their gradients."""
        indices = union.to(tensor.parameter.device)
        grads = self._ranks.mean_(gradient.take(indices).to(self._topk.threshold))
        self._topk.offer_entries(self._importance, union + tensor.offset, tensor.take(indices).to(grads), grads)
        self._topk.cut()

    def _offer_whole_mean(self, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor, lengths: Tensor) -> None:
        """Offers all entries but the excluded ones, by the mean of the whole gradient."""
        if isinstance(gradient, (Product, TiedGradient)):
            self._work.dense += gradient.numel
        gradient = gradient.dense()
        gradient.clear(excluded)  # an entry whose gradient is zero is never offered
        rows, values = None, gradient.values.to(self._topk.threshold.dtype)
        if (lengths == ALL_ROWS).any():
            if gradient.rows is not None:
                values = values.new_zeros(tensor.matrix_shape).index_add_(0, gradient.rows, values)
        else:
            assert gradient.rows is not None
            rows = self._ranks.union(gradient.rows, int(lengths.max()), tensor.numel)
            at = torch.searchsorted(rows, gradient.rows)
            values = values.new_zeros(rows.numel(), values.shape[1]).index_add_(0, at, values)
        self._topk.offer(self._importance, tensor.matrix, self._ranks.mean_(values), rows, tensor.offset)
        self._topk.cut()  # a higher threshold means fewer proposals
