"""A streaming selector for several ranks on CPUs, all of which select the same: the best entries of the mean gradient.

    each rank        proposes the entries that could be among the best by its own gradient
    all ranks        gather the proposals, average the gradient at their union, score it, and offer it to the top-k

The top-k of each rank holds the same entries at all times, so that thresholds, counts and decisions are the same too.
That takes few bytes, and the ranks wait for each other's proposals; a device would wait too (``sharded.py``).

Why that is exact: the mean of the ranks' gradients is no larger than the largest of them. So an entry whose mean
reaches the threshold reaches it on one rank at least, as long as the importance grows with abs(grad), and that rank
proposes it. Where the proposals would take more bytes than the gradient itself, the ranks exchange their best first,
which raises the threshold, and propose again; if that does not help, the whole gradient is averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.common.ranks import Ranks, num_ranks
from sparsify.core.gradients import DenseGradient, Gradient, Product, TiedGradient
from sparsify.core.importance import ROUNDING_SLACK
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import TopK
from sparsify.selection.context import SelectionContext
from sparsify.selection.screening import scan
from sparsify.selection.selectors import StreamingSelector

MOST_ROUNDS = 2  # of raising the threshold for one tensor, before its whole gradient is averaged
RAISING = 4  # entries of a rank that are exchanged for that, per entry to be selected
ALL_ROWS = -1


class Header(NamedTuple):
    """What the ranks tell each other about a tensor; each attribute is (ranks,)."""

    number: Tensor  # entries that the rank proposes
    complete: Tensor  # whether these are all that reach the threshold
    rows: Tensor  # number of rows that its gradient has; ALL_ROWS where it has all


class DistributedSelector(StreamingSelector):
    """Selects the best entries by the mean of all ranks' gradients.

    Args:
        context: its top-k has the size that is wanted; the work is this rank's.
        ranks: the other ranks.
        tensors: all masked tensors, by number.
    """

    def __init__(self, context: SelectionContext, ranks: Ranks, tensors: Sequence[MaskedTensor]) -> None:
        super().__init__(context)
        assert isinstance(context.topk, TopK)
        self.batches_small = False  # the ranks meet at each tensor, and one of them may have to skip it
        self._topk, self._importance = context.topk, context.importance
        self._ranks = ranks
        self._names = [tensor.name for tensor in tensors]
        self._few = context.topk.size * RAISING
        # rounding keeps no entry out: of a sum of so many float32 terms, and of its quotient, which may be squared
        self._slack = ROUNDING_SLACK * (1 + num_ranks() * 2.0**-22) ** 2

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        unmasked, excluded = None, self._context.excluded(tensor)
        for round_number in range(MOST_ROUNDS + 1):
            proposed, complete, taken, gradient = self._propose(tensor, gradient, excluded)
            unmasked = taken if unmasked is None else unmasked
            header = self._exchange_headers(tensor, gradient, proposed, complete)
            last = self._pays(tensor, header) and bool(header.complete.all())
            if not last:  # raise the threshold by the best
                header = header._replace(number=header.number.clamp(max=self._few))
                if round_number == MOST_ROUNDS or not self._pays(tensor, header):
                    self._offer_whole_mean(tensor, gradient, excluded, header)
                    break
            if header.number.any():
                union = self._ranks.union(
                    proposed if last else proposed[: self._few], int(header.number.max()), tensor.numel
                )
                self._offer_mean(tensor, gradient, union)
                excluded = torch.cat([excluded, union.to(excluded.device)])
            if last:
                break
        assert unmasked is not None
        return unmasked

    def skip(self, tensor: MaskedTensor) -> None:
        nothing = torch.empty(0, dtype=torch.int64, device=tensor.parameter.device)
        self.offer(tensor, DenseGradient(torch.zeros(0, tensor.matrix_shape[1], device=nothing.device), nothing))

    def _propose(
        self, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor
    ) -> tuple[Tensor, bool, Tensor, Gradient]:
        """Finds entries that could reach the threshold, by this rank's gradient.

        Returns:
            Their flat indices (n,), best first; whether these are all; the gradient of the unmasked entries (k,); and
            the whole gradient in the form that was scanned.
        """
        shared = self._topk
        if not self._importance.monotone:
            self._context.work.dense += gradient.numel
            gradient = gradient.dense()
            return excluded[:0].to(shared.threshold.device), False, gradient.take(tensor.indices), gradient
        # more proposals would take more bytes than the gradient
        most = max(self._few, 2 * gradient.numel // (3 * num_ranks())) + 1
        own = TopK(most, shared.threshold.dtype, shared.threshold.device, shared.threshold / self._slack)
        taken, gradient = scan(replace(self._context, topk=own), tensor, gradient, excluded)
        shared.finite &= own.finite
        ids = own.winners().ids
        return ids - tensor.offset, ids.numel() < most, taken, gradient

    def _exchange_headers(self, tensor: MaskedTensor, gradient: Gradient, proposed: Tensor, complete: bool) -> Header:
        rows = ALL_ROWS if gradient.rows is None else gradient.rows.numel()
        numbers = (proposed.numel(), int(complete), rows)
        return Header(*self._ranks.headers(tensor.number, numbers, self._names).unbind(1))

    def _pays(self, tensor: MaskedTensor, header: Header) -> bool:
        """Whether exchanging the proposals takes no more bytes than averaging the whole gradient."""
        if not self._importance.monotone:
            return False
        whole = tensor.numel
        if not (header.rows == ALL_ROWS).any():
            whole = min(whole, int(header.rows.sum()) * tensor.matrix_shape[1])
        # each rank's indices, as many as the longest list has, then the gradient at their union, twice on its way
        return 4 * int(header.number.max()) * header.number.numel() + 8 * int(header.number.sum()) <= 8 * whole

    def _offer_mean(self, tensor: MaskedTensor, gradient: Gradient, union: Tensor) -> None:
        """Offers the entries (k,) with the mean of their gradients."""
        indices = union.to(tensor.parameter.device)
        grads = self._ranks.mean_(gradient.take(indices).to(self._topk.threshold))
        self._topk.offer_entries(self._importance, union + tensor.offset, tensor.take(indices).to(grads), grads)
        self._topk.cut()

    def _offer_whole_mean(self, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor, header: Header) -> None:
        """Offers all entries but the excluded ones, by the mean of the whole gradient."""
        if isinstance(gradient, (Product, TiedGradient)):
            self._context.work.dense += gradient.numel
        gradient = gradient.dense()
        gradient.clear(excluded)  # an entry whose gradient is zero is never offered
        rows, values = None, gradient.values.to(self._topk.threshold.dtype)
        if (header.rows == ALL_ROWS).any():
            if gradient.rows is not None:
                values = values.new_zeros(tensor.matrix_shape).index_add_(0, gradient.rows, values)
        else:
            assert gradient.rows is not None
            rows = self._ranks.union(gradient.rows, int(header.rows.max()), tensor.numel)
            at = torch.searchsorted(rows, gradient.rows)
            values = values.new_zeros(rows.numel(), values.shape[1]).index_add_(0, at, values)
        self._topk.offer(self._importance, tensor.matrix, self._ranks.mean_(values), rows, tensor.offset)
        self._topk.cut()  # a higher threshold means fewer proposals
