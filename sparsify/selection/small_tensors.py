"""Batches the gradients of small tensors: kept until all are there, then scanned together.

A bias has a few hundred entries: scanning each by itself would cost more than its entries do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsify.common.devices import runs_ahead
from sparsify.kernels.threshold import find_reaching
from sparsify.masked.gradients import DenseGradient, Gradient
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.context import SelectionContext
from sparsify.selection.topk import TopK

LARGEST = 1 << 14  # entries of a small tensor


def is_small(gradient: Gradient) -> bool:
    """Whether a gradient is to be batched; only on a CPU, as a GPU has enough other work to hide each small one."""
    on_cpu = gradient.device.type == "cpu" and not runs_ahead(gradient.device)
    return gradient.rows is None and gradient.numel <= LARGEST and on_cpu


class SmallGradients:
    """Whole gradients of small tensors; ``pairs`` has each tensor and its gradient, in the order they came in."""

    def __init__(self) -> None:
        self.pairs: list[tuple[MaskedTensor, DenseGradient]] = []

    @property
    def tensors(self) -> list[MaskedTensor]:
        return [tensor for tensor, _ in self.pairs]

    def add(self, tensor: MaskedTensor, gradient: Gradient) -> None:
        """Keeps a tensor's gradient, in memory of its own: compiled graphs reuse theirs."""
        self.pairs.append((tensor, gradient.dense().own()))

    def take(self) -> Tensor:
        """Returns the gradient of the unmasked entries (k,), tensor by tensor."""
        return self._joined()[self._places([tensor.indices for tensor in self.tensors])]

    def offer(self, context: SelectionContext) -> None:
        """Offers the entries to a top-k."""
        topk, importance = context.topk, context.importance
        assert isinstance(topk, TopK)
        grad, weight = self._joined(), torch.cat([tensor.weight.reshape(-1) for tensor in self.tensors])
        context.work.dense += grad.numel()
        topk.finite &= grad.isfinite().all().to(topk.finite.device)
        grad[self._places([context.excluded(tensor) for tensor in self.tensors])] = 0  # and so never offered
        found, _ = find_reaching(grad[None], importance.least_gradient(topk.threshold.to(grad.device), weight[None]))
        starts = self._starts()
        of = torch.searchsorted(starts, found, right=True) - 1
        ids = found + (torch.tensor([tensor.offset for tensor in self.tensors]) - starts)[of]
        topk.offer_entries(importance, ids, weight[found], grad[found])

    def _joined(self) -> Tensor:
        """All gradients (n,) in one new vector."""
        return torch.cat([gradient.values.reshape(-1) for _, gradient in self.pairs])

    def _starts(self) -> Tensor:
        """Where each tensor's gradient begins in that vector."""
        sizes = torch.tensor([gradient.numel for _, gradient in self.pairs])
        return sizes.cumsum(0) - sizes

    def _places(self, indices: Sequence[Tensor]) -> Tensor:
        """Where some flat indices of each tensor are in that vector."""
        numbers = torch.tensor([some.numel() for some in indices])
        return torch.cat(list(indices)) + self._starts().repeat_interleave(numbers)
