"""Taps: how a masked parameter is read by anything but a masked layer: by norms, convolutions, experts, losses.

A tap is the identity; its node receives the parameter's whole gradient and hands it to ``collect``. An attribute that
is read in the model's forward is a tap, which autograd functions of one's own see too. Elsewhere, as in a loss or a
penalty on ``model.parameters()``, an operation on the parameter is one on a tap wherever autograd records it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from sparsify.core.gradients import tap_gradient
from sparsify.core.tensor import MaskedTensor, Use

_TENSORS: Any = WeakIdKeyDictionary()  # parameter -> weak reference to its masked tensor
_VIEWS = {"T", "mT", "H", "mH", "real", "imag"}  # the properties that autograd records
# methods that concern the parameter itself, or that autograd does not record, beside private ones and is_...()
_OF_ITSELF = {
    "__array__", "__deepcopy__", "__dlpack__", "__format__", "__len__", "__reduce_ex__", "__repr__", "backward",
    "data_ptr", "detach", "dim", "element_size", "get_device", "numel", "numpy", "register_hook",
    "register_post_accumulate_grad_hook", "retain_grad", "size", "storage_offset", "stride", "tolist",
    "untyped_storage",
}  # fmt: skip


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, use: Use, root: Tensor) -> Tensor:
        ctx.use = use
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        if ctx.use.begin():
            ctx.use.collect(tap_gradient(grad))
        return None, None, None


def tap(parameter: Any, tensor: MaskedTensor) -> Any:
    """Returns a tap of a masked parameter; the parameter itself where no gradient will be collected."""
    use = tensor.collector.read(tensor)
    if use is None:
        return parameter
    read = _Tap.apply(parameter, use, use.root)
    read._is_param = True  # to isinstance(), as get_parameter() asks
    return read


class MaskedParameter(nn.Parameter):
    """A masked parameter, given this class in place: autograd records operations on its taps."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            return Tensor._make_subclass(cls, *args)  # nn.Parameter(parameter) insists on one of its own class
        if torch.compiler.is_dynamo_compiling() or not torch.is_grad_enabled() or not _is_recorded(func, args):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        taps: list[tuple[Any, MaskedParameter]] = []

        def tapped(parameter: MaskedParameter) -> Any:
            tensor = _TENSORS[parameter]() if parameter in _TENSORS else None
            read = parameter if tensor is None else tap(parameter, tensor)
            taps.append((read.detach() if read is parameter else read, parameter))
            return taps[-1][0]

        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map_only(MaskedParameter, tapped, (args, kwargs))
        result = func(*args, **kwargs)
        return next((parameter for read, parameter in taps if read is result), result)  # to() may change nothing


def _is_recorded(func: Callable[..., Any], args: Any) -> bool:
    """Whether autograd records what a function computes of its arguments."""
    name, is_operator = func.__name__, func.__name__.startswith("__")
    if name in ("__get__", "__set__", "__delete__"):
        return name == "__get__" and getattr(func, "__self__", func).__name__ in _VIEWS
    if name in _OF_ITSELF or name.startswith("is_") or (name.startswith("_") and not is_operator):
        return False
    in_place = name.startswith(("__i", "__set")) if is_operator else name.endswith("_")
    return not (in_place and isinstance(args[0], MaskedParameter))


class ReadParameters(dict[str, Any]):
    """A module's parameters by name; ``[]``, which ``module.weight`` uses, returns taps of the masked ones.

    ``get()``, ``items()`` and ``values()``, which this library, state dicts and ``named_parameters()`` use, return the
    parameters themselves.
    """

    def __init__(self, parameters: dict[str, Any], tensors: dict[str, MaskedTensor]) -> None:
        super().__init__(parameters)
        self.__setstate__(tensors)

    def __getstate__(self) -> dict[str, MaskedTensor]:
        return self.tensors

    def __setstate__(self, tensors: dict[str, MaskedTensor]) -> None:
        self.tensors = tensors  # the module's masked tensors by attribute name
        self.own: dict[str, Any] = {}  # the parameters of these; functional_call() replaces them for a while
        for attribute, parameter in self.items():
            self._own(attribute, parameter)

    def __getitem__(self, attribute: str) -> Any:
        parameter, tensor = super().__getitem__(attribute), self.tensors.get(attribute)
        if tensor is None or tensor.is_quantized or not parameter.is_leaf:  # no leaf: by functional_call()
            return parameter
        if torch.compiler.is_dynamo_compiling():
            return tensor.collector.compiled.tap(tensor, parameter)
        if parameter is not self.own[attribute] or not torch.is_grad_enabled() or not tensor.collector.in_forward:
            return parameter
        return tap(parameter, tensor)

    def __setitem__(self, attribute: str, parameter: Any) -> None:
        node: Any = getattr(parameter, "grad_fn", None)
        if isinstance(getattr(node, "use", None), Use):  # functional_call() puts back what it has read
            parameter = self.own[attribute]
        super().__setitem__(attribute, parameter)
        self._own(attribute, parameter)

    def __delitem__(self, attribute: str) -> None:
        """Deletes a parameter, as PEFT does with an adapter's; a masked one keeps its place in the flat delta."""
        tensor = self.tensors.get(attribute)
        if tensor is not None and tensor.owner._parameters is self:
            if not isinstance(tensor.owner, (nn.ParameterDict, nn.ParameterList)):
                tensor.check_shape(None)  # raises: something else would be computed with it
            del self.tensors[attribute]
            tensor.owner = nn.ParameterDict({attribute: self.own.pop(attribute)})
        super().__delitem__(attribute)

    def _own(self, attribute: str, parameter: Any) -> None:
        tensor = self.__dict__.get("tensors", {}).get(attribute)  # none while it is unpickled
        if tensor is None or not isinstance(parameter, nn.Parameter):
            return
        if parameter.requires_grad and attribute in self.own:  # another one, for a while
            return
        self.own[attribute] = parameter
        if type(parameter) is nn.Parameter and not tensor.is_quantized:
            parameter.__class__ = MaskedParameter
        if type(parameter) is MaskedParameter:
            _TENSORS[parameter] = weakref.ref(tensor)
