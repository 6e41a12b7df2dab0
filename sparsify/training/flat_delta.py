"""The flat delta: the one trainable parameter of a sparsified model, on its root under the name ``sparse_values``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VALUES = "sparse_values"


class SparseValues(nn.Parameter):
    """The flat delta: a parameter that stays in float32 when its model is cast to a shorter type.

    A delta is small beside its weight; rounded to bfloat16, most optimizer steps would be lost.
    """

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype in (None, torch.float16, torch.bfloat16):
            dtype = self.dtype
        return super().to(device=device or self.device, dtype=dtype, non_blocking=non_blocking)

    def half(self, *args: Any, **kwargs: Any) -> Tensor:
        return self

    bfloat16 = half

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild_values, (self.data, self.requires_grad)


def _rebuild_values(data: Tensor, requires_grad: bool) -> SparseValues:
    return SparseValues(data, requires_grad)
