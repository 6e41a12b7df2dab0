"""Everything that changes a model: into sparse training, and back to the plain model."""

from functools import cache, partial
from typing import Any, cast

import torch
from torch import nn

from sparsify.common.interrupts import uninterrupted
from sparsify.common.names import ENGINE, SETTINGS
from sparsify.core import install as core
from sparsify.core.entries import VALUES
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

_PLAIN = "_class_without_own_dtype"  # of a class, that it is made from


def install(plan: Plan) -> None:
    """Builds the engine of a plan and makes the model train by it; if that fails, the model is plain again."""
    engine, model = Engine(plan), plan.model
    dtype, kind = getattr(model, "dtype", None), cast(Any, type(model))
    engine.weights.base_digests = digest_base(engine)
    try:
        with uninterrupted(), torch._C.DisableTorchFunctionSubclass():  # masked parameters are only described here
            core.install(engine, plan.owners, plan.capacity, swap)
            if getattr(model, "dtype", None) != dtype:
                model.__class__ = with_own_dtype(kind)
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
            if vars(model).get(ENGINE) is engine:
                uninstall(engine, dequantize=False)
        raise


def uninstall(engine: Engine, *, dequantize: bool) -> None:
    """Makes the model plain again; the weights keep their trained values, quantized ones are given up."""
    root = engine.root
    packed = [(tensor, tensor.weight) for tensor in engine.tensors if tensor.is_quantized and dequantize]
    mark_trainable(root, trainable=False)
    remove_hooks(engine)
    core.uninstall(engine, root)
    del root._buffers[SETTINGS]
    root.__class__ = vars(type(root)).get(_PLAIN, type(root))
    give_up_packed(root, packed)
    parameters = dict(root.named_parameters())
    for name in engine.frozen_names:
        if name in parameters:  # PEFT's adapters may have been deleted
            parameters[name].requires_grad_(True)


@cache
def with_own_dtype(plain: Any) -> Any:
    """A model's class with a ``dtype`` of its own parameters: transformers takes that of the first, the flat delta."""

    def dtype(self: nn.Module) -> torch.dtype:
        return next(p.dtype for name, p in self.named_parameters() if name != VALUES and p.is_floating_point())

    def reduce(self: nn.Module, protocol: Any) -> Any:
        _, _, *state = plain.__reduce_ex__(self, protocol)
        return new_with_own_dtype, (plain,), *state

    named = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain.__name__, (plain,), {**named, _PLAIN: plain, "dtype": property(dtype), "__reduce_ex__": reduce})


def new_with_own_dtype(plain: Any) -> Any:
    """A model of such a class for pickle, which finds no class that is made at run time, to fill."""
    own = with_own_dtype(plain)
    return own.__new__(own)
