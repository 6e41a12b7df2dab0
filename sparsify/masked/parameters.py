"""Masked parameters that are read outside of the model's forward, as by a loss or a penalty of a user's own.

Each parameter has a class of its own, whose operations are those of its tap wherever autograd records them: it may come
from ``model.parameters()``, or from an attribute of a module.
"""

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from sparsify.common.quantized import is_quantized
from sparsify.common.shards import is_shard
from sparsify.core.taps import CHANGED, ReadParameters, tap
from sparsify.errors import SparsifyError

NO_GRADIENT = (
    "has no gradient of its own: torch.autograd.grad() and hooks work on `model.sparse_values`, which has that of all "
    "trained entries."
)
LOST = (
    "was given to {} outside of the model's forward, and its gradient would be lost: give it weight.view_as(weight), "
    "which is followed, or weight.detach() where no gradient is wanted."
)
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_OF_GRADIENTS = (torch.autograd.grad, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
_SWITCHES = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_RECORDED = {"_weight_norm", "_grouped_mm"}  # private functions, and autograd records them all the same
_VIEWS = {"T", "mT", "H", "mH", "real", "imag"}  # the properties that autograd records
# methods that concern the parameter itself, or that autograd does not record, beside private ones and is_...()
_OF_ITSELF = {
    "__array__", "__deepcopy__", "__dlpack__", "__format__", "__len__", "__reduce_ex__", "__repr__", "backward",
    "data_ptr", "detach", "dim", "element_size", "get_device", "numel", "numpy", "register_hook",
    "register_post_accumulate_grad_hook", "retain_grad", "size", "storage_offset", "stride", "tolist",
    "untyped_storage",
}  # fmt: skip


class MaskedParameter(nn.Parameter):
    """A masked parameter, given this class in place: autograd records operations on its taps."""

    masked_tensor: Any = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter, (self.data, self.requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        traced = torch.compiler.is_dynamo_compiling()
        if not traced and func is Tensor.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            return Tensor._make_subclass(cls, *args)  # nn.Parameter(parameter) insists on one of its own class
        if func in _SWITCHES and args[0].masked_tensor is not None:
            requires_grad = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            args[0].masked_tensor.collector.weights.set_frozen(args[0].masked_tensor, not requires_grad)
        elif not traced:
            _check_followed(func, (args, kwargs), sys._getframe(1))
        if not torch.is_grad_enabled() or not _is_recorded(func, args, kwargs):
            with torch._C.DisableTorchFunction():  # in a mode, as of a default device, Dynamo would come back here
                return func(*args, **kwargs)
        taps: list[tuple[Any, MaskedParameter]] = []

        def tapped(parameter: MaskedParameter) -> Any:
            tensor = parameter.masked_tensor
            if tensor is not None and traced:
                return tensor.collector.compiled.tap(tensor, parameter)
            read = parameter.view_as(parameter) if tensor is None else tap(parameter, tensor)
            taps.append((read, parameter))
            return read

        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(MaskedParameter, tapped, (args, kwargs))
        result = func(*args, **kwargs)
        return next((parameter for read, parameter in taps if read is result), result)  # to() may change nothing


def _check_followed(func: Callable[..., Any], arguments: Any, frame: FrameType) -> None:
    """Raises where a parameter's gradient is asked for, or would be lost in a call from a frame."""
    if func in _OF_GRADIENTS:
        problem = NO_GRADIENT
    elif func is Tensor.dim and frame.f_globals.get("__name__") == "torch._functorch.vmap":
        problem = LOST.format("torch.vmap")
    elif torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled():
        return
    elif _is_in_function(frame):
        problem = LOST.format("a torch.autograd.Function")
    else:
        return
    found = [own.masked_tensor for own in tree_leaves(arguments) if isinstance(own, MaskedParameter)]
    for tensor in [each for each in found if each is not None]:
        step = tensor.collector
        if problem is NO_GRADIENT or not (step.in_forward or step.paused or tensor in step.frozen):
            raise SparsifyError(f"`{tensor.name}` {problem}")


def _is_in_function(frame: Any) -> bool:
    """Whether a frame is within the forward of a user's ``autograd.Function`` that backward will reach."""
    while frame.f_back and frame.f_back.f_code is not _APPLY:
        frame = frame.f_back
    if not frame.f_back or frame.f_globals.get("__name__", "").startswith("torch."):  # as of a compiled graph
        return False
    inputs = [each for each in tree_leaves([*frame.f_locals.values()]) if isinstance(each, Tensor)]
    return any(type(each) is not MaskedParameter and each.requires_grad for each in inputs)


def _is_recorded(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether autograd records what a function computes of its arguments."""
    kind = _kind(func)
    if kind == "in place":  # torch.nn.init names its tensor
        target = args[0] if args else kwargs["tensor"]
        return not any(isinstance(own, MaskedParameter) for own in tree_leaves(target))
    return kind == "recorded"


def _kind(func: Callable[..., Any]) -> str:
    name, is_operator = func.__name__, func.__name__.startswith("__")
    if name in ("__get__", "__set__", "__delete__"):
        is_view = name == "__get__" and getattr(func, "__self__", func).__name__ in _VIEWS
        return "recorded" if is_view else "of itself"
    is_private = name.startswith("_") and not (is_operator or name.startswith("_foreach_") or name in _RECORDED)
    if name in _OF_ITSELF or name.startswith("is_") or is_private:
        return "of itself"
    in_place = name.startswith(("__i", "__set")) if is_operator else name.endswith("_")
    return "in place" if in_place else "recorded"


# as torch.compiler.assume_constant_result() does, which imports the compiler
_kind._dynamo_marked_constant = True  # type: ignore[attr-defined]


class FollowedParameters(ReadParameters):
    """A module's parameters by name; the masked ones have the class that follows them."""

    def __setitem__(self, attribute: str, parameter: Any) -> None:
        tensor: Any = self.__dict__.get("tensors", {}).get(attribute)
        other: Any = getattr(parameter, "masked_tensor", None)
        is_other = other not in (None, tensor)
        if tensor is not None and (is_other or is_quantized(parameter) > tensor.is_quantized):
            problem = f"was {f'tied to `{other.name}`' if is_other else 'quantized'} after sparsify()"
            raise SparsifyError(CHANGED.format(name=tensor.name, problem=problem))
        super().__setitem__(attribute, parameter)

    def keep(self, attribute: str, parameter: Any) -> None:
        super().keep(attribute, parameter)
        tensor = self.tensors[attribute]
        if is_shard(parameter) and not (getattr(tensor, "is_parallel", True) or tensor.collector.was_sharded):
            tensor.collector.weights.mark_stale()  # by fully_shard(), or it is refused; a copy's tensor may come later
            tensor.collector.groups.pop(tensor, None)
        if type(parameter) is nn.Parameter and not tensor.is_quantized:
            parameter.__class__ = MaskedParameter
        if type(parameter) is MaskedParameter:
            parameter.masked_tensor = tensor

    def plain(self) -> dict[str, Any]:
        for parameter in self.values():
            if type(parameter) is MaskedParameter:
                del parameter.masked_tensor
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        return super().plain()


class LocalParameters(FollowedParameters):
    """Those of experts, of which transformers takes what this rank holds, by ``items()``, in their forward."""

    def items(self) -> Any:
        return {attribute: self[attribute] for attribute in self}.items()
