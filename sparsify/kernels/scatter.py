"""Values into many weights: one launch for all weights of a dtype, where the plain form takes several for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsify.core.devices import put
from sparsify.kernels import has_triton


def scatter(
    weights: Sequence[Tensor], counts: Sequence[int], indices: Tensor, values: Tensor, seen: bool = True
) -> None:
    """Writes values (k,) into contiguous weights, each at its own entries, cast to its dtype.

    Args:
        weights: on devices that Triton runs on, if the values are.
        counts: number of values for each weight.
        indices: (k,) int64, flat in their weight and distinct there; the weights' entries one after the other.
        values: in the same order.
        seen: whether autograd's version counters see it.
    """
    if has_triton(values.device):
        from sparsify.kernels.triton.scatter import scatter as fused

        fused(weights, counts, indices, values, seen)
    else:
        plain_scatter([weight if seen else weight.data for weight in weights], counts, indices, values)


@torch.no_grad()
def plain_scatter(weights: Sequence[Tensor], counts: Sequence[int], indices: Tensor, values: Tensor) -> None:
    """The plain torch form of :func:`scatter`."""
    for weight, place, own in zip(weights, indices.split(list(counts)), values.split(list(counts)), strict=True):
        if own.numel():
            put(weight, place, own.to(weight.dtype))
