"""The form for any other module that owns parameters: norms, convolutions, experts, class tokens.

Two forward hooks put *tapped* parameters in the place of the plain ones for the length of the module's own forward. A
tap is the identity; its node receives the parameter's whole gradient, as the module's own autograd computes it, and
hands it to ``collect``. The module keeps its class, so nothing that looks at types, names or signatures notices.

A masked weight that is read in the model's forward past its own module's (an embedding's table as the output layer, the
projections of ``F.multi_head_attention_forward``, a state space model's fused convolution) comes as a tap too, and so
does one in an ``nn.ParameterList`` or ``nn.ParameterDict``, which are never called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsify.masked.arithmetic import tap_gradient
from sparsify.masked.module import announce_use, frozen_if_masked, masked_tensors
from sparsify.masked.recompute import announce_layer_norm
from sparsify.masked.tensor import MaskedTensor, Use

PLAIN = "_plain_parameters"  # attribute of a module in its forward: what the taps stand for


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, anchor: Tensor, use: Use) -> Tensor:
        ctx.use = use
        return parameter.view_as(parameter)

    @staticmethod
    @torch.autograd.function.once_differentiable
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
    """

    def __init__(self, parameters: dict[str, Any], tensors: dict[str, MaskedTensor]) -> None:
        super().__init__(parameters)
        self.tensors = tensors

    def __getitem__(self, attribute: str) -> Any:
        parameter = super().__getitem__(attribute)
        tensor = self.tensors.get(attribute)
        if tensor is not None and torch.compiler.is_dynamo_compiling():
            from sparsify.masked.compiled import compiled_tap

            return compiled_tap(tensor, parameter) if parameter.is_leaf else parameter
        if tensor is None or not parameter.is_leaf or not tensor.collector.in_forward:  # no leaf: a tap already
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
    plain: dict[str, nn.Parameter | None] = {}
    for attribute in masked_tensors(module) if torch.is_grad_enabled() else ():
        use = announce_use(module, attribute)
        parameter = plain[attribute] = module._parameters.get(attribute)
        frozen = frozen_if_masked(module, attribute)
        tap = frozen if use is None else _Tap.apply(parameter, use.anchor, use)
        module._parameters[attribute] = tap
    module.__dict__.setdefault(PLAIN, []).append(plain)


def untap_parameters(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook, run even if the forward failed: the plain parameters are back in their place."""
    # a sharded norm's weight need not be at hand when a layer behind it, in another block, would make its input again
    if isinstance(output, Tensor) and not torch.compiler.is_dynamo_compiling() and not _is_sharded(module):
        announce_layer_norm(module, output)
    waiting = module.__dict__.get(PLAIN)
    if waiting:  # none where another pre-hook failed before the taps were placed, or no tap was
        module._parameters.update(waiting.pop())
        if not waiting:
            del module.__dict__[PLAIN]


def _is_sharded(module: nn.Module) -> bool:
    return any(tensor.collector.sharded for tensor in masked_tensors(module).values())
