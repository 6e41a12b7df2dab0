"""The masked layers as ``torch.compile`` sees them: operators that it need not look into.

    forward    y = linear(x, W, b, root, handles)     the plain layer's arithmetic; the use is announced
    backward   grad_x = grad_y W                      left to the compiler
               s = collect_linear(grad_y, x, handles) hands the weight's gradient over, as the eager node does
               grad_root = s                          empty: it keeps ``collect`` alive, and before the commit

In a compiled graph no Python object can travel from a forward to its backward, so a *handle* says which tensor is
meant, and the collector counts the uses that were announced. ``root`` is the root anchor, an input of every use:
through it autograd reaches the flat delta after the last of them. A ``serial`` number, another for every use in a
graph, keeps the compiler from taking two uses on the same numbers for one.

Imported only while something is compiled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsify.masked.arithmetic import autocast_dtype, linear, linear_gradient, row_gradient, tap_gradient
from sparsify.masked.handles import held_by
from sparsify.masked.module import check_not_exported, frozen_if_masked, masked_tensors
from sparsify.masked.tensor import Gradient, MaskedTensor, Use

_SERIALS = itertools.count()


# -------------------------------------------------------------------------------- what is traced


def compiled_linear(module: Any, x: Tensor, transposed: bool) -> Tensor:
    """What ``masked_linear`` computes."""
    of_weight, of_bias = _trainable(module, "weight"), _trainable(module, "bias")
    weight, bias = frozen_if_masked(module, "weight"), frozen_if_masked(module, "bias")
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    either = of_weight if of_weight is not None else of_bias
    if either is None:
        return linear(x, weight, bias, transposed)
    root = either.collector.compiled.root_anchor
    with torch.autocast(x.device.type, enabled=False):
        return _OPS.linear(
            x,
            weight,
            bias,
            root,
            None if of_weight is None else of_weight.handle,
            None if of_bias is None else of_bias.handle,
            transposed,
            _is_training(root),
            _serial(),
        )


def compiled_embedding(module: Any, ids: Tensor, padding_idx: int | None) -> Tensor:
    """What a masked embedding computes."""
    tensor, table = _trainable(module, "weight"), frozen_if_masked(module, "weight")
    if tensor is None:
        return F.embedding(ids, table, padding_idx)
    root = tensor.collector.compiled.root_anchor
    return _OPS.embedding(ids, table, root, tensor.handle, padding_idx, _is_training(root), _serial())


def compiled_tap(tensor: MaskedTensor, parameter: Tensor) -> Tensor:
    """What stands for a masked parameter where a module's own code uses it."""
    if not tensor.collector.compiled.trains(tensor):
        return parameter.detach()
    root = tensor.collector.compiled.root_anchor
    return _OPS.tap(parameter.detach(), root, tensor.handle, _is_training(root), _serial())


def refreshed_root(root: Tensor, handle: Tensor) -> Tensor:
    """The root anchor of a forward pass whose masked weights are in step with the flat delta."""
    return _OPS.refresh(root, handle)


@torch.compiler.assume_constant_result
def made_ready(handle: Tensor) -> bool:
    """Has the root anchor made while a graph is compiled; afterwards it is found there.

    Raises:
        SparsifyError: where the graph is one of ``torch.export``. The compiler does not trace this function, so
            that the error reaches the caller as it is.
    """
    check_not_exported()
    held_by(handle).collector.compiled.make_root()
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


# -------------------------------------------------------------------------------- what runs


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    root: Tensor,
    of_weight: Tensor | None,
    of_bias: Tensor | None,
    transposed: bool,
    training: bool,
    serial: int,
) -> Tensor:
    _announce(training, of_weight, of_bias)
    return linear(x, weight, bias, transposed)


def _collect_linear(
    grad_rows: Tensor,
    x: Tensor | None,
    root: Tensor,
    of_weight: Tensor | None,
    of_bias: Tensor | None,
    transposed: bool,
    serial: int,
) -> Tensor:
    if of_bias is not None:
        use = _announced(of_bias)
        use.collect(Gradient(grad_rows.sum(0, keepdim=True)) if use.wanted() else None)
    if of_weight is not None:
        assert x is not None
        use = _announced(of_weight)
        grad_rows = grad_rows.to(x.dtype)  # autocast around backward() reaches into the graph before this
        use.collect(linear_gradient(x, grad_rows, transposed) if use.wanted() else None)
    return torch.zeros_like(root)


def _embedding(
    ids: Tensor, table: Tensor, root: Tensor, handle: Tensor, padding_idx: int | None, training: bool, serial: int
) -> Tensor:
    _announce(training, handle)
    return F.embedding(ids, table)


def _collect_rows(
    grad: Tensor, ids: Tensor, root: Tensor, handle: Tensor, padding_idx: int | None, serial: int
) -> Tensor:
    use = _announced(handle)
    use.collect(row_gradient(ids, grad, padding_idx) if use.wanted() else None)
    return torch.zeros_like(root)


def _tap(parameter: Tensor, root: Tensor, handle: Tensor, training: bool, serial: int) -> Tensor:
    _announce(training, handle)
    return parameter.clone()


def _collect(grad: Tensor, root: Tensor, handle: Tensor, serial: int) -> Tensor:
    use = _announced(handle)
    use.collect(tap_gradient(grad) if use.wanted() else None)
    return torch.zeros_like(root)


def _refresh(root: Tensor, handle: Tensor) -> Tensor:
    held_by(handle).collector.compiled.refresh()
    return root.clone()


def _announce(training: bool, *handles: Tensor | None) -> None:
    for handle in handles if training else ():
        if handle is not None:
            tensor: MaskedTensor = held_by(handle)
            tensor.collector.compiled.announce(tensor)


def _announced(handle: Tensor) -> Use:
    tensor: MaskedTensor = held_by(handle)
    return tensor.collector.compiled.use(tensor)


# -------------------------------------------------------------------------------- how autograd goes through it


def _save_linear(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, weight, _, root, of_weight, of_bias, ctx.transposed, _, ctx.serial = inputs
    needs_x = of_weight is not None or ctx.needs_input_grad[1]
    ctx.save_for_backward(x if needs_x else None, weight, root, of_weight, of_bias)


def _linear_backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, root, of_weight, of_bias = ctx.saved_tensors
    grad_rows = grad_y.reshape(-1, grad_y.shape[-1])  # (n, out)
    grad_x = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = grad_y @ (weight.t() if ctx.transposed else weight)
    if ctx.needs_input_grad[1]:  # trained dense beside a masked bias
        left, right = grad_rows, x.reshape(-1, x.shape[-1])
        grad_weight = right.t() @ left if ctx.transposed else left.t() @ right
    if ctx.needs_input_grad[2]:
        grad_bias = grad_rows.sum(0)
    grad_root = _OPS.collect_linear(
        grad_rows, None if of_weight is None else x, root, of_weight, of_bias, ctx.transposed, ctx.serial
    )
    return grad_x, grad_weight, grad_bias, grad_root, None, None, None, None, None


def _save_embedding(ctx: Any, inputs: Any, output: Tensor) -> None:
    ids, _, root, handle, ctx.padding_idx, _, ctx.serial = inputs
    ctx.save_for_backward(ids, root, handle)


def _embedding_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    ids, root, handle = ctx.saved_tensors
    grad_root = _OPS.collect_rows(grad, ids, root, handle, ctx.padding_idx, ctx.serial)
    return None, None, grad_root, None, None, None, None


def _save_tap(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, root, handle, _, ctx.serial = inputs
    ctx.save_for_backward(root, handle)


def _tap_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    root, handle = ctx.saved_tensors
    return None, _OPS.collect(grad, root, handle, ctx.serial), None, None, None


def _refresh_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


# -------------------------------------------------------------------------------- operators

_LIBRARY = torch.library.Library("sparsify", "DEF")
_OPS: Any = torch.ops.sparsify
_TAGS = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []  # they run Python


def _scalar(root: Tensor) -> Tensor:
    return torch.empty_like(root)


def _define(schema: str, run: Any, shape: Any) -> None:
    """An operator: what it does, and for the compiler what its output looks like."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(name, torch.compiler.disable(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"sparsify::{name}", shape, lib=_LIBRARY)


def _differentiate(name: str, backward: Any, save: Any) -> None:
    torch.library.register_autograd(f"sparsify::{name}", backward, setup_context=save, lib=_LIBRARY)


_define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor root, Tensor? of_weight, Tensor? of_bias, bool transposed, "
    "bool training, int serial) -> Tensor",
    _linear,
    lambda x, weight, bias, root, of_weight, of_bias, transposed, training, serial: torch.empty_like(
        linear(x, weight, bias, transposed)
    ),
)
_define(
    "collect_linear(Tensor grad_rows, Tensor? x, Tensor root, Tensor? of_weight, Tensor? of_bias, bool transposed, "
    "int serial) -> Tensor",
    _collect_linear,
    lambda grad_rows, x, root, of_weight, of_bias, transposed, serial: _scalar(root),
)
_define(
    "embedding(Tensor ids, Tensor table, Tensor root, Tensor handle, int? padding_idx, bool training, int serial) "
    "-> Tensor",
    _embedding,
    lambda ids, table, root, handle, padding_idx, training, serial: F.embedding(ids, table),
)
_define(
    "collect_rows(Tensor grad, Tensor ids, Tensor root, Tensor handle, int? padding_idx, int serial) -> Tensor",
    _collect_rows,
    lambda grad, ids, root, handle, padding_idx, serial: _scalar(root),
)
_define(
    "tap(Tensor parameter, Tensor root, Tensor handle, bool training, int serial) -> Tensor",
    _tap,
    lambda parameter, root, handle, training, serial: torch.empty_like(parameter),
)
_define(
    "collect(Tensor grad, Tensor root, Tensor handle, int serial) -> Tensor",
    _collect,
    lambda grad, root, handle, serial: _scalar(root),
)
_define("refresh(Tensor root, Tensor handle) -> Tensor", _refresh, lambda root, handle: _scalar(root))
_differentiate("linear", _linear_backward, _save_linear)
_differentiate("embedding", _embedding_backward, _save_embedding)
_differentiate("tap", _tap_backward, _save_tap)
_differentiate("refresh", _refresh_backward, lambda ctx, inputs, output: None)
