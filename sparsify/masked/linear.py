"""A linear layer whose weight gradient exists only inside its backward node.

    forward    y = x W^T + b                        the plain layer's one matmul, W holds the effective values
    backward   grad_x = grad_y W                    as ever
               grad_W = grad_y^T x                  handed to ``collect`` as its two factors, then freed
               grad_b = sum of grad_y               likewise

The weight is saved but never differentiated; its *anchor* (see ``anchors.py``) is the input through which autograd
reaches the flat vector of deltas. x is saved unless autograd can make it again (see ``recompute.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.masked.arithmetic import autocast_dtype, linear, linear_gradient, without_autocast
from sparsify.masked.module import MaskedModule, announce_use, first_order, frozen_if_masked
from sparsify.masked.product import Product
from sparsify.masked.recompute import recomputable
from sparsify.masked.tensor import Gradient, Use


class MaskedLinear(MaskedModule, nn.Linear):
    """An ``nn.Linear`` whose frozen weight and bias are trained at their unmasked entries.

    Made in place by :func:`sparsify.sparsify`, so that the module stays the same object, with its hooks and names.
    """

    plain_class = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """The plain layer's output (..., out_features) for an input (..., in_features)."""
        return masked_linear(self, input, transposed=False)


def masked_linear(module: Any, x: Tensor, *, transposed: bool) -> Tensor:
    """The linear map of a module that has ``weight`` (out, in), or (in, out) if ``transposed``, and ``bias`` (out,)."""
    if torch.compiler.is_dynamo_compiling():
        from sparsify.masked.compiled import compiled_linear

        return compiled_linear(module, x, transposed)
    of_weight, of_bias = announce_use(module, "weight"), announce_use(module, "bias")
    weight, bias = frozen_if_masked(module, "weight"), frozen_if_masked(module, "bias")
    if of_weight is None and of_bias is None:
        return linear(x, weight, bias, transposed)
    dtype = autocast_dtype(x)
    x = x if dtype is None else x.to(dtype)
    with without_autocast(x.device):
        result: Tensor = _MaskedLinear.apply(
            x,
            weight,
            bias,
            of_weight and of_weight.anchor,
            of_bias and of_bias.anchor,
            of_weight,
            of_bias,
            transposed,
            dtype,
            recomputable(x),
        )
    return result


class _MaskedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_anchor: Tensor | None,
        bias_anchor: Tensor | None,
        of_weight: Use | None,
        of_bias: Use | None,
        transposed: bool,
        dtype: torch.dtype | None,
        again: Callable[[], Tensor] | None,
    ) -> Tensor:
        needs_x = of_weight is not None or weight.requires_grad  # trained dense beside a masked bias
        ctx.save_for_backward(x if needs_x and again is None else None, weight)
        ctx.again = again if needs_x else None
        ctx.of_weight, ctx.of_bias, ctx.transposed, ctx.weight_dtype = of_weight, of_bias, transposed, weight.dtype
        if dtype is not None:
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        y = linear(x, weight, bias, transposed)
        return y.data  # no longer a view of a matrix: models write into a layer's output, as in ``q /= sqrt(dim)``

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_rows = grad_y.reshape(-1, grad_y.shape[-1]).contiguous()  # (n, out)
        grad_x = grad_weight = grad_bias = product = None
        with without_autocast(grad_y.device):
            if ctx.needs_input_grad[0]:
                weight = weight.to(grad_y.dtype)
                grad_x = grad_rows @ (weight.t() if ctx.transposed else weight)
                grad_x = grad_x.view(*grad_y.shape[:-1], grad_x.shape[-1])
            if ctx.of_weight is not None:
                product = _weight_gradient(ctx, x, grad_rows) if ctx.of_weight.wanted() else None
                ctx.of_weight.collect(product)
            if ctx.of_bias is not None:
                ctx.of_bias.collect(_bias_gradient(product, grad_rows) if ctx.of_bias.wanted() else None)
            if ctx.needs_input_grad[1]:
                grad_weight = _weight_gradient(ctx, x, grad_rows).dense().values.to(ctx.weight_dtype)
            if ctx.needs_input_grad[2]:
                grad_bias = grad_rows.sum(0).to(ctx.weight_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None, None, None


def _weight_gradient(ctx: Any, x: Tensor | None, grad_rows: Tensor) -> Product:
    return linear_gradient(ctx.again() if x is None else x, grad_rows, ctx.transposed)


def _bias_gradient(product: Product | None, grad_rows: Tensor) -> Gradient:
    """The sum of the output gradients (n, out), which the weight's gradient may know: it has them on its left."""
    if product is None or product.left is not grad_rows or product.left_sum is None:
        return Gradient(grad_rows.sum(0, keepdim=True))
    return Gradient(product.left_sum[None])
