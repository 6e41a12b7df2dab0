"""The gradients of small tensors, kept until all are there and offered together.

A bias has a few hundred entries: looking at each by itself would cost more than its entries do.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from sparsify.importance import GradientImportance
from sparsify.kernels.reach import reaching
from sparsify.masked.tensor import Gradient, MaskedTensor
from sparsify.selection import Pool, offer_entries

LARGEST = 1 << 14  # entries of a tensor that is small


class SmallGradients:
    """What small tensors have to offer; on each device, one vector after the other."""

    def __init__(self) -> None:
        self._parts: defaultdict[torch.device, list[tuple[MaskedTensor, Tensor]]] = defaultdict(list)

    def takes(self, gradient: Gradient) -> bool:
        """Whether a gradient is one to be kept."""
        return gradient.rows is None and gradient.numel <= LARGEST

    def add(self, tensor: MaskedTensor, gradient: Gradient) -> None:
        """Keeps a tensor's gradient, which is zero where an entry is no candidate."""
        self._parts[gradient.values.device].append((tensor, gradient.values.reshape(-1)))

    def offer(self, pool: Pool, importance: GradientImportance) -> list[Tensor]:
        """Offers them all, and returns bool scalars: whether all were finite."""
        return [self._offer(pool, importance, *zip(*parts, strict=True)) for parts in self._parts.values()]

    @staticmethod
    def _offer(
        pool: Pool, importance: GradientImportance, tensors: tuple[MaskedTensor, ...], grads: tuple[Tensor, ...]
    ) -> Tensor:
        grad, weight = torch.cat(grads), torch.cat([tensor.weight.reshape(-1) for tensor in tensors])
        found, finite = reaching(grad[None], importance.least_gradient(pool.floor.to(grad.device), weight[None]))
        assert found is not None
        sizes = torch.tensor([tensor.numel for tensor in tensors], device=grad.device)
        offsets = torch.tensor([tensor.offset for tensor in tensors], device=grad.device) - (sizes.cumsum(0) - sizes)
        ids = found + offsets[torch.searchsorted(sizes.cumsum(0), found, right=True)]
        offer_entries(pool, importance, ids, weight[found], grad[found])
        return finite.to(pool.floor.device)
