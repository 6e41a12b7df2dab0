"""Records the adapters (PEFT's or ours) that a base was extended by before training, and builds them again.

A record is not trusted: it is checked, and nothing is imported or allocated because of it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import nn

from sparsify.adapters.bottleneck import Adapter, AdapterConfig
from sparsify.adapters.insert import insert_adapters
from sparsify.common.names import named_tensors, plain_model
from sparsify.delta.metadata import ADAPTERS_KEY, PEFT_KEY
from sparsify.delta.peft.models import REMEDY, add_peft_adapters, as_json, record_peft_adapters
from sparsify.errors import BaseMismatchError, SparsifyError, brief

_ALWAYS_ALLOWED = 2**24  # numbers that a delta may add to a base, however small the base is


def record_extensions(model: nn.Module, held: Iterable[str]) -> dict[str, Any]:
    """Records PEFT's or our adapters in a model, for :func:`extend`; the record of a plain model is empty.

    PEFT's adapters of which a delta ``held`` no tensor are left out, such as the copy that TRL's DPOTrainer refers to.
    """
    found: dict[str, Any] = {}
    for module in model.modules():
        if isinstance(configs := getattr(module, "peft_config", None), dict) and configs and PEFT_KEY not in found:
            named = {part for name in held for part in name.split(".")}
            found[PEFT_KEY] = record_peft_adapters(plain_model(module), configs, named)
        if isinstance(module, Adapter) and ADAPTERS_KEY not in found:
            found[ADAPTERS_KEY] = as_json(asdict(module.config))
    return found


def extend(model: nn.Module, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Adds the modules in a delta's ``config`` to a base, uninitialised; PEFT's within a ``PeftModel``.

    Raises where the record is invalid, or the modules have tensors that are not in the delta, by plain name and shape.
    """
    if isinstance(configs := config.get(PEFT_KEY), dict) and configs:
        model = add_peft_adapters(model, configs)
    if isinstance(settings := config.get(ADAPTERS_KEY), dict):
        given: dict[str, Any] = {field.name: settings.get(field.name) for field in fields(AdapterConfig)}
        with torch.device("meta"):
            insert_adapters(model, AdapterConfig(**given))
    _materialise(model, shapes)
    return model


def _materialise(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Allocates the tensors on the meta device, if the delta has values for each."""
    new = {name: tensor for name, tensor in named_tensors(model).items() if tensor.is_meta}
    for name, tensor in new.items():
        if shapes.get(name) != tuple(tensor.shape):
            raise BaseMismatchError(
                f"tensor `{brief(name)}` has shape {tuple(tensor.shape)} in the model that the delta records, and "
                f"{shapes.get(name, 'no values')} in the delta: {REMEDY}."
            )
    own = [parameter for parameter in model.parameters() if not parameter.is_meta]
    size = sum(tensor.numel() for tensor in new.values())
    if size > max(_ALWAYS_ALLOWED, sum(parameter.numel() for parameter in own)):
        raise SparsifyError(f"the delta adds {size:,} numbers to the base, more than the base has itself: {REMEDY}.")
    for module in model.modules():
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            module.to_empty(device=own[0].device if own else "cpu", recurse=False)
