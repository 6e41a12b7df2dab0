"""Values into many weights: a launch for all of one dtype, where the plain form takes several for each weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsify.common.raw_bits import put
from sparsify.kernels import has_triton


def sync(weights: Sequence[Tensor], counts: Sequence[int], indices: Tensor, values: Tensor) -> None:
    """Writes values into weights, each at its own entries, cast to its dtype; autograd's version counters see it.

    Args:
        weights: contiguous, on the device of the values.
        counts: how many of the values are for each weight.
        indices: (k,) int64, flat in their weight, distinct there; the weights' entries one after the other.
        values: (k,) likewise.

    Example:
        >>> weight = torch.zeros(2, 2)
        >>> sync([weight], [1], torch.tensor([2]), torch.tensor([1.5]))
        >>> weight
        tensor([[0.0000, 0.0000],
                [1.5000, 0.0000]])
    """
    if has_triton(values.device):
        from sparsify.kernels.triton.scatter import sync as fused

        fused(weights, counts, indices, values)
    else:
        plain_sync(weights, counts, indices, values)


@torch.no_grad()
def plain_sync(weights: Sequence[Tensor], counts: Sequence[int], indices: Tensor, values: Tensor) -> None:
    """The plain torch form of :func:`sync`."""
    for weight, place, own in zip(weights, indices.split(list(counts)), values.split(list(counts)), strict=True):
        if own.numel():
            put(weight, place, own.to(weight.dtype))
