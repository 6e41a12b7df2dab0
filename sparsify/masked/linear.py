"""A linear layer whose weight gradient exists only inside its backward node.

    forward    y = x W^T + b                        the plain layer's one matmul, W holds the effective values
    backward   grad_x = grad_y W                    as in the plain layer
               grad_W = grad_y^T x                  handed to ``collect`` as its two factors, then freed
               grad_b = sum of grad_y               handed to ``collect``

The weight is saved but never differentiated; its *anchor* is the input through which autograd reaches the flat delta
(``training/anchors.py``). A quantized W is not saved: it is dequantized within forward, and again within backward, and
the node computes in the dtype that the plain layer computes in. x is saved unless autograd can compute it again
(``recompute.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsify.masked.gradients import DenseGradient, Product, linear_gradient
from sparsify.masked.module import (
    MaskedModule,
    announce_use,
    autocast_dtype,
    first_order,
    frozen_if_masked,
    linear,
    masked_tensors,
    without_autocast,
)
from sparsify.masked.quantized import QuantizedTensor
from sparsify.masked.recompute import recomputable
from sparsify.masked.tensor import Use


class MaskedLinear(MaskedModule, nn.Linear):
    """An ``nn.Linear`` whose frozen weight and bias are trained at their unmasked entries.

    Made in place by :func:`sparsify.sparsify`, so that the module stays the same object, with its hooks and names.
    """

    plain_class = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """Returns the plain layer's output (..., out_features) for an input (..., in_features)."""
        return masked_linear(self, input)


def masked_linear(module: Any, x: Tensor, *, transposed: bool = False) -> Tensor:
    """Applies a module with ``weight`` (out, in), or (in, out) if ``transposed``, and ``bias`` (out,)."""
    tensor = masked_tensors(module).get("weight")
    packed = tensor if isinstance(tensor, QuantizedTensor) else None
    if torch.compiler.is_dynamo_compiling():
        from sparsify.masked.compiled import compiled_linear, untraced

        return compiled_linear(module, x, transposed) if packed is None else untraced(masked_linear, module, x)
    of_weight, of_bias = announce_use(module, "weight"), announce_use(module, "bias")
    bias = frozen_if_masked(module, "bias")
    if packed is None:
        weight, dequantize = frozen_if_masked(module, "weight"), None
        if of_weight is None and of_bias is None:
            return linear(x, weight, bias, transposed)
        dtype = output_dtype = autocast_dtype(x)
        x = x if dtype is None else x.to(dtype)
    else:
        weight, dequantize = None, packed.dequantizer()
        dtype, output_dtype = _quantized_dtypes(module, x)
    call = LinearCall(of_weight, of_bias, dtype, recomputable(x), transposed, dequantize)
    with without_autocast(x.device):
        y: Tensor = _Linear.apply(x, weight, bias, call, of_weight and of_weight.anchor, of_bias and of_bias.anchor)
    return y if output_dtype is None else y.to(output_dtype)


def _quantized_dtypes(module: Any, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtypes that a quantized layer computes in and gives its output in."""
    if hasattr(module, "compute_dtype"):  # bitsandbytes' 4-bit layers, which autocast does not reach
        return module.compute_dtype or x.dtype, x.dtype
    dtype = autocast_dtype(x) or x.dtype
    return dtype, dtype


class LinearCall(NamedTuple):
    """One call of a masked linear layer, beyond the tensors that it computes with."""

    of_weight: Use | None  # None where no gradient is collected
    of_bias: Use | None
    dtype: torch.dtype | None  # to compute in; None for the operands' own
    recompute: Callable[[], Tensor] | None  # computes the input again; None where it has to be saved
    transposed: bool  # whether the weight is (in, out)
    dequantize: Callable[[], Tensor] | None  # makes the weight; None where it is not quantized


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, call: LinearCall, *anchors: Tensor | None) -> Tensor:
        needs_x = call.of_weight is not None or ctx.needs_input_grad[1]  # a weight trained densely, its bias masked
        ctx.save_for_backward(x if needs_x and call.recompute is None else None, weight)
        ctx.call = call if needs_x else call._replace(recompute=None)
        weight = weight if call.dequantize is None else call.dequantize()
        if call.dtype is not None:
            x, weight, bias = x.to(call.dtype), weight.to(call.dtype), None if bias is None else bias.to(call.dtype)
        y = linear(x, weight, bias, call.transposed)
        return y.data  # no longer a view of a matrix: models write into a layer's output, as in ``q /= sqrt(dim)``

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_weight, of_bias = ctx.call.of_weight, ctx.call.of_bias
        grad_rows = grad_y.reshape(-1, grad_y.shape[-1]).contiguous()  # (n, out)
        grad_x = grad_weight = grad_bias = None
        with without_autocast(grad_y.device):
            if ctx.needs_input_grad[0]:
                grad_x = _input_gradient(ctx, weight, grad_rows)
                grad_x = grad_x.view(*grad_y.shape[:-1], grad_x.shape[-1])
            if of_weight is not None:
                of_weight.collect(_weight_gradient(ctx, x, grad_rows) if of_weight.wanted() else None)
            if of_bias is not None:
                of_bias.collect(DenseGradient(grad_rows.sum(0, keepdim=True)) if of_bias.wanted() else None)
            if ctx.needs_input_grad[1]:
                grad_weight = _weight_gradient(ctx, x, grad_rows).dense().values
            if ctx.needs_input_grad[2]:
                grad_bias = grad_rows.sum(0)
        # autograd casts them to the operands' dtypes
        return grad_x, grad_weight, grad_bias, None, None, None


def _input_gradient(ctx: Any, weight: Tensor | None, grad_rows: Tensor) -> Tensor:
    weight = (ctx.call.dequantize() if weight is None else weight).to(grad_rows.dtype)
    return grad_rows @ (weight.t() if ctx.call.transposed else weight)


def _weight_gradient(ctx: Any, x: Tensor | None, grad_rows: Tensor) -> Product:
    x = ctx.call.recompute() if x is None else x
    return linear_gradient(x.to(grad_rows.dtype), grad_rows, ctx.call.transposed)
