"""A masked tensor over a quantized weight, trained at some of the entries that the weight stands for.

The packed weight is never written and never quantized again: the values at the unmasked entries are kept separately.
The dequantized weight, base + delta at the unmasked entries, lives within a node only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsify.common.quantized import QuantizedWeight, quantized_weight
from sparsify.common.raw_bits import put
from sparsify.core.tensor import MaskedTensor
from sparsify.errors import SparsifyError


class QuantizedTensor(MaskedTensor):
    """A masked tensor whose parameter is quantized; shape, dtype and all values are those of the dequantized weight."""

    packed = True
    # indices and effective values, (up to k,) each, of the first unmasked entries; the others have their base values.
    # The indices are a copy: a graph uses them after the index buffers have changed
    _shown: tuple[Tensor, Tensor] | None = None

    @property
    def stored(self) -> QuantizedWeight:
        """The packed weight."""
        return quantized_weight(self.owner, self.attribute)

    @property
    def scheme(self) -> str:  # type: ignore[override]
        return self.stored.scheme

    @property
    def shape_now(self) -> torch.Size:
        return self.stored.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    def weight(self) -> Tensor:
        return self.dequantizer()()

    @property
    def base(self) -> Tensor:
        self._check_not_cast()
        return super().base

    def _check_not_cast(self) -> None:
        stored = self.collector.buffers.base(self.number)
        if torch.promote_types(stored.dtype, self.dtype) != stored.dtype:
            raise SparsifyError(
                f"the model was cast to {stored.dtype} after sparsify(), which rounded the base values of "
                f"`{self.name}` at its trained entries, while its quantized weight still stands for {self.dtype}: "
                "cast a quantized model before sparsify()."
            )

    @property
    def effective(self) -> Tensor:
        base = self.base.clone()
        if self._shown is not None:
            _, values = self._shown
            base[: values.numel()] = values.to(base)
        return base

    def dequantizer(self) -> Callable[[], Tensor]:
        """Returns a function that makes the effective weight as it is now, even after later steps."""
        stored, shown = self.stored, self._shown

        def dequantize() -> Tensor:
            weight = stored.dequantize()
            if shown is not None:
                indices, values = shown
                put(weight, indices.to(weight.device), values.to(weight))
            return weight

        return dequantize

    def take(self, indices: Tensor) -> Tensor:
        return self.weight.take(indices)

    def write(self, values: Tensor) -> None:
        self._check_not_cast()
        self._shown = self.indices.clone(), values.detach().to(self.dtype, copy=True)

    write_unseen = write  # a graph that was built before holds the values that it was built with

    def write_base(self) -> None:
        self._shown = None
