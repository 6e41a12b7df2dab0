"""The masked layers under ``torch.compile``: operators that it does not trace into; imported while it compiles.

    forward    y = use(x, W, b, root, handles)         the plain layer's arithmetic; announces the use
    backward   grad_x = grad_y W                       left to the compiler
               s = collect(root, grad_y, x, handles)   hands the weight's gradient over, as the eager node does
               grad_root = s                           empty: it keeps ``collect`` in the graph, before the commit

No Python object can travel from a compiled forward to its backward, so a tensor is known by its *handle*, and the
collector counts the uses that were announced. A ``serial`` number, another for every use in a graph, keeps the compiler
from merging two uses on the same numbers.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsify.core.gradients import DenseGradient, Gradient, linear_gradient, row_gradient, tap_gradient
from sparsify.core.layers import linear
from sparsify.masked.tensor import tensor_of

_SERIALS = itertools.count()
_TAGS = {"tags": torch.Tag.cudagraph_unsafe} if hasattr(torch.Tag, "cudagraph_unsafe") else {}  # they run Python
_operator: Any = partial(torch.library.custom_op, mutates_args=(), **_TAGS)


def compute(kind: str, x: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes the output of a layer of one kind: "linear", "transposed", "embedding" or "tap"."""
    if kind == "tap":
        return weight.clone()
    if kind == "embedding":
        return F.embedding(x, weight)
    return linear(x, weight, bias, kind == "transposed")


def _gradient(kind: str, x: Any, grad_y: Tensor, shape: torch.Size) -> Gradient:
    if kind == "tap":
        return tap_gradient(grad_y)
    if kind == "embedding":
        return row_gradient(x, grad_y, shape[0])
    # to x's dtype: autocast around backward() reaches into the graph before this
    return linear_gradient(x, grad_y.reshape(-1, grad_y.shape[-1]).to(x.dtype), kind == "transposed")


@torch.compiler.assume_constant_result
def made_ready(handle: Tensor) -> bool:
    """Makes the root anchor while a graph is compiled; not traced, so that an error reaches the caller unchanged."""
    collector: Any = tensor_of(handle).collector
    collector.weights.freeze()
    collector.use(())  # refuses to be exported, too
    return True


@torch.compiler.disable
def untraced(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function outside of any compiled graph, which ends before it."""
    return function(*args)


@torch.compiler.assume_constant_result
def serial() -> int:
    return next(_SERIALS)


@_operator("sparsify::use")
def _run_use(
    kind: str, x: Tensor | None, weight: Tensor, bias: Tensor | None, root: Tensor, of_weight: Tensor | None,
    of_bias: Tensor | None, training: bool, serial: int,
) -> Tensor:  # fmt: skip
    for handle in (of_weight, of_bias) if training else ():
        if handle is not None:
            tensor = tensor_of(handle)
            tensor.collector.compiled.count_use(tensor)
    return compute(kind, x, weight, bias)


@_operator("sparsify::collect")
def _run_collect(
    kind: str, root: Tensor, grad_y: Tensor, x: Tensor | None, of_weight: Tensor | None, of_bias: Tensor | None,
    serial: int,
) -> Tensor:  # fmt: skip
    if of_bias is not None:
        bias = tensor_of(of_bias)
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        bias.collector.compiled.collect(bias, rows.device, lambda: DenseGradient(rows.sum(0, keepdim=True)))
    if of_weight is not None:
        weight = tensor_of(of_weight)
        weight.collector.compiled.collect(weight, grad_y.device, lambda: _gradient(kind, x, grad_y, weight.shape))
    return torch.zeros_like(root)


@_operator("sparsify::refresh")
def _run_refresh(root: Tensor, handle: Tensor) -> Tensor:
    step: Any = tensor_of(handle).collector
    step.refresh()
    return root.clone()


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.kind, x, weight, _, root, of_weight, of_bias, _, ctx.serial = inputs
    needs_x = of_weight is not None or ctx.needs_input_grad[2]
    ctx.save_for_backward(x if needs_x else None, weight if ctx.needs_input_grad[1] else None, root, of_weight, of_bias)


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, root, of_weight, of_bias = ctx.saved_tensors
    grad_x = grad_weight = grad_bias = None
    if ctx.needs_input_grad[1]:  # a linear layer's, as all that follows
        grad_x = grad_y @ (weight.t() if ctx.kind == "transposed" else weight)
    if ctx.needs_input_grad[2]:  # a weight trained densely, its bias masked
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        grad_weight = linear_gradient(x, rows, ctx.kind == "transposed").dense().values
    if ctx.needs_input_grad[3]:
        grad_bias = grad_y.reshape(-1, grad_y.shape[-1]).sum(0)
    x = None if of_weight is None else x
    grad_root = _run_collect(ctx.kind, root, grad_y, x, of_weight, of_bias, ctx.serial)
    return None, grad_x, grad_weight, grad_bias, grad_root, None, None, None, None


_run_use.register_fake(lambda kind, x, weight, bias, *_: torch.empty_like(compute(kind, x, weight, bias)))
_run_use.register_autograd(_backward, setup_context=_save)
_run_collect.register_fake(lambda kind, root, *_: torch.empty_like(root))
_run_refresh.register_fake(lambda root, _: torch.empty_like(root))
_run_refresh.register_autograd(lambda ctx, grad: (grad, None))
