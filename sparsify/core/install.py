"""Turns the modules of a plain model into masked ones, and back, in place: identity, hooks and aliases stay."""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sparsify.core.layers import MaskedEmbedding, MaskedLinear
from sparsify.core.module import PLAIN, TENSORS
from sparsify.core.optimizer import LISTENING, listen
from sparsify.core.step import TrainingStep
from sparsify.core.taps import ReadParameters
from sparsify.core.tensor import MaskedTensor

Owners = Sequence[tuple[nn.Module, str]]  # all modules that hold a parameter, and its name in each


def swap(module: nn.Module, tensors: dict[str, MaskedTensor]) -> None:
    """Turns a plain module into its masked form, with the masked ``tensors`` by attribute name."""
    mark(module, tensors, masked_class(module, tensors))


def install(
    step: TrainingStep, tensors: Mapping[MaskedTensor, Owners], capacity: int,
    swap: Callable[[nn.Module, dict[str, MaskedTensor]], None] = swap,
) -> None:  # fmt: skip
    """Changes a model: its modules are masked, its tensors frozen, and its optimizers heard."""
    by_module: dict[nn.Module, dict[str, MaskedTensor]] = defaultdict(dict)
    for tensor, owners in tensors.items():
        for module, attribute in owners:
            by_module[module][attribute] = tensor
    for module, own in by_module.items():
        swap(module, own)
    base_dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    step.entries.register(capacity, values_dtype(step.tensors), base_dtype, step.tensors[0].parameter.device)
    for tensor in tensors:
        tensor.parameter.requires_grad_(False)
    listen(step)


def uninstall(step: TrainingStep, model: nn.Module) -> None:
    """Undoes :func:`install`, but for what required grad; the weights keep their values."""
    LISTENING.discard(step)
    for module in list(model.modules()):
        if TENSORS in module.__dict__:
            module.__class__ = module.__dict__.pop(PLAIN, type(module))
            parameters: Any = module._parameters  # ReadParameters
            module.__dict__["_parameters"] = parameters.plain()
            del module.__dict__[TENSORS]
    step.entries.remove()


def values_dtype(tensors: Sequence[MaskedTensor]) -> torch.dtype:
    """The flat delta's dtype: float32, or float64 where a weight is."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def mark(
    module: nn.Module, tensors: dict[str, MaskedTensor], masked: type[nn.Module] | None,
    parameters: type[ReadParameters] = ReadParameters,
) -> None:  # fmt: skip
    """Gives a module its masked tensors, and a masked class if it has one."""
    module.__dict__[TENSORS] = tensors
    module.__dict__["_parameters"] = parameters(module._parameters, dict(tensors))
    if masked is not None:
        module.__dict__[PLAIN] = type(module)
        module.__class__ = masked


def masked_class(module: nn.Module, tensors: dict[str, MaskedTensor]) -> type[nn.Module] | None:
    """Returns the masked form of exactly this class; ``None`` where its class stays."""
    if "forward" in module.__dict__:  # replaced on the instance, as accelerate's hooks do
        return None
    if "weight" not in module._parameters or not module._parameters.keys() <= {"weight", "bias"}:
        return None  # reparametrised, as torch.nn.utils.weight_norm does
    if type(module) is nn.Linear:
        return MaskedLinear
    if type(module) is nn.Embedding and not module.scale_grad_by_freq:
        return MaskedEmbedding
    return None


def frozen_row(owners: Owners) -> int | None:
    """Returns the row of a parameter that is no candidate: ``padding_idx``, where all of its owners are embeddings.

    An output layer that is tied to an embedding trains that row, as one of its outputs.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    rows = {each.padding_idx if name == "weight" and isinstance(each, kinds) else None for each, name in owners}
    return rows.pop() if len(rows) == 1 else None
