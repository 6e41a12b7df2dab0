"""The masked layers under ``torch.compile``: operators that it does not trace into.

    forward    y = linear(x, W, b, root, handles)     the plain layer's arithmetic; announces the use
    backward   grad_x = grad_y W                      left to the compiler
               s = collect_linear(root, grad_y, x, handles)   hands the weight's gradient over, as the eager node does
               grad_root = s                          empty: it keeps ``collect`` in the graph, before the commit

No Python object can travel from a compiled forward to its backward, so a tensor is known by its *handle*, and the
collector counts the uses that were announced. ``root`` is the root anchor, an input of every use: through it autograd
reaches the flat delta after the last of them. A ``serial`` number, another for every use in a graph, keeps the compiler
from merging two uses on the same numbers.

Imported only while something is compiled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsify.masked.gradients import DenseGradient, Gradient, linear_gradient, row_gradient, tap_gradient
from sparsify.masked.module import autocast_dtype, check_not_exported, frozen_if_masked, linear, masked_tensors
from sparsify.masked.tensor import MaskedTensor, tensor_of

Function = TypeVar("Function", bound=Callable[..., Any])

_SERIALS = itertools.count()
_LIBRARY = torch.library.Library("sparsify", "DEF")
_OPS: Any = torch.ops.sparsify
_TAGS = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []  # they run Python


# -------------------------------------------------------------------------------- called while a graph is traced


def compiled_linear(module: Any, x: Tensor, transposed: bool) -> Tensor:
    """Computes ``masked_linear``."""
    of_weight, of_bias = _trainable(module, "weight"), _trainable(module, "bias")
    weight, bias = frozen_if_masked(module, "weight"), frozen_if_masked(module, "bias")
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    either = of_weight if of_weight is not None else of_bias
    if either is None:
        return linear(x, weight, bias, transposed)
    root = either.collector.compiled.root_anchor
    handles = [None if tensor is None else tensor.handle for tensor in (of_weight, of_bias)]
    with torch.autocast(x.device.type, enabled=False):
        return _OPS.linear(x, weight, bias, root, *handles, transposed, _is_training(root), _serial())


def compiled_embedding(module: Any, ids: Tensor, padding_idx: int | None) -> Tensor:
    """Computes a masked embedding."""
    tensor, table = _trainable(module, "weight"), frozen_if_masked(module, "weight")
    if tensor is None:
        return F.embedding(ids, table, padding_idx)
    root = tensor.collector.compiled.root_anchor
    return _OPS.embedding(ids, table, root, tensor.handle, padding_idx, _is_training(root), _serial())


def compiled_tap(tensor: MaskedTensor, parameter: Tensor) -> Tensor:
    """Returns the tap of a masked parameter."""
    if not tensor.collector.compiled.trains(tensor):
        return parameter.detach()
    root = tensor.collector.compiled.root_anchor
    return _OPS.tap(parameter.detach(), root, tensor.handle, _is_training(root), _serial())


def refreshed_root(root: Tensor, handle: Tensor) -> Tensor:
    """Returns the root anchor of a forward pass, which begins by updating the weights to the flat delta."""
    return _OPS.refresh(root, handle)


@torch.compiler.assume_constant_result
def made_ready(handle: Tensor) -> bool:
    """Makes the root anchor while a graph is compiled.

    Raises:
        SparsifyError: when the graph is one of ``torch.export``. The compiler does not trace this function, so that the
            error reaches the caller unchanged.
    """
    check_not_exported()
    tensor_of(handle).collector.compiled.make_root()
    return True


@torch.compiler.disable
def untraced(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function outside of any compiled graph, which ends before it."""
    return function(*args)


def _trainable(module: Any, attribute: str) -> MaskedTensor | None:
    tensor = masked_tensors(module).get(attribute)
    return None if tensor is None or not tensor.collector.compiled.trains(tensor) else tensor


def _is_training(root: Tensor) -> bool:
    return torch.is_grad_enabled() and root.requires_grad


@torch.compiler.assume_constant_result
def _serial() -> int:
    return next(_SERIALS)


# -------------------------------------------------------------------------------- operators


def _operator(schema: str, fake: Callable[..., Tensor]) -> Callable[[Function], Function]:
    """Defines an operator that runs the decorated function; ``fake`` gives its output's shape to the compiler."""

    def define(run: Function) -> Function:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=_TAGS)
        _LIBRARY.impl(name, torch.compiler.disable(run), "CompositeExplicitAutograd")
        torch.library.register_fake(f"sparsify::{name}", fake, lib=_LIBRARY)
        return run

    return define


def _backward_of(name: str, save: Callable[..., None]) -> Callable[[Function], Function]:
    """Registers the decorated function as an operator's backward, and ``save`` for its inputs."""

    def register(backward: Function) -> Function:
        torch.library.register_autograd(f"sparsify::{name}", backward, setup_context=save, lib=_LIBRARY)
        return backward

    return register


def _like_first(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first)


def _announce(training: bool, *handles: Tensor | None) -> None:
    for handle in handles if training else ():
        if handle is not None:
            tensor = tensor_of(handle)
            tensor.collector.compiled.announce(tensor)


def _collect(handle: Tensor, gradient: Callable[..., Gradient], *args: Any) -> None:
    """Hands over ``gradient(*args)``, or nothing where it is not wanted."""
    tensor = tensor_of(handle)
    tensor.collector.compiled.collect(tensor, gradient, *args)


@_operator(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor root, Tensor? of_weight, Tensor? of_bias, bool transposed, "
    "bool training, int serial) -> Tensor",
    lambda x, weight, bias, root, of_weight, of_bias, transposed, *_: torch.empty_like(
        linear(x, weight, bias, transposed)
    ),
)
def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, root: Tensor, of_weight: Tensor | None, of_bias: Tensor | None,
    transposed: bool, training: bool, serial: int,
) -> Tensor:  # fmt: skip
    _announce(training, of_weight, of_bias)
    return linear(x, weight, bias, transposed)


@_operator(
    "collect_linear(Tensor root, Tensor grad_rows, Tensor? x, Tensor? of_weight, Tensor? of_bias, bool transposed, "
    "int serial) -> Tensor",
    _like_first,
)
def _collect_linear(
    root: Tensor, grad_rows: Tensor, x: Tensor | None, of_weight: Tensor | None, of_bias: Tensor | None,
    transposed: bool, serial: int,
) -> Tensor:  # fmt: skip
    if of_bias is not None:
        _collect(of_bias, lambda: DenseGradient(grad_rows.sum(0, keepdim=True)))
    if of_weight is not None:
        assert x is not None
        # to x's dtype: autocast around backward() reaches into the graph before this
        _collect(of_weight, linear_gradient, x, grad_rows.to(x.dtype), transposed)
    return torch.zeros_like(root)


@_operator(
    "embedding(Tensor ids, Tensor table, Tensor root, Tensor handle, int? padding_idx, bool training, int serial) "
    "-> Tensor",
    lambda ids, table, *_: F.embedding(ids, table),
)
def _embedding(
    ids: Tensor, table: Tensor, root: Tensor, handle: Tensor, padding_idx: int | None, training: bool, serial: int
) -> Tensor:
    _announce(training, handle)
    return F.embedding(ids, table)


@_operator(
    "collect_rows(Tensor root, Tensor grad, Tensor ids, Tensor handle, int? padding_idx, int serial) -> Tensor",
    _like_first,
)
def _collect_rows(
    root: Tensor, grad: Tensor, ids: Tensor, handle: Tensor, padding_idx: int | None, serial: int
) -> Tensor:
    _collect(handle, row_gradient, ids, grad, padding_idx)
    return torch.zeros_like(root)


@_operator("tap(Tensor parameter, Tensor root, Tensor handle, bool training, int serial) -> Tensor", _like_first)
def _tap(parameter: Tensor, root: Tensor, handle: Tensor, training: bool, serial: int) -> Tensor:
    _announce(training, handle)
    return parameter.clone()


@_operator("collect(Tensor root, Tensor grad, Tensor handle, int serial) -> Tensor", _like_first)
def _collect_tap(root: Tensor, grad: Tensor, handle: Tensor, serial: int) -> Tensor:
    _collect(handle, tap_gradient, grad)
    return torch.zeros_like(root)


@_operator("refresh(Tensor root, Tensor handle) -> Tensor", _like_first)
def _refresh(root: Tensor, handle: Tensor) -> Tensor:
    tensor_of(handle).collector.compiled.refresh()
    return root.clone()


# -------------------------------------------------------------------------------- their derivatives


def _save_linear(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, weight, _, root, of_weight, of_bias, ctx.transposed, _, ctx.serial = inputs
    needs_x = of_weight is not None or ctx.needs_input_grad[1]
    ctx.save_for_backward(x if needs_x else None, weight, root, of_weight, of_bias)


@_backward_of("linear", _save_linear)
def _linear_backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, root, of_weight, of_bias = ctx.saved_tensors
    grad_rows = grad_y.reshape(-1, grad_y.shape[-1])  # (n, out)
    grad_x = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = grad_y @ (weight.t() if ctx.transposed else weight)
    if ctx.needs_input_grad[1]:  # a weight trained densely, its bias masked
        left, right = grad_rows, x.reshape(-1, x.shape[-1])
        grad_weight = right.t() @ left if ctx.transposed else left.t() @ right
    if ctx.needs_input_grad[2]:
        grad_bias = grad_rows.sum(0)
    x = None if of_weight is None else x
    grad_root = _OPS.collect_linear(root, grad_rows, x, of_weight, of_bias, ctx.transposed, ctx.serial)
    return grad_x, grad_weight, grad_bias, grad_root, None, None, None, None, None


def _save_embedding(ctx: Any, inputs: Any, output: Tensor) -> None:
    ids, _, root, handle, ctx.padding_idx, _, ctx.serial = inputs
    ctx.save_for_backward(ids, root, handle)


@_backward_of("embedding", _save_embedding)
def _embedding_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    ids, root, handle = ctx.saved_tensors
    grad_root = _OPS.collect_rows(root, grad, ids, handle, ctx.padding_idx, ctx.serial)
    return None, None, grad_root, None, None, None, None


def _save_tap(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, root, handle, _, ctx.serial = inputs
    ctx.save_for_backward(root, handle)


@_backward_of("tap", _save_tap)
def _tap_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    root, handle = ctx.saved_tensors
    return None, _OPS.collect(root, grad, handle, ctx.serial), None, None, None


@_backward_of("refresh", lambda ctx, inputs, output: None)
def _refresh_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None
