"""Taps: the masked form of any other module that owns parameters: norms, convolutions, experts, class tokens.

During the module's own forward its parameters are read as *taps*, which two forward hooks make and drop. A tap is the
identity; its node receives the parameter's whole gradient and hands it to ``collect``. A masked weight that is read in
the model's forward, but outside of its own module's (a table as the output layer, a parameter in a list), is a tap too.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.core.gradients import tap_gradient
from sparsify.core.module import count_uses, masked_tensors
from sparsify.core.tensor import MaskedTensor, Use


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


class ReadParameters(dict[str, Any]):
    """A module's parameters by name; ``[]``, which ``module.weight`` uses, returns taps of the masked ones in forward.

    ``get()``, ``items()`` and ``values()``, which this library, state dicts and ``named_parameters()`` use, return the
    plain parameters.
    """

    def __init__(self, parameters: dict[str, Any], tensors: dict[str, MaskedTensor]) -> None:
        super().__init__(parameters)
        self.tensors = tensors  # the module's masked tensors by attribute name
        # by thread, the taps of each call that is running, with the number of the model's forward pass: taps that an
        # interrupted pass left are not read in a later one
        self.taps: dict[int, list[tuple[int, dict[str, Any]]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"tensors": self.tensors, "taps": {}}

    def __getitem__(self, attribute: str) -> Any:
        parameter, tensor = super().__getitem__(attribute), self.tensors.get(attribute)
        if tensor is None or not parameter.is_leaf:  # no leaf: set from outside, as functional_call() does
            return parameter
        if torch.compiler.is_dynamo_compiling():
            return tensor.collector.compiled.tap(tensor, parameter)
        if calls := self.taps.get(threading.get_ident()):
            forward_pass, taps = calls[-1]
            if forward_pass == tensor.collector.forward_pass and attribute in taps:
                return taps[attribute]
        if not tensor.collector.in_forward:
            return parameter
        (use,) = tensor.collector.uses([tensor])
        if use is not None:
            return _Tap.apply(parameter, use, use.root)
        return parameter.detach() if parameter.requires_grad else parameter  # PEFT sets it again

    def __delitem__(self, attribute: str) -> None:
        """Deletes a parameter, as PEFT does with an adapter's; a masked one keeps its place in the flat delta."""
        tensor = self.tensors.get(attribute)
        if tensor is not None and tensor.owner._parameters is self:
            del self.tensors[attribute]
            tensor.owner = nn.ParameterDict({attribute: super().__getitem__(attribute)})
        super().__delitem__(attribute)


def tap_parameters(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: makes the taps that the module's forward reads instead of its masked parameters."""
    if torch.compiler.is_dynamo_compiling():
        return  # every read makes a tap of its own: checkpointed parts of a graph may not change a module
    taps: dict[str, Any] = {}
    for attribute, (plain, use) in count_uses(module).items() if torch.is_grad_enabled() else ():
        taps[attribute] = plain if use is None else _Tap.apply(plain, use, use.root)
    forward_pass = next(iter(masked_tensors(module).values())).collector.forward_pass
    parameters: Any = module._parameters  # ReadParameters
    calls = parameters.taps.setdefault(threading.get_ident(), [])
    calls[:] = [*(call for call in calls if call[0] == forward_pass), (forward_pass, taps)]


def untap_parameters(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook, run even if the forward failed: drops the taps."""
    parameters: Any = module._parameters
    if not torch.compiler.is_dynamo_compiling() and (calls := parameters.taps.get(threading.get_ident())):
        calls.pop()  # there are none where an earlier pre-hook failed
