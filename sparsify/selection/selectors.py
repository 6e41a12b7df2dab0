"""The selectors of one rank: by gradients that are screened where that pays, or of entries that are given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sparsify.core.gradients import Gradient
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import Winners
from sparsify.selection.context import SelectionContext
from sparsify.selection.screening import scan
from sparsify.selection.small import BatchingSelector, SmallGradients


class StreamingSelector(BatchingSelector):
    """Selects the best entries by their gradients, in memory for as many as are wanted."""

    batches_small = True

    def __init__(self, context: SelectionContext) -> None:
        self._context = context

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        unmasked, _ = scan(self._context, tensor, gradient, self._context.excluded(tensor))
        return unmasked

    def offer_small(self, small: SmallGradients) -> None:
        weight, grad, ids = self._context.entries_of(small)
        self._context.topk.offer(self._context.importance, weight[None], grad[None], None, 0, ids)

    def winners(self) -> Winners:
        return self._context.topk.winners()

    def finite(self) -> Tensor:
        return self._context.topk.finite


class RankedSelector(BatchingSelector):
    """Selects entries that are given.

    Args:
        ids: (n,) int64 global ids, best first.
        tensors: all masked tensors, by ascending offset.
        like: the flat gradient, for its dtype and device.
    """

    def __init__(self, ids: Tensor, tensors: Sequence[MaskedTensor], like: Tensor) -> None:
        self._ids, self._order = ids.to(like.device).sort()
        self._grads = like.new_zeros(ids.numel())
        ends = torch.tensor([0, *(tensor.offset + tensor.numel for tensor in tensors)], device=like.device)
        cuts = torch.searchsorted(self._ids, ends).tolist()
        self._own = {t: slice(*cut) for t, cut in zip(tensors, pairwise(cuts), strict=True)}

    def wants(self, tensor: MaskedTensor) -> bool:
        return self._own[tensor].start < self._own[tensor].stop

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        if self.wants(tensor):
            own = self._own[tensor]
            indices = (self._ids[own] - tensor.offset).to(tensor.parameter.device)
            self._grads[own] = gradient.take(indices).to(self._grads)
        return gradient.take(tensor.indices)

    def winners(self) -> Winners:
        back = self._order.argsort()
        return Winners(self._ids[back], self._grads[back])

    def finite(self) -> Tensor:
        return self._grads.isfinite().all()
