"""What a base was extended by before training: PEFT's adapters or ours. Recorded, and built again.

In: a model, or what a delta recorded of one. Out: the record, in JSON types; or the base with modules in the same
places, still without values. A record is a stranger's: it is checked, nothing is imported or allocated on its word.

PEFT takes many a setting for a regular expression, and some of those take for ever. So a record holds the names of the
modules that they matched, and of a stranger's none is run that could try more than one way to match.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from enum import Enum
from itertools import chain
from typing import Any

import torch
from torch import nn

from sparsify.adapters.bottleneck import Adapter, AdapterConfig
from sparsify.adapters.insert import insert_adapters
from sparsify.common.names import named_tensors, plain_model
from sparsify.delta.metadata import ADAPTERS_KEY, PEFT_KEY
from sparsify.errors import BaseMismatchError, SparsifyError, brief

_REBUILT = ("LORA", "IA3", "LOHA", "LOKR")  # their weights are all in the delta, and the base's stay as they are
_NOT_TAKEN = ("auto_mapping", "base_model_name_or_path", "megatron_config", "megatron_core", "revision")
_ALWAYS_ALLOWED = 2**24  # numbers that a delta may add to a base, however small the base is
_MAX_ITEMS = 256  # of a setting that PEFT compiles as so many regular expressions for each module: re keeps 512
_MODULES = ("target_modules", "exclude_modules", "feedforward_modules")  # a regular expression, or a list of names
_PATTERNS = ("rank_pattern", "alpha_pattern")  # settings of single modules, by a regular expression
_REMEDY = "build the model as it was in training (get_peft_model(base, config)), and call delta.apply(model)"


def record_extensions(model: nn.Module) -> dict[str, Any]:
    """What PEFT's or our adapters in a model are, for :func:`extend`; empty for a plain model."""
    found: dict[str, Any] = {}
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, dict) and configs and PEFT_KEY not in found:
            found[PEFT_KEY] = {
                str(name): _by_name(_plain(config.to_dict()), _adapted(plain_model(module), str(name)))
                for name, config in configs.items()
            }
        if isinstance(module, Adapter) and ADAPTERS_KEY not in found:
            found[ADAPTERS_KEY] = _plain(asdict(module.config))
    return found


def extend(model: nn.Module, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Puts the modules that a delta recorded into a base; their values are whatever is in memory.

    Args:
        model: the base.
        config: of a delta.
        shapes: by plain name, of the tensors that the delta has all values of.

    Returns:
        The model, within a ``PeftModel`` where PEFT was used.

    Raises:
        SparsifyError: when the record is none, or such a model cannot be built from it.
        BaseMismatchError: when the modules have tensors that the delta lacks.
    """
    if isinstance(configs := config.get(PEFT_KEY), dict) and configs:
        model = _with_peft(model, configs)
    if isinstance(settings := config.get(ADAPTERS_KEY), dict):
        with torch.device("meta"):
            insert_adapters(model, _adapter_config(settings))
    _materialise(model, shapes)
    return model


def _adapted(model: nn.Module, adapter: str) -> list[str]:
    """The names of the modules that one of PEFT's adapters has changed, in the model that PEFT was given."""
    return [
        name
        for name, module in model.named_modules()
        if hasattr(module, "base_layer")
        and any(adapter in getattr(module, part, ()) for part in getattr(module, "adapter_layer_names", ()))
    ]


def _by_name(settings: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """PEFT's settings, with the names of the adapted modules in the place of regular expressions."""
    found = dict(settings)
    patterns = [found.get(key) or () for key in (*_MODULES, "layers_pattern")]
    if any(map(_may_backtrack, chain.from_iterable([p] if isinstance(p, str) else p for p in patterns))):
        forward = found.get("feedforward_modules")
        if isinstance(forward, str):
            found["feedforward_modules"] = _any_of(name for name in names if re.fullmatch(forward, name))
        found["target_modules"] = _any_of(names)
        found |= {key: None for key in ("exclude_modules", "layers_to_transform", "layers_pattern") if key in found}
    for key in _PATTERNS:
        given = found.get(key)
        if isinstance(given, dict) and any(map(_may_backtrack, given)):
            # the first that matches counts, as in PEFT
            firsts = {name: next((p for p in given if re.match(rf"(.*\.)?({p})$", name)), None) for name in names}
            kinds = dict.fromkeys(pattern for pattern in firsts.values() if pattern is not None)
            found[key] = {_any_of((n for n in names if firsts[n] == kind), start="^"): given[kind] for kind in kinds}
    return found


def _any_of(names: Iterable[str], start: str = "") -> str:
    return "|".join(start + re.escape(name) for name in names)


def _may_backtrack(pattern: str) -> bool:
    """Whether a regular expression could try more than one way to match each of its alternatives.

    Example:
        >>> _may_backtrack("layers[.]0|layers[.]1"), _may_backtrack("^q_proj"), _may_backtrack("(.*)*q")
        (False, False, True)
    """
    return re.search(r"[*+?{(]", re.sub(r"\\.", "", pattern)) is not None


def _with_peft(model: nn.Module, configs: Mapping[str, Any]) -> nn.Module:
    """The base in a ``PeftModel``, its adapters on the meta device."""
    from peft import PeftModel, get_peft_model

    if len(configs) > _MAX_ITEMS:
        raise SparsifyError(f"the delta records {len(configs):,} adapters, at most {_MAX_ITEMS} are built: {_REMEDY}.")
    most = max(_MAX_ITEMS, sum(1 for _ in model.modules()))
    parsed = {name: _peft_config(name, settings, most) for name, settings in configs.items()}
    try:
        with torch.device("meta"):
            for name, peft_config in parsed.items():
                if isinstance(model, PeftModel):
                    model.add_adapter(name, peft_config, low_cpu_mem_usage=True)
                else:
                    model = get_peft_model(model, peft_config, name, low_cpu_mem_usage=True)
    except Exception as error:  # its code meets settings that nobody has checked
        raise SparsifyError(
            f"PEFT cannot build the adapter that the delta records ({brief(error)}): {_REMEDY}."
        ) from error
    return model


def _peft_config(name: str, settings: Any, most_names: int) -> Any:
    """A record as PEFT's own config."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = settings.get("peft_type") if isinstance(settings, dict) else None
    if kind not in _REBUILT:
        raise SparsifyError(f"the delta records an adapter {name!r:.100} of type {kind!r:.100}: {_REMEDY}.")
    if isinstance(settings.get("init_lora_weights"), str) and settings["init_lora_weights"] != "gaussian":
        raise SparsifyError(
            f"the delta records init_lora_weights={settings['init_lora_weights']!r:.100}, which changes the base's own "
            f"weights: {_REMEDY}."
        )
    config_class: Any = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    names = {field.name for field in fields(config_class) if field.init} - {*_NOT_TAKEN, "peft_type"}
    taken = {key: value for key, value in settings.items() if key in names}
    for key, value in taken.items():
        _check_setting(name, key, value, most_names if key in _MODULES else _MAX_ITEMS)
    try:
        return config_class(**taken)
    except Exception as error:  # its checks expect what PEFT itself writes
        raise SparsifyError(f"the delta records an adapter that PEFT refuses ({brief(error)}): {_REMEDY}.") from error


def _check_setting(adapter: str, key: str, value: Any, most: int) -> None:
    """Raises where a setting holds an expression that could take for ever to match, or more items than are of use."""
    if isinstance(value, (dict, list)) and len(value) > most:
        raise SparsifyError(
            f"the delta records an adapter {brief(adapter, 100)!r} with {len(value):,} items in `{key}`, expected at "
            f"most {most:,}: {_REMEDY}."
        )
    if isinstance(value, str) and _may_backtrack(value):
        raise SparsifyError(
            f"the delta records an adapter {brief(adapter, 100)!r} with a regular expression in `{key}` "
            f"({brief(value, 100)!r}), which may take for ever and is not run: {_REMEDY}."
        )
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    for item in value if isinstance(value, list) else ():
        _check_setting(adapter, key, item, most)


def _adapter_config(settings: Mapping[str, Any]) -> AdapterConfig:
    named = settings.get("target_modules")
    try:
        kind, factor, name = (settings[key] for key in ("kind", "reduction_factor", "name"))
        return AdapterConfig(kind, factor, name, tuple(named) if isinstance(named, list) else named)
    except KeyError as error:
        raise SparsifyError(f"the delta records adapters without `{error.args[0]}`: {_REMEDY}.") from None


def _materialise(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Gives the tensors on the meta device memory, if the delta has values for each."""
    new = {name: tensor for name, tensor in named_tensors(model).items() if tensor.is_meta}
    for name, tensor in new.items():
        if shapes.get(name) != tuple(tensor.shape):
            raise BaseMismatchError(
                f"tensor `{brief(name)}` has shape {tuple(tensor.shape)} in the model that the delta records, and "
                f"{shapes.get(name, 'no values')} in the delta: {_REMEDY}."
            )
    own = [parameter for parameter in model.parameters() if not parameter.is_meta]
    size = sum(tensor.numel() for tensor in new.values())
    if size > max(_ALWAYS_ALLOWED, sum(parameter.numel() for parameter in own)):
        raise SparsifyError(f"the delta adds {size:,} numbers to the base, more than the base has itself: {_REMEDY}.")
    device = own[0].device if own else None
    new_ids = {id(tensor) for tensor in new.values()}
    for module in model.modules():
        for attribute, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in new_ids:
                memory = torch.empty_like(parameter, device=device)
                module._parameters[attribute] = nn.Parameter(memory, parameter.requires_grad)


def _plain(value: Any) -> Any:
    """A setting in JSON types."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return _plain(value.value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
