"""Selectors: select a step's entries from gradients that arrive one tensor at a time.

A *streaming* selector finds the entries by the gradients; a *ranked* one has them given and only collects their
gradients. Both end with the winners and their gradients, and tell whether every gradient they saw was finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from sparsify.core.gradients import Gradient
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import Winners
from sparsify.selection.context import SelectionContext
from sparsify.selection.screening import scan
from sparsify.selection.small_tensors import SmallGradients


class Selector(Protocol):
    """Selects the entries of one step."""

    batches_small: bool = False  # whether the small tensors are offered together, after the others

    def wants(self, tensor: MaskedTensor) -> bool:
        """Whether it has to see this tensor's gradient."""
        return True

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        """Takes the whole gradient of one tensor and returns that of its unmasked entries (k,).

        The gradient may be written to and is not used afterwards.
        """

    def offer_small(self, small: SmallGradients) -> None:
        """Takes the whole gradients of all small tensors."""
        return

    def skip(self, tensor: MaskedTensor) -> None:
        """Takes note that the tensor's gradient is empty, for want of tokens."""
        return

    def winners(self) -> Winners:
        """Returns the selected entries, best first."""

    def finite(self) -> Tensor:
        """Returns a bool scalar: whether the gradients seen are finite."""


class StreamingSelector(Selector):
    """Selects the best entries by their gradients, in memory for as many as are wanted."""

    batches_small = True

    def __init__(self, context: SelectionContext) -> None:
        self._context = context

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        unmasked, _ = scan(self._context, tensor, gradient, self._context.excluded(tensor))
        return unmasked

    def offer_small(self, small: SmallGradients) -> None:
        small.offer(self._context)

    def winners(self) -> Winners:
        return self._context.topk.winners()

    def finite(self) -> Tensor:
        return self._context.topk.finite


class RankedSelector(Selector):
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
