"""A linear layer over a quantized weight, trained at some of the entries that the weight stands for.

    W          the dequantized weight, base + delta at the unmasked entries; it lives within a node only
    forward    y = x W^T + b                        W is made, used and freed
    backward   grad_x = grad_y W                    W is made again
               grad_W = grad_y^T x                  handed to ``collect`` as its two factors, then freed

The packed weight is never written and never quantized again: the values at the unmasked entries are kept separately. x
and the output have the plain layer's dtypes; the node computes in the dtype that the plain layer computes in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.common.quantized import QuantizedWeight, quantized_weight
from sparsify.common.raw_bits import put
from sparsify.errors import SparsifyError
from sparsify.masked.linear import LinearCall, apply_linear
from sparsify.masked.module import (
    MaskedModule,
    announce_use,
    autocast_dtype,
    frozen_if_masked,
    masked_tensors,
    without_autocast,
)
from sparsify.masked.recompute import recomputable
from sparsify.masked.tensor import MaskedTensor


class QuantizedTensor(MaskedTensor):
    """A masked tensor whose parameter is quantized: the values at its unmasked entries are kept separately.

    ``shape``, ``dtype`` and all values are those of the dequantized weight.
    """

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
        return self.stored.dequantize if self._shown is None else partial(_dequantize, self.stored, *self._shown)

    def take(self, indices: Tensor) -> Tensor:
        return self.weight.take(indices)

    def write(self, values: Tensor) -> None:
        self._check_not_cast()
        self._shown = self.indices.clone(), values.detach().to(self.dtype, copy=True)

    write_unseen = write  # a graph that was built before holds the values that it was built with

    def write_base(self) -> None:
        self._shown = None


def _dequantize(stored: QuantizedWeight, indices: Tensor, values: Tensor) -> Tensor:
    """Returns the dequantized weight with ``values`` (k,) at flat ``indices`` (k,)."""
    weight = stored.dequantize()
    put(weight, indices.to(weight.device), values.to(weight))
    return weight


class MaskedQuantized(MaskedModule):
    """A masked linear layer over a quantized ``weight``."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output (..., out_features) for an input (..., in_features)."""
        return quantized_linear(self, x)


class MaskedQuantizedLinear(MaskedQuantized, nn.Linear):
    """An ``nn.Linear`` whose weight is one of torchao's quantized tensors, trained at its unmasked entries."""

    plain_class = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """Returns the layer's output (..., out_features) for an input (..., in_features)."""
        return quantized_linear(self, input)


def quantized_linear(module: Any, x: Tensor) -> Tensor:
    """Applies a module whose ``weight`` is a masked quantized one and whose ``bias`` (out,) is an ordinary one."""
    if torch.compiler.is_dynamo_compiling():
        from sparsify.masked.compiled import untraced

        y: Tensor = untraced(quantized_linear, module, x)
        return y
    tensor = masked_tensors(module)["weight"]
    assert isinstance(tensor, QuantizedTensor)
    of_weight, of_bias = announce_use(module, "weight"), announce_use(module, "bias")
    dtype, output_dtype = _dtypes(module, x)
    call = LinearCall(of_weight, of_bias, dtype, recomputable(x), dequantize=tensor.dequantizer())
    with without_autocast(x.device):
        return apply_linear(x, None, frozen_if_masked(module, "bias"), call).to(output_dtype)


def _dtypes(module: Any, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtypes that the plain layer computes in and gives its output in."""
    if hasattr(module, "compute_dtype"):  # bitsandbytes' 4-bit layers, which autocast does not reach
        return module.compute_dtype or x.dtype, x.dtype
    dtype = autocast_dtype(x) or x.dtype
    return dtype, dtype
