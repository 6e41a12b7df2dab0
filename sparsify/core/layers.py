"""Linear layers and embeddings whose weight gradient exists only inside their backward node.

    linear      y = x W^T + b        the plain layer's one matmul, W holds the effective values
                grad_x = grad_y W    as in the plain layer
                grad_W, grad_b       handed to ``collect``: grad_y^T x as its two factors, and the sum of grad_y
    embedding   y = W[ids]
                grad_W               one row per distinct id, handed to ``collect``

The weight is never differentiated: the node's other input, the root, is how autograd reaches the flat delta.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsify.core.gradients import DenseGradient, Gradient, linear_gradient, row_gradient
from sparsify.core.module import MaskedModule, count_use, without_autocast
from sparsify.core.tensor import MaskedTensor, Use


class MaskedLinearModule(MaskedModule):
    """A module with ``weight`` (out, in), or (in, out) if ``transposed``, and ``bias`` (out,)."""

    transposed: ClassVar[bool] = False

    def forward(self, input: Tensor) -> Tensor:
        """Returns the plain layer's output (..., out) for an input (..., in)."""
        if torch.compiler.is_dynamo_compiling():
            tensor = next(iter(self._masked_tensors.values()))
            return tensor.collector.compiled.linear(self, input, self.transposed)
        parameters, use = count_use(self)
        weight, bias = parameters["weight"], parameters.get("bias")
        masked = self._masked_tensors.get("weight")
        if use is None and (masked is None or not weight.requires_grad):
            return linear(input, weight, bias, self.transposed)
        dtype = autocast_dtype(input)
        short = input if dtype is None else input.to(dtype)
        with next(iter(self._masked_tensors.values())).collector.saving(input, short, always=use is not None):
            if use is None:  # the weight is a tap
                return linear(short, weight, bias, self.transposed)
            return run_linear(short, weight, bias, LinearCall(use, masked, dtype, self.transposed))


class MaskedLinear(MaskedLinearModule, nn.Linear):
    """An ``nn.Linear`` whose frozen weight and bias are trained at their unmasked entries; made in place."""


class MaskedEmbedding(MaskedModule, nn.Embedding):
    """An ``nn.Embedding`` whose frozen table is trained at its unmasked entries, ``padding_idx`` by no lookup."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns the rows (..., dim) of the table for ids (...)."""
        masked, padding = self._masked_tensors["weight"], self.padding_idx
        if torch.compiler.is_dynamo_compiling():
            rows = masked.collector.compiled.embedding(self, input)
        else:
            parameters, use = count_use(self)
            if use is None:
                return F.embedding(input, parameters["weight"], padding)
            rows = _Embedding.apply(input, parameters["weight"], use, use.root)
        if padding is None or padding == masked.frozen_row:  # which is no candidate
            return rows
        return torch.where(input.eq(padding)[..., None], rows.detach(), rows)


class LinearCall(NamedTuple):
    """One call of a masked linear layer, beyond the tensors that it computes with."""

    use: Use | None  # None where no gradient is collected
    masked: MaskedTensor | None  # the weight, where it is masked
    dtype: torch.dtype | None  # to compute in; None for the operands' own
    transposed: bool = False  # whether the weight is (in, out)
    dequantize: Callable[[], Tensor] | None = None  # makes the weight; None where it is not quantized


def run_linear(x: Tensor, weight: Any, bias: Any, call: LinearCall) -> Tensor:
    """Computes a linear layer by a node that collects the gradients of the call's use."""
    root = None if call.use is None else call.use.root
    if call.dtype is None:  # autocast is off, or leaves x alone
        return _Linear.apply(x, weight, bias, call, root)
    with torch.autocast(x.device.type, enabled=False):
        return _Linear.apply(x, weight, bias, call, root)


def linear(x: Tensor, weight: Any, bias: Tensor | None, transposed: bool) -> Tensor:
    """Computes the plain layer's output, bit for bit: ``nn.Linear``'s, or if ``transposed`` transformers' Conv1D's."""
    if not transposed:
        return F.linear(x, weight, bias)
    assert bias is not None
    rows = torch.addmm(bias, x.view(-1, x.shape[-1]), weight)
    return rows.view(*x.shape[:-1], weight.shape[1])


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype that autocast computes in, ``None`` where it is off or leaves ``x`` alone."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or not x.is_floating_point() or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, call: LinearCall, root: Tensor | None) -> Tensor:
        is_dense = ctx.needs_input_grad[1]  # a weight trained densely, its bias masked
        needs_x = is_dense or (call.use is not None and call.masked in call.use.tensors)
        ctx.save_for_backward(x if needs_x else None, weight)
        ctx.call = call
        weight = weight if call.dequantize is None else call.dequantize()
        if call.dtype is not None:
            x, weight, bias = x.to(call.dtype), weight.to(call.dtype), None if bias is None else bias.to(call.dtype)
        y = linear(x, weight, bias, call.transposed)
        return y.data  # no longer a view of a matrix: models write into a layer's output, as in ``q /= sqrt(dim)``

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        call: LinearCall = ctx.call
        grad_rows = grad_y.reshape(-1, grad_y.shape[-1]).contiguous()  # (n, out)
        grad_x = grad_weight = grad_bias = None
        with without_autocast(grad_y.device):
            if ctx.needs_input_grad[0]:
                weight = (weight if call.dequantize is None else call.dequantize()).to(grad_rows.dtype)
                grad_x = grad_rows @ (weight.t() if call.transposed else weight)
                grad_x = grad_x.view(*grad_y.shape[:-1], grad_x.shape[-1])
            if call.use is not None:
                call.use.collect(grad_y.device, partial(_gradient, call, x, grad_rows))
            if ctx.needs_input_grad[1]:
                grad_weight = _gradient(call, x, grad_rows, call.masked).dense().values
            if ctx.needs_input_grad[2]:
                grad_bias = grad_rows.sum(0)
        return grad_x, grad_weight, grad_bias, None, None  # autograd casts them to the operands' dtypes


def _gradient(call: LinearCall, x: Tensor, grad_rows: Tensor, tensor: MaskedTensor | None) -> Gradient:
    """The gradient of the weight of a call, or else of its bias."""
    if tensor is not call.masked:
        return DenseGradient(grad_rows.sum(0)[None])
    return linear_gradient(x.to(grad_rows.dtype), grad_rows, call.transposed)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, use: Use, root: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.use, ctx.height = use, weight.shape[0]
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        ctx.use.collect(grad_y.device, lambda tensor: row_gradient(ids, grad_y, ctx.height))
        return None, None, None, None
