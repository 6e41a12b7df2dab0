"""The flat delta: the one trainable parameter of a sparsified model; and the names of all that is added to its root."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsify.core.entries import BUFFERS

VALUES, POSITION, SETTINGS = "sparse_values", "sparse_position", "sparse_settings"
STATE = (VALUES, POSITION, SETTINGS, *BUFFERS)  # what the root's state dict has in addition to the model's own


class SparseValues(nn.Parameter):
    """The flat delta: a parameter that stays in float32 when its model is cast to a shorter type.

    A delta is small compared to its weight; rounded to bfloat16, most optimizer steps would be lost.
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
        return SparseValues, (self.data, self.requires_grad)


def flat_delta(root: nn.Module) -> SparseValues:
    """The flat delta (capacity,) of a model; looked up by name, since ``load_state_dict(assign=True)`` replaces it."""
    values = root._parameters[VALUES]
    if type(values) is nn.Parameter:
        values.__class__ = SparseValues
    return values  # type: ignore[return-value]
