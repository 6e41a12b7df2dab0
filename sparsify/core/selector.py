"""Selects a step's entries from gradients that arrive one tensor at a time."""

from __future__ import annotations

from torch import Tensor

from sparsify.core.gradients import Gradient
from sparsify.core.importance import Importance
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import TopK, Winners


class Selector:
    """Selects the entries of one step."""

    def wants(self, tensor: MaskedTensor) -> bool:
        """Whether it has to see this tensor's gradient."""
        return True

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        """Takes the whole gradient of one tensor and returns that of its unmasked entries (k,).

        The gradient may be written to and is not used afterwards.
        """
        raise NotImplementedError

    def winners(self) -> Winners:
        """Returns the selected entries, best first."""
        raise NotImplementedError

    def finite(self) -> Tensor:
        """Returns a bool scalar: whether the gradients seen are finite."""
        raise NotImplementedError


class DenseSelector(Selector):
    """Selects the best masked entries by their whole gradients, in memory for as many as are wanted."""

    def __init__(self, topk: TopK, importance: Importance) -> None:
        self._topk, self._importance = topk, importance

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        dense = gradient.dense()
        unmasked = dense.take(tensor.indices)
        dense.clear(tensor.not_candidates)  # an entry whose gradient is zero is never offered
        self._topk.offer(self._importance, tensor.matrix, dense.values, dense.rows, tensor.offset)
        return unmasked

    def winners(self) -> Winners:
        return self._topk.winners()

    def finite(self) -> Tensor:
        return self._topk.finite
