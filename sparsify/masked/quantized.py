"""A linear layer over a quantized weight, trained at some of the entries that the weight stands for.

    W          the dequantized weight, base + delta put at the unmasked entries; it lives within a node only
    forward    y = x W^T + b                        W is made, used and freed
    backward   grad_x = grad_y W                    W is made again
               grad_W = grad_y^T x                  handed to ``collect`` as its two factors, then freed

The packed weight is never written and never quantized again: the values at the unmasked entries are kept beside it. x
and the layer's output are as in the plain layer; between, everything is computed in the dtype that it computes in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsify.common.quantized import QuantizedWeight, quantized_weight
from sparsify.common.raw_bits import put
from sparsify.errors import SparsifyError
from sparsify.masked.arithmetic import autocast_dtype, without_autocast
from sparsify.masked.module import MaskedModule, announce_use, first_order, frozen_if_masked, masked_tensors
from sparsify.masked.product import Product
from sparsify.masked.recompute import recomputable
from sparsify.masked.tensor import Gradient, MaskedTensor, Use


class QuantizedTensor(MaskedTensor):
    """A masked tensor whose parameter is quantized: the values at its unmasked entries are kept beside it.

    ``shape``, ``dtype`` and all values are those of the weight that the parameter stands for.
    """

    packed = True
    _shown: Tensor | None = (
        None  # (up to k,) the effective values at the first unmasked entries; the others have base's
    )

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
        return self.recipe()()

    @property
    def base(self) -> Tensor:
        self._check_not_cast()
        return self.collector.buffers.base(self.number).to(self.parameter.device, self.dtype)

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
        if self._shown is not None:  # entries that were unmasked since have their base value still
            base[: self._shown.numel()] = self._shown.to(base)
        return base

    def recipe(self) -> Callable[[], Tensor]:
        """What makes the effective weight as it is now, any number of times, whatever is trained meanwhile."""
        if self._shown is None:
            return _Recipe(self.stored, None, None)
        return _Recipe(self.stored, self.indices[: self._shown.numel()], self._shown)

    def take(self, indices: Tensor) -> Tensor:
        return self.weight.take(indices)

    def write(self, values: Tensor) -> None:
        self._check_not_cast()
        self._shown = values.detach().to(self.dtype, copy=True)

    write_unseen = write  # a graph that was built before holds the values that it was built with

    def write_base(self) -> None:
        self._shown = None


class _Recipe:
    """The effective weight, made when it is asked for.

    Args:
        stored: the packed weight.
        indices: (k,) the unmasked entries; ``None`` where there are none.
        values: (k,) what is at them.
    """

    def __init__(self, stored: QuantizedWeight, indices: Tensor | None, values: Tensor | None) -> None:
        self._stored, self._indices, self._values = stored, indices, values

    def __call__(self) -> Tensor:
        weight = self._stored.dequantize()
        if self._indices is not None:
            assert self._values is not None
            put(weight, self._indices.to(weight.device), self._values.to(weight))
        return weight


class MaskedQuantized(MaskedModule):
    """What every masked layer over a quantized weight has in common; ``weight`` is the packed one."""

    in_features: int
    out_features: int
    bias: Any

    @property
    def density(self) -> float:
        """Share of the entries that the weight stands for that are unmasked."""
        return self.indices.numel() / (self.in_features * self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output (..., out_features) for an input (..., in_features)."""
        return quantized_linear(self, x)


class MaskedQuantizedLinear(MaskedQuantized, nn.Linear):
    """An ``nn.Linear`` whose weight is one of torchao's quantized tensors, trained at its unmasked entries."""

    plain_class = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output (..., out_features) for an input (..., in_features)."""
        return quantized_linear(self, input)


def quantized_linear(module: Any, x: Tensor) -> Tensor:
    """The linear map of a module whose ``weight`` is a masked quantized one; ``bias`` (out,) is an ordinary one."""
    if torch.compiler.is_dynamo_compiling():
        from sparsify.masked.compiled import untraced

        y: Tensor = untraced(quantized_linear, module, x)
        return y
    tensor = masked_tensors(module)["weight"]
    assert isinstance(tensor, QuantizedTensor)
    of_weight, of_bias = announce_use(module, "weight"), announce_use(module, "bias")
    bias, recipe = frozen_if_masked(module, "bias"), tensor.recipe()
    dtype, output_dtype = _dtypes(module, x)
    with without_autocast(x.device):
        y = _QuantizedLinear.apply(
            x,
            bias,
            of_weight and of_weight.anchor,
            of_bias and of_bias.anchor,
            recipe,
            of_weight,
            of_bias,
            dtype,
            recomputable(x),
        )
        return y.to(output_dtype)


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        weight_anchor: Tensor | None,
        bias_anchor: Tensor | None,
        recipe: Callable[[], Tensor],
        of_weight: Use | None,
        of_bias: Use | None,
        dtype: torch.dtype,
        again: Callable[[], Tensor] | None,
    ) -> Tensor:
        needs_x = of_weight is not None
        ctx.save_for_backward(x if needs_x and again is None else None)
        ctx.again = again if needs_x else None
        ctx.recipe, ctx.of_weight, ctx.of_bias, ctx.dtype = recipe, of_weight, of_bias, dtype
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        return F.linear(x.to(dtype), recipe().to(dtype), None if bias is None else bias.to(dtype)).data

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        grad_rows = grad_y.reshape(-1, grad_y.shape[-1])  # (n, out)
        grad_x = grad_bias = None
        with without_autocast(grad_y.device):
            if ctx.needs_input_grad[0]:
                grad_x = (grad_y @ ctx.recipe().to(ctx.dtype)).to(ctx.x_dtype)
            if ctx.of_bias is not None:
                ctx.of_bias.collect(Gradient(grad_rows.sum(0, keepdim=True)) if ctx.of_bias.wanted() else None)
            if ctx.of_weight is not None:
                (x,) = ctx.saved_tensors
                x = ctx.again() if x is None else x
                rows = x.reshape(-1, x.shape[-1]).to(ctx.dtype)  # (n, in)
                ctx.of_weight.collect(Product(grad_rows, rows) if ctx.of_weight.wanted() else None)
            if ctx.needs_input_grad[1]:
                grad_bias = grad_rows.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_bias, None, None, None, None, None, None, None


def _dtypes(module: Any, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes that a layer computes in and gives its output in, as the plain layer has them."""
    if hasattr(module, "compute_dtype"):  # bitsandbytes' 4-bit layers, which autocast does not reach
        return module.compute_dtype or x.dtype, x.dtype
    dtype = autocast_dtype(x) or x.dtype
    return dtype, dtype
