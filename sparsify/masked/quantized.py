"""Masked tensors and linear layers over a quantized weight, trained at some of the entries that it stands for.

The packed weight is never written: the values at the unmasked entries are kept separately.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsify.common.quantized import QuantizedWeight, quantized_weight
from sparsify.core.devices import put
from sparsify.core.layers import LinearCall, MaskedLinear, autocast_dtype, run_linear
from sparsify.core.module import MaskedModule, count_use, masked_tensors
from sparsify.errors import SparsifyError
from sparsify.masked.tensor import ModelTensor


class QuantizedTensor(ModelTensor):
    """A masked tensor whose parameter is quantized; shape, dtype and all values are those of the dequantized weight."""

    is_quantized = True
    _shown: tuple[Tensor, Tensor] | None = None  # indices and effective values of the entries as they were written

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
        self.check_not_cast()
        return super().base

    def check_not_cast(self) -> None:
        """Raises ``SparsifyError`` where the kept base values were rounded."""
        stored = self.collector.entries.base
        if torch.promote_types(stored.dtype, self.dtype) != stored.dtype:
            rounded = f"rounded the base values of a quantized weight, `{self.name}`, that stands for {self.dtype}"
            problem = f"the model was cast to {stored.dtype} after sparsify(), which {rounded}"
            raise SparsifyError(f"{problem}: cast a quantized model before sparsify().")

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

    def write(self, values: Tensor) -> None:
        self.check_not_cast()
        self._shown = self.indices, values.detach().to(self.dtype, copy=True)

    write_without_version_bump = write  # a graph that was built before holds the values that it was built with


class MaskedQuantizedLinear(MaskedModule):
    """A linear layer over a quantized weight, which is dequantized within forward, and again within backward.

    In evaluation too: bitsandbytes' own forward would repack a 4-bit weight, with rounded scales (on some CPUs), and
    round an 8-bit layer's input.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output (..., out_features) for an input (..., in_features)."""
        if torch.compiler.is_dynamo_compiling():
            from sparsify.masked.compiled import untraced

            return untraced(_quantized_linear, self, x)
        return _quantized_linear(self, x)


class MaskedPackedLinear(MaskedQuantizedLinear, MaskedLinear):
    """An ``nn.Linear`` with torchao's weight that is trained at its unmasked entries."""


def _quantized_linear(module: Any, x: Tensor) -> Tensor:
    (parameters, use), tensor = count_use(module), masked_tensors(module)["weight"]
    assert isinstance(tensor, QuantizedTensor)
    if hasattr(module, "compute_dtype"):  # bitsandbytes' 4-bit layers, which autocast does not reach
        dtype, output_dtype = module.compute_dtype or x.dtype, x.dtype
    else:
        dtype = output_dtype = autocast_dtype(x) or x.dtype
    call = LinearCall(use, tensor, dtype, dequantize=tensor.dequantizer())
    with tensor.collector.saving(x, x, always=True):
        return run_linear(x, None, parameters.get("bias"), call).to(output_dtype)
