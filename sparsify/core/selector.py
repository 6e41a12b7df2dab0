"""Selects a step's entries from gradients that arrive one tensor at a time."""

from __future__ import annotations

from torch import Tensor

from sparsify.core.gradients import Gradient
from sparsify.core.importance import Importance
from sparsify.core.small import SmallGradients
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import TopK, Winners


class Selector:
    """Selects the entries of one step."""

    batches_small = False  # whether the small tensors are offered together, after the others

    def wants(self, tensor: MaskedTensor) -> bool:
        """Whether it has to see this tensor's gradient."""
        return True

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        """Takes the whole gradient of one tensor and returns that of its unmasked entries (k,).

        The gradient may be written to and is not used afterwards.
        """
        raise NotImplementedError

    def offer_small(self, small: SmallGradients) -> None:
        """Takes the whole gradients of all small tensors."""

    def skip(self, tensor: MaskedTensor) -> None:
        """Takes note that the tensor's gradient is empty, for want of tokens."""

    def winners(self) -> Winners:
        """Returns the selected entries, best first."""
        raise NotImplementedError

    def finite(self) -> Tensor:
        """Returns a bool scalar: whether the gradients seen are finite."""
        raise NotImplementedError


class DenseSelector(Selector):
    """Selects the best entries by their whole gradients, in memory for as many as are wanted.

    Args:
        topk: keeps the best.
        importance: scores them.
        masked_only: whether unmasked entries are no candidates.
    """

    batches_small = True

    def __init__(self, topk: TopK, importance: Importance, *, masked_only: bool = True) -> None:
        self._topk, self._importance, self._masked_only = topk, importance, masked_only

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        dense = gradient.dense()
        unmasked = dense.take(tensor.indices)
        dense.clear(self._excluded(tensor))  # an entry whose gradient is zero is never offered
        self._topk.offer(self._importance, tensor.matrix, dense.values, dense.rows, tensor.offset)
        return unmasked

    def offer_small(self, small: SmallGradients) -> None:
        weight, grad, ids = small.entries([self._excluded(tensor) for tensor in small.tensors])
        self._topk.offer(self._importance, weight[None], grad[None], None, 0, ids)

    def winners(self) -> Winners:
        return self._topk.winners()

    def finite(self) -> Tensor:
        return self._topk.finite

    def _excluded(self, tensor: MaskedTensor) -> Tensor:
        return tensor.not_candidates if self._masked_only else tensor.never_candidates
