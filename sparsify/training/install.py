"""Into sparse training and out of it: everything that changes the model, in one place.

In: what is to be trained and how. Out: the same model with its engine, flat delta, index buffers, masked modules and
hooks; or, the other way, the plain model that it was.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import nn

from sparsify.common.quantized import is_quantized
from sparsify.masked.quantized import QuantizedTensor
from sparsify.masked.swap import frozen_row, swap, unswap
from sparsify.masked.tensor import MaskedTensor
from sparsify.strategies.schedules import Schedule
from sparsify.strategies.strategy import Strategy
from sparsify.strategies.targets import Candidate, Targets
from sparsify.training.engine import POSITION, Engine
from sparsify.training.flat_delta import VALUES, SparseValues
from sparsify.training.optimizer_hook import listen, stop_listening
from sparsify.training.quantized import give_up_packed
from sparsify.training.settings import SETTINGS, pack_settings
from sparsify.training.state import install, uninstall
from sparsify.training.trainable import say_as_before, say_trainable


def plan_engine(
    model: nn.Module,
    targets: Targets,
    strategy: Strategy,
    schedule: Schedule,
    steps: int | None,
    seed: int,
    sync_mode: str,
) -> Engine:
    """The engine and its tensors; nothing of the model has been changed, and the budget is still to be set."""
    engine = Engine(
        model,
        strategy,
        0,
        schedule,
        steps,
        seed,
        dense_names=tuple(targets.saved),
        frozen_names=tuple([c.name for c in targets.candidates if c.parameter.requires_grad] + list(targets.frozen)),
        sync_mode=sync_mode,
    )
    offset = 0
    for number, candidate in enumerate(targets.candidates):
        _, owner, attribute = candidate.owners[0]
        row = _frozen_row(candidate)
        kind = QuantizedTensor if is_quantized(candidate.parameter) else MaskedTensor
        engine.tensors.append(kind(number, owner, attribute, candidate.name, offset, engine, row))
        offset += engine.tensors[-1].numel
    return engine


def mask_model(engine: Engine, targets: Targets, capacity: int) -> None:
    """Everything that changes the model: buffers, flat delta, masked modules, hooks, frozen parameters."""
    model, device = engine.root, engine.tensors[0].parameter.device
    by_module: dict[nn.Module, dict[str, MaskedTensor]] = {}
    for candidate, tensor in zip(targets.candidates, engine.tensors, strict=True):
        for _, module, name in candidate.owners:
            by_module.setdefault(module, {})[name] = tensor
    for module, tensors in by_module.items():
        swap(module, tensors)
    model.register_parameter(
        VALUES, SparseValues(torch.zeros(capacity, dtype=values_dtype(engine.tensors), device=device))
    )
    model.register_buffer(POSITION, torch.zeros(2, dtype=torch.int64, device=device))
    engine.buffers.register(len(engine.tensors), capacity, _base_dtype(engine.tensors), device)
    model.register_buffer(SETTINGS, pack_settings(engine))
    install(engine)
    listen(engine)
    engine.compiled.make_root()
    say_trainable(model)
    freeze([candidate.parameter for candidate in targets.candidates])
    freeze(targets.frozen.values())


def unmask_model(engine: Engine, *, dequantize: bool) -> None:
    """Takes back what :func:`mask_model` did; the weights keep their trained values, quantized ones are given up."""
    root = engine.root
    packed = [(tensor, tensor.weight) for tensor in engine.tensors if tensor.packed and dequantize]
    uninstall(engine)
    say_as_before(root)
    stop_listening(engine)
    for module in list(root.modules()):
        unswap(module)
    engine.buffers.remove()
    del root._parameters[VALUES], root._buffers[POSITION], root._buffers[SETTINGS]
    give_up_packed(root, packed)
    parameters = dict(root.named_parameters())
    for name in engine.frozen_names:
        if name in parameters:  # PEFT's adapters may have been deleted
            parameters[name].requires_grad_(True)


def freeze(parameters: Iterable[nn.Parameter]) -> None:
    """Makes the parameters require no grad."""
    for parameter in parameters:
        parameter.requires_grad_(False)


def values_dtype(tensors: list[MaskedTensor]) -> torch.dtype:
    """The flat delta's dtype: float32, or float64 where a weight is."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _base_dtype(tensors: list[MaskedTensor]) -> torch.dtype:
    """The shortest dtype that holds the values of every weight."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def _frozen_row(candidate: Candidate) -> int | None:
    rows = (frozen_row(module) for _, module, attribute in candidate.owners if attribute == "weight")
    return next((row for row in rows if row is not None), None)
