"""Exports what was learned: a model's entries by tensor, and the tensors that have to be stored whole.

In: the engine of a sparsified model. Out: the parts of a :class:`sparsify.SparseDelta`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.adapters.extensions import record_extensions
from sparsify.common.names import listed, plain_model, plain_name
from sparsify.common.raw_bits import digest
from sparsify.common.shards import full_values, is_shard
from sparsify.core.devices import put
from sparsify.core.entries import VALUES
from sparsify.core.tensor import MaskedTensor
from sparsify.delta.entries import DeltaParts, TensorDelta
from sparsify.delta.metadata import ENTRIES_IN_WHOLE_KEY
from sparsify.delta.patch_plan import own_copy
from sparsify.errors import SparsifyError
from sparsify.strategies.strategy import Prune, Strategy
from sparsify.training.engine import Engine

UNKNOWN_VALUES = (
    "`sparse_values` has values for entries that this model does not know. The parameters of another sparsified model "
    "were copied or averaged into it, and its buffers were not: copy these too, as "
    "torch.optim.swa_utils.AveragedModel does: for own, other in zip(ema.buffers(), model.buffers()): "
    "own.copy_(other). Or noise was added to all of its gradient: add it to the first unmasked numbers alone."
)
NOT_FINITE = (
    "`sparse_values` is not finite: the loss or its gradient overflowed, and the optimizer stepped by it. Go on from "
    "an earlier state, and clip gradients, scale the loss (GradScaler), or lower the learning rate."
)


def prepare(engine: Engine, call: str) -> None:
    """Brings the trained weights in place for ``call``; raises where the flat delta makes no sense."""
    engine.weights.check_trained(call)
    engine.refresh()
    free = engine.values.detach()[engine.unmasked :]
    if bool(free.any()):
        raise SparsifyError(f"{call}: {UNKNOWN_VALUES if bool(free.isfinite().all()) else NOT_FINITE}")
    engine.weights.reshard()


def export(engine: Engine, budget: int | None, model: nn.Module) -> DeltaParts:
    """Tensors, dense tensors and config of a model's delta; see :meth:`sparsify.SparseDelta.from_model`.

    Dense are ``modules_to_save``, pruned tensors, those that the base does not have, and buffers that training changed.
    The entries of a quantized weight are differences.
    """
    prepare(engine, "SparseDelta.from_model()")
    unmasked = engine.unmasked
    if budget is None:
        budget = unmasked
    elif isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget <= unmasked:
        raise SparsifyError(
            f"budget={budget!r}; expected an int between 1 and the {unmasked:,} entries unmasked so far, "
            "or None for all of them."
        )
    tensors: dict[str, TensorDelta] = {}
    parameters = dict(engine.root.named_parameters())
    whole = dense_tensors(engine, parameters)
    in_whole = 0  # entries
    for name, tensor in trained_tensors(engine, parameters).items():
        plain = plain_name(name)
        indices, values, base = entries_of(tensor, budget)
        if is_stored_whole(engine, name, tensor):
            whole[plain] = as_of(tensor, budget)
            in_whole += indices.numel()
        elif indices.numel():
            if plain in tensors:
                raise SparsifyError(f"two trained tensors are called `{plain}`: rename one of the modules.")
            parts = own_copy(indices), own_copy(values), tuple(tensor.shape_now), tensor.dtype
            kind = "replace" if tensor.scheme is None else "add"
            try:
                tensors[plain] = TensorDelta(*parts, kind, digest(base), quantization=tensor.scheme)
            except SparsifyError as error:
                raise SparsifyError(f"tensor `{plain}` cannot go into a delta: {error}") from error
    config = describe_run(engine, budget, in_whole)
    warn_of_unheld(engine, model, stacklevel=5)
    return tensors, {name: own_copy(tensor) for name, tensor in whole.items()}, config


def dense_tensors(engine: Engine, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``modules_to_save`` and the buffers that training changed, by plain name; they are not copied."""
    whole = {plain_name(name): full_values(parameters[name]) for name in engine.dense_names if name in parameters}
    return whole | {plain_name(name): buffer for name, buffer in changed_buffers(engine).items()}


def trained_tensors(engine: Engine, parameters: Mapping[str, Tensor]) -> dict[str, MaskedTensor | Untrained]:
    """The masked tensors, and the other parameters that the base does not have, by their names in the model."""
    there = {id(parameter) for parameter in parameters.values()}  # PEFT's adapters may have been deleted
    found: dict[str, MaskedTensor | Untrained] = {t.name: t for t in engine.tensors if id(t.parameter) in there}
    new = (name for name in engine.new_names if name in parameters and name not in found)
    return found | {name: Untrained(parameters[name]) for name in new}


def is_stored_whole(engine: Engine, name: str, tensor: MaskedTensor | Untrained) -> bool:
    """Whether a tensor's entries alone are no change of the base: the base lacks it, or it was pruned."""
    return name in engine.new_names or is_pruned(engine.strategy, tensor)


def find_unheld(engine: Engine, model: nn.Module) -> str:
    """Names parameters that train, or trained, in ``model``, which is the engine's or holds it, and are in no delta."""
    own = dict(engine.root.named_parameters())
    held = {id(tensor.parameter) for tensor in engine.tensors}  # PEFT makes them require grad again
    held.update(id(own[name]) for name in (VALUES, *engine.dense_names, *engine.new_names) if name in own)
    # PEFT makes these require grad again as well, and no optimizer holds them: they count once they have changed
    held.update(id(own[name]) for name in engine.frozen_names if name in own and _is_base(engine, name, own[name]))
    trainable = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    replaced = [t.name for t in engine.tensors if own.get(t.name, t.parameter) is not t.parameter]
    trainable, replaced = ([f"`{plain_name(name)}`" for name in names] for names in (trainable, replaced))
    problems = []
    if trainable:
        problems.append(
            f"{listed(trainable)} can train, but no delta holds them: they were added, replaced or made trainable "
            "after sparsify(), or are no part of the module that it was given. Do that first, give sparsify() the "
            "whole model, and name what is to be trained whole in modules_to_save; freeze what is not trained "
            "(requires_grad_(False))"
        )
    if replaced:
        problems.append(f"{listed(replaced)} were replaced after sparsify(): what was trained there is lost")
    return "; ".join(problems)


def warn_of_unheld(engine: Engine, model: nn.Module, stacklevel: int = 3) -> None:
    """Warns of parameters that train and are in no delta."""
    if unheld := find_unheld(engine, model):
        warnings.warn(f"{unheld}.", stacklevel=stacklevel)


def _is_base(engine: Engine, name: str, parameter: Tensor) -> bool:
    if not parameter.requires_grad:
        return True
    known = engine.base_digests.get(name)
    return known is not None and known == (parameter.dtype, digest(full_values(parameter)))


def digest_buffers(model: nn.Module) -> dict[str, str]:
    """A digest of every buffer in the model's state dict, by name; :func:`changed_buffers` compares them later."""
    return {name: digest(buffer) for name, buffer in _persistent_buffers(model)}


class Untrained:
    """A parameter that the base does not have and that is not masked: it is exported without entries."""

    is_quantized, scheme = False, None

    def __init__(self, parameter: Tensor) -> None:
        self.parameter, self.shape_now, self.dtype = parameter, parameter.shape, parameter.dtype
        self.indices = self.slots = torch.empty(0, dtype=torch.int64, device=parameter.device)
        self.base = self.delta = torch.empty(0, dtype=self.dtype, device=parameter.device)


def entries_of(tensor: MaskedTensor | Untrained, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ascending indices, values and base values (k,) of a tensor's entries among the first ``budget`` of the model.

    The values of a quantized weight are the changes, in the delta's dtype, and its base values the dequantized ones.
    """
    among_first = tensor.slots < budget
    indices, base = tensor.indices[among_first], tensor.base[among_first]
    if tensor.is_quantized:
        values = tensor.delta[among_first]
    elif is_shard(tensor.parameter):  # without asking the other ranks
        values = (tensor.base.to(tensor.delta) + tensor.delta)[among_first].to(tensor.dtype)
    else:
        values = tensor.parameter.detach().take(indices)
    return indices, values, base


def is_pruned(strategy: Strategy, tensor: MaskedTensor | Untrained) -> bool:
    """Whether zeros were written into the tensor before training: its entries lack them, so it is stored whole."""
    return isinstance(strategy.selection, Prune) and strategy.selection.removes_from(tensor.shape_now)


def as_of(tensor: MaskedTensor | Untrained, budget: int) -> Tensor:
    """The trained tensor, with its base values at all but the first ``budget`` entries of the model."""
    later = tensor.slots >= budget
    weight = full_values(tensor.parameter).clone(memory_format=torch.contiguous_format)
    return put(weight, tensor.indices[later], tensor.base[later].to(weight.dtype))


def changed_buffers(engine: Engine) -> dict[str, Tensor]:
    """The buffers that training changed (BatchNorm's statistics), by their names in the model."""
    known, buffers = engine.buffer_digests, _persistent_buffers(engine.root)
    return {name: buffer for name, buffer in buffers if name in known and known[name] != digest(buffer)}


def _persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def describe_run(engine: Engine, budget: int, in_whole: int) -> dict[str, Any]:
    """The config of a delta of the first ``budget`` entries, ``in_whole`` of which are in tensors stored whole."""
    model = plain_model(engine.root)
    model_config = getattr(model, "config", None)
    not_the_bases = {*engine.new_names, *engine.dense_names, VALUES}
    dtypes = {
        str(parameter.dtype).removeprefix("torch.")
        for name, parameter in engine.root.named_parameters()
        if name not in not_the_bases and parameter.is_floating_point()
    }
    return {
        "base_model_name_or_path": _base_name(model_config),
        "base_model_revision": getattr(model_config, "_commit_hash", None),
        "base_dtypes": sorted(dtypes),
        "architecture": type(model).__name__,
        "model_config": _head_config(model_config) if engine.dense_names else {},
        "strategy": engine.strategy.to_dict(),
        "budget": budget,
        "schedule": asdict(engine.schedule),
        "steps": engine.steps,
        "steps_done": engine.step,
        **record_extensions(engine.root, (*not_the_bases, *(tensor.name for tensor in engine.tensors))),
        "versions": _library_versions(),
        **({ENTRIES_IN_WHOLE_KEY: in_whole} if in_whole else {}),
    }


def _library_versions() -> dict[str, str]:
    """Versions of those of the libraries that are imported already."""
    libraries = ("sparsify", "torch", "safetensors", "transformers", "peft")
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in libraries}
    return {name: str(version) for name, version in versions.items() if version is not None}


def _base_name(model_config: Any) -> str | None:
    """The base's id on the hub, or its folder's absolute path: a relative one could be taken for an id."""
    name = getattr(model_config, "_name_or_path", None) or None
    return str(Path(name).absolute()) if name is not None and Path(name).is_dir() else name


def _head_config(model_config: Any) -> dict[str, Any]:
    """Settings of a transformers model's new head, which the base's own config lacks."""
    labels = getattr(model_config, "id2label", None)
    if not isinstance(labels, dict) or not labels:
        return {}
    head: dict[str, Any] = {"num_labels": len(labels)}
    if any(label != f"LABEL_{index}" for index, label in labels.items()):
        head["id2label"] = {str(index): str(label) for index, label in labels.items()}
    if problem_type := getattr(model_config, "problem_type", None):
        head["problem_type"] = str(problem_type)
    return head
