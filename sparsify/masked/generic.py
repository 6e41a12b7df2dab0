"""The form for any other module that owns parameters: norms, convolutions, experts, class tokens.

For the length of the module's own forward its parameters are read as *taps*, which two forward hooks make and drop. A
tap is the identity; its node receives the parameter's whole gradient, as the module's own autograd computes it, and
hands it to ``collect``. The module keeps its class, so nothing that looks at types, names or signatures notices. The
parameters themselves stay where they are, so that a forward pass that is interrupted leaves nothing behind.

A masked weight that is read in the model's forward past its own module's (an embedding's table as the output layer, the
projections of ``F.multi_head_attention_forward``, a state space model's fused convolution) comes as a tap too, and so
does one in an ``nn.ParameterList`` or ``nn.ParameterDict``, which are never called.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.masked.arithmetic import tap_gradient
from sparsify.masked.module import announce_use, first_order, frozen_if_masked, masked_tensors
from sparsify.masked.recompute import announce_layer_norm
from sparsify.masked.tensor import MaskedTensor, Use


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, anchor: Tensor, use: Use) -> Tensor:
        ctx.use = use
        return parameter.view_as(parameter)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.use.collect(tap_gradient(grad) if ctx.use.wanted() else None)
        return None, None, None


class ReadParameters(dict[str, Any]):
    """A module's parameters by name, of which the masked ones are tapped when they are read in the model's forward.

    ``module.weight`` comes here by way of ``[]``. ``get()``, ``items()`` and ``values()``, by which this library, state
    dicts and ``named_parameters()`` look at parameters, give the plain ones.

    Args:
        parameters: the module's own, plain.
        tensors: the module's masked tensors by attribute name.

    Attributes:
        taps: for each thread that the module runs forward in: the taps of each call, with the model's forward pass.
            What an interrupt left there belongs to an earlier pass, and is not read any more.
    """

    def __init__(self, parameters: dict[str, Any], tensors: dict[str, MaskedTensor]) -> None:
        super().__init__(parameters)
        self.tensors = tensors
        self.taps: dict[int, list[tuple[int, dict[str, Any]]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"tensors": self.tensors, "taps": {}}

    def __getitem__(self, attribute: str) -> Any:
        parameter = super().__getitem__(attribute)
        tensor = self.tensors.get(attribute)
        if tensor is not None and torch.compiler.is_dynamo_compiling():
            from sparsify.masked.compiled import compiled_tap

            return compiled_tap(tensor, parameter) if parameter.is_leaf else parameter
        if tensor is None or not parameter.is_leaf:  # no leaf: put there by somebody else, as functional_call() does
            return parameter
        if calls := self.taps.get(threading.get_ident()):
            forward_pass, taps = calls[-1]
            if forward_pass == tensor.collector.forward_pass and attribute in taps:
                return taps[attribute]
        if not tensor.collector.in_forward:
            return parameter
        use = tensor.collector.use(tensor)
        if use is not None:
            return _Tap.apply(parameter, use.anchor, use)
        return parameter.detach() if parameter.requires_grad else parameter  # PEFT sets it back on its own

    def __delitem__(self, attribute: str) -> None:
        """A parameter that the model gives up, as PEFT's with a deleted adapter, keeps its place in the flat delta."""
        tensor = self.tensors.get(attribute)
        if tensor is not None and tensor.owner._parameters is self:
            del self.tensors[attribute]
            tensor.owner = nn.ParameterDict({attribute: super().__getitem__(attribute)})
        super().__delitem__(attribute)


class MaskedParameterList(nn.ParameterList):
    """An ``nn.ParameterList`` whose slices hold taps; a plain one makes new parameters of them, cut off from theirs."""

    plain_class = nn.ParameterList

    def __setitem__(self, idx: int, param: Any) -> None:
        if isinstance(param, Tensor) and not param.is_leaf:
            self._parameters[self._get_abs_string_index(idx)] = param  # type: ignore[assignment]
        else:
            super().__setitem__(idx, param)


def tap_parameters(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: the module's forward will read taps instead of its masked parameters."""
    if torch.compiler.is_dynamo_compiling():
        return  # every parameter that is read comes as a tap; checkpointed parts of a graph may not change a module
    taps: dict[str, Any] = {}
    for attribute in masked_tensors(module) if torch.is_grad_enabled() else ():
        use = announce_use(module, attribute)
        frozen = frozen_if_masked(module, attribute)
        taps[attribute] = frozen if use is None else _Tap.apply(module._parameters.get(attribute), use.anchor, use)
    forward_pass = next(iter(masked_tensors(module).values())).collector.forward_pass
    calls = _read_parameters(module).taps.setdefault(threading.get_ident(), [])
    calls[:] = [call for call in calls if call[0] == forward_pass]
    calls.append((forward_pass, taps))


def untap_parameters(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook, run even if the forward failed: the parameters are read as they are again."""
    # a sharded norm's weight need not be at hand when a layer behind it, in another block, would make its input again
    if isinstance(output, Tensor) and not torch.compiler.is_dynamo_compiling() and not _is_sharded(module):
        announce_layer_norm(module, output)
    if not torch.compiler.is_dynamo_compiling():
        calls = _read_parameters(module).taps.get(threading.get_ident())
        if calls:  # none where another pre-hook failed before the taps were made
            calls.pop()


def _read_parameters(module: nn.Module) -> ReadParameters:
    parameters = module._parameters
    assert isinstance(parameters, ReadParameters)
    return parameters


def _is_sharded(module: nn.Module) -> bool:
    return any(tensor.collector.sharded for tensor in masked_tensors(module).values())
