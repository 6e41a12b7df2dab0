"""Taps: how a masked parameter is read by anything but a masked layer: by norms, convolutions, experts, tied heads.

A tap is the identity; its node receives the whole gradient of a parameter, or those of several that share it, and hands
them to ``collect``. In the model's forward each read of ``module.weight`` makes one, or has its part of a shared one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.core.tensor import MaskedTensor, Use
from sparsify.errors import SparsifyError

CHANGED = (
    "`{name}` {problem}; resize embeddings, and call parametrizations, weight_norm() and pruning, before sparsify(). "
    "FullyShardedDataParallel (FSDP1) flattens weights: use fully_shard() (FSDP2)."
)


class Taps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, use: Use, root: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        return tuple([own.view_as(own) for own in values])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        found = {tensor: grad for tensor, grad in zip(ctx.use.tensors, grads, strict=True) if grad is not None}
        ctx.use.unread = ctx.use.tensors if not found else [own for own in ctx.use.tensors if own not in found]
        device = next(iter(found.values()), ctx.use.root).device
        ctx.use.collect(device, found.__getitem__)
        return None, None, None


def tap(parameter: Any, tensor: MaskedTensor) -> Any:
    """Returns a tap of a masked parameter; its values alone where no gradient will be collected."""
    read = tensor.collector.shared_tap(tensor) if parameter is tensor.parameter else None
    if read is None:
        use = tensor.collector.use([tensor])
        with torch._C.DisableTorchFunctionSubclass():  # of masked/parameters.py
            read = parameter.detach()
        read = read if use is None else Taps.apply(use, use.root, [read])[0]
    read._is_param = read.is_tap = True  # to isinstance(), as get_parameter() asks; and to __setitem__()
    return read


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
        self.tensors = tensors  # by attribute name
        for attribute in tensors.keys() & self.keys():
            self.keep(attribute, self.get(attribute))

    def __getitem__(self, attribute: str) -> Any:
        parameter, tensor = super().__getitem__(attribute), self.tensors.get(attribute)
        if tensor is None or tensor.is_quantized:
            return parameter
        if torch.compiler.is_dynamo_compiling():
            return tensor.collector.compiled.tap(tensor, parameter) if parameter.is_leaf else parameter
        if not (in_forward := tensor.collector.in_forward):
            tensor.collector.before_read()
        is_own = parameter is tensor.parameter  # not one that functional_call() has put in its place
        is_use = is_own and torch.is_grad_enabled() and in_forward
        return tap(parameter, tensor) if is_use else parameter

    def __setitem__(self, attribute: str, parameter: Any) -> None:
        if hasattr(parameter, "is_tap"):
            parameter = self.tensors[attribute].parameter  # functional_call() puts back what it has read
        super().__setitem__(attribute, parameter)
        is_masked = attribute in self.__dict__.get("tensors", ())  # there are none while it is unpickled
        if is_masked and isinstance(parameter, nn.Parameter) and not parameter.requires_grad:
            self.keep(attribute, parameter)

    def __delitem__(self, attribute: str) -> None:
        """Deletes a parameter, as PEFT does with an adapter's; a masked one keeps its place in the flat delta."""
        tensor = self.tensors.get(attribute)
        if tensor is not None and tensor.owner._parameters is self:
            if not isinstance(tensor.owner, (nn.ParameterDict, nn.ParameterList)):
                problem = f"was taken from its module ({type(tensor.owner).__name__}) after sparsify()"
                raise SparsifyError(CHANGED.format(name=tensor.name, problem=problem))
            del self.tensors[attribute]
            tensor.owner = nn.ParameterDict({attribute: tensor.parameter})
        super().__delitem__(attribute)

    def keep(self, attribute: str, parameter: Any) -> None:
        """Takes a parameter as the masked one from now on."""
        self.tensors[attribute].parameter = parameter

    def plain(self) -> dict[str, Any]:
        """The parameters, as they are in a plain module."""
        return dict(self)
