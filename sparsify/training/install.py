"""Everything that changes a model: into sparse training, and back to the plain model.

In: an engine and the plan that it was built from. Out: the same model with its flat delta, index buffers, masked
modules and hooks; or, the other way, the plain model that it was.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import nn

from sparsify.common.names import ENGINE
from sparsify.core.interrupts import uninterrupted
from sparsify.core.tensor import MaskedTensor
from sparsify.masked.swap import swap, unswap
from sparsify.training.engine import Engine
from sparsify.training.flat_delta import POSITION, SETTINGS, VALUES, SparseValues
from sparsify.training.optimizer_hook import listen, stop_listening
from sparsify.training.plan import Plan, values_dtype
from sparsify.training.quantized import give_up_packed, say_as_before, say_trainable
from sparsify.training.settings import record_settings
from sparsify.training.state import place_hooks, remove_hooks


def install(plan: Plan) -> None:
    """Builds the engine of a plan and makes the model train by it; if that fails, the model is plain again."""
    engine = Engine(plan)
    try:
        with uninterrupted():
            _mask_model(engine, plan)
        engine.begin(plan.selected)
    except BaseException:  # out of memory, or an interrupt
        with uninterrupted():
            if vars(plan.model).get(ENGINE) is engine:
                uninstall(engine, dequantize=False)
        raise


def uninstall(engine: Engine, *, dequantize: bool) -> None:
    """Makes the model plain again; the weights keep their trained values, quantized ones are given up."""
    root = engine.root
    packed = [(tensor, tensor.weight) for tensor in engine.tensors if tensor.packed and dequantize]
    remove_hooks(engine)
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


def _mask_model(engine: Engine, plan: Plan) -> None:
    model, tensors, device = plan.model, engine.tensors, engine.tensors[0].parameter.device
    by_module: dict[nn.Module, dict[str, MaskedTensor]] = {}
    for candidate, tensor in zip(plan.targets.candidates, tensors, strict=True):
        for _, module, name in candidate.owners:
            by_module.setdefault(module, {})[name] = tensor
    for module, own in by_module.items():
        swap(module, own)
    values = SparseValues(torch.zeros(plan.capacity, dtype=values_dtype(tensors), device=device))
    model.register_parameter(VALUES, values)
    model.register_buffer(POSITION, torch.zeros(2, dtype=torch.int64, device=device))
    base_dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))  # holds every weight's
    engine.buffers.register(len(tensors), plan.capacity, base_dtype, device)
    model.register_buffer(SETTINGS, None)
    record_settings(engine)
    place_hooks(engine)
    listen(engine)
    engine.compiled.make_root()
    say_trainable(model)
    freeze([candidate.parameter for candidate in plan.targets.candidates])
    freeze(plan.targets.frozen.values())
