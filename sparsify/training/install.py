"""Everything that changes a model: into sparse training, and back to the plain model."""

from functools import partial

import torch

from sparsify.common.interrupts import uninterrupted
from sparsify.common.names import SETTINGS
from sparsify.core import install as core
from sparsify.masked.swap import swap
from sparsify.training.engine import Engine
from sparsify.training.export import Exporter
from sparsify.training.forward import groups
from sparsify.training.optimizer_steps import watch
from sparsify.training.plan import Plan
from sparsify.training.quantized import give_up_packed, mark_trainable
from sparsify.training.settings import record_settings
from sparsify.training.state import place_hooks, remove_hooks
from sparsify.training.summary import digest_base


def install(plan: Plan) -> None:
    """Builds the engine of a plan and makes the model train by it; if that fails, the model is plain again."""
    engine, model = Engine(plan), plan.model
    engine.weights.base_digests = digest_base(engine)
    try:
        with uninterrupted(), torch._C.DisableTorchFunctionSubclass():  # masked parameters are only described here
            core.install(engine, plan.owners, plan.capacity, swap)
            engine.groups = groups(engine.tensors)
            watch(engine)
            record_settings(engine)
            for parameter in plan.targets.frozen.values():
                parameter.requires_grad_(False)
            place_hooks(engine)
            engine.exporter = partial(Exporter, engine)
            engine.root_anchor()
            mark_trainable(model)
        engine.start(plan.selected)
        for parameter in (*(tensor.parameter for tensor in engine.tensors), *plan.targets.frozen.values()):
            parameter.grad = None  # of a backward pass before: clipping would count it, and an optimizer step by it
    except BaseException:  # out of memory, or an interrupt
        with uninterrupted():
            uninstall(engine, dequantize=False)
        raise


def uninstall(engine: Engine, *, dequantize: bool) -> None:
    """Undoes what :func:`install` has done so far; weights keep their trained values, quantized ones are given up."""
    root = engine.root
    packed = [(tensor, tensor.weight) for tensor in engine.tensors if tensor.is_quantized and dequantize]
    mark_trainable(root, trainable=False)
    remove_hooks(engine)
    core.uninstall(engine, root)
    root._buffers.pop(SETTINGS, None)
    give_up_packed(root, packed)
    parameters = dict(root.named_parameters())
    for name in engine.frozen_names:
        if name in parameters:  # PEFT's adapters may have been deleted
            parameters[name].requires_grad_(True)
