"""The selector of entries that are known before the step, as by the weights alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparsify.core.entries import count_by_tensor
from sparsify.core.gradients import Gradient
from sparsify.core.selector import Selector
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import Winners


class RankedSelector(Selector):
    """Selects entries that are given.

    Args:
        ids: (n,) int64 global ids, best first.
        tensors: all masked tensors, by ascending offset.
        like: the flat gradient, for its dtype and device.
    """

    def __init__(self, ids: Tensor, tensors: Sequence[MaskedTensor], like: Tensor) -> None:
        ordered, order = ids.to(like.device).sort()
        self._ids, self._back = ids.to(like.device), order.argsort()
        self._grads = like.new_zeros(ids.numel())
        counts = count_by_tensor(ordered, [tensor.offset + tensor.numel for tensor in tensors]).tolist()
        parts = zip(ordered.split(counts), self._grads.split(counts), strict=True)
        self._own = dict(zip(tensors, parts, strict=True))  # of each tensor: ids, and a view of their gradients

    def wants(self, tensor: MaskedTensor) -> bool:
        return self._own[tensor][0].numel() > 0

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        if self.wants(tensor):
            ids, grads = self._own[tensor]
            grads.copy_(gradient.take((ids - tensor.offset).to(tensor.parameter.device)))
        return gradient.take(tensor.indices)

    def winners(self) -> Winners:
        return Winners(self._ids, self._grads[self._back])

    def finite(self) -> Tensor:
        return self._grads.isfinite().all()
