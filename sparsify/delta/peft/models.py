"""Records the adapters that PEFT added to a base before training, and adds them again, on the meta device.

A record is not trusted: it is checked, and nothing is imported or allocated because of it alone. PEFT interprets many
settings as regular expressions, some of which would take for ever: a record holds the names of the modules that they
matched, and no recorded expression is run that could match in more than one way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from itertools import chain
from typing import Any

import torch
from torch import nn

from sparsify.errors import SparsifyError, brief

REMEDY = "build the model as it was in training (get_peft_model(base, config)), and call delta.apply(model)"
_REBUILT = ("LORA", "IA3", "LOHA", "LOKR")  # their weights are all in the delta, and the base's stay as they are
_NOT_TAKEN = ("auto_mapping", "base_model_name_or_path", "megatron_config", "megatron_core", "revision")
# of a setting, unless it lists names and the model has more modules: PEFT compares each item with each module's name,
# and compiles an expression anew where there are more than `re` keeps
_MAX_ITEMS = 256
_MODULES = ("target_modules", "exclude_modules", "feedforward_modules")  # a regular expression, or a list of names


def record_peft_adapters(model: nn.Module, configs: Mapping[Any, Any], held: Collection[str]) -> dict[str, Any]:
    """The settings, by name, of those of PEFT's adapters in a model whose names are in ``held``."""
    named = {str(name): config for name, config in configs.items() if str(name) in held}
    return {name: _by_name(as_json(config.to_dict()), _adapted(model, name)) for name, config in named.items()}


def add_peft_adapters(model: nn.Module, configs: Mapping[str, Any]) -> nn.Module:
    """The base in a ``PeftModel``, its adapters on the meta device."""
    from peft import PeftModel, get_peft_model

    if len(configs) > _MAX_ITEMS:
        raise SparsifyError(f"the delta records {len(configs):,} adapters, at most {_MAX_ITEMS} are built: {REMEDY}.")
    most = max(_MAX_ITEMS, sum(1 for _ in model.modules()))
    parsed = {name: _peft_config(name, settings, most) for name, settings in configs.items()}
    try:
        with torch.device("meta"):
            for name, peft_config in parsed.items():
                if isinstance(model, PeftModel):
                    model.add_adapter(name, peft_config, low_cpu_mem_usage=True)
                else:
                    model = get_peft_model(model, peft_config, name, low_cpu_mem_usage=True)
    except Exception as error:  # PEFT does not check the settings
        problem = f"PEFT cannot build the adapter that the delta records ({brief(error)})"
        raise SparsifyError(f"{problem}: {REMEDY}.") from error
    return model


def _adapted(model: nn.Module, adapter: str) -> list[str]:
    """The names of the modules that one of PEFT's adapters changes."""
    return [
        name
        for name, module in model.named_modules()
        if hasattr(module, "base_layer")
        and any(adapter in getattr(module, part, ()) for part in getattr(module, "adapter_layer_names", ()))
    ]


def _by_name(settings: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """PEFT's settings, with a regular expression that selects modules replaced by the names of those it selected."""
    patterns = [settings.get(key) or () for key in (*_MODULES, "layers_pattern")]
    if not any(map(_may_backtrack, chain.from_iterable([p] if isinstance(p, str) else p for p in patterns))):
        return settings
    dropped = [key for key in ("exclude_modules", "layers_to_transform", "layers_pattern") if key in settings]
    return {**settings, **dict.fromkeys(dropped), "target_modules": "|".join(map(re.escape, names))}


def _may_backtrack(pattern: str) -> bool:
    """Whether a regular expression could try more than one way to match each of its alternatives.

    Example:
        >>> _may_backtrack("layers[.]0|layers[.]1"), _may_backtrack("^q_proj"), _may_backtrack("(.*)*q")
        (False, False, True)
    """
    return re.search(r"[*+?{(]", re.sub(r"\\.", "", pattern)) is not None


def _peft_config(name: str, settings: Any, most_items: int) -> Any:
    """PEFT's own config for a record."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = settings.get("peft_type") if isinstance(settings, dict) else None
    if kind not in _REBUILT:
        raise SparsifyError(f"the delta records an adapter {name!r:.100} of type {kind!r:.100}: {REMEDY}.")
    if isinstance(settings.get("init_lora_weights"), str) and settings["init_lora_weights"] != "gaussian":
        setting = f"init_lora_weights={settings['init_lora_weights']!r:.100}, which changes the base's own weights"
        raise SparsifyError(f"the delta records {setting}: {REMEDY}.")
    config_class: Any = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    names = {field.name for field in fields(config_class) if field.init} - {*_NOT_TAKEN, "peft_type"}
    taken = {key: value for key, value in settings.items() if key in names}
    for key, value in taken.items():
        _check_setting(name, key, value, most_items if key in _MODULES else _MAX_ITEMS)
    try:
        return config_class(**taken)
    except Exception as error:  # PEFT's own checks expect settings that PEFT wrote
        raise SparsifyError(f"the delta records an adapter that PEFT refuses ({brief(error)}): {REMEDY}.") from error


def _check_setting(adapter: str, key: str, value: Any, most: int) -> None:
    """Raises where a setting has too many items, or an expression that could take for ever to match."""
    given = f"the delta records an adapter {brief(adapter, 100)!r} with"
    if isinstance(value, (dict, list)) and len(value) > most:
        raise SparsifyError(f"{given} {len(value):,} items in `{key}`, expected at most {most:,}: {REMEDY}.")
    if isinstance(value, str) and _may_backtrack(value):
        problem = f"a regular expression in `{key}` ({brief(value, 100)!r}), which may take for ever and is not run"
        raise SparsifyError(f"{given} {problem}: {REMEDY}.")
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    for item in value if isinstance(value, list) else ():
        _check_setting(adapter, key, item, most)


def as_json(settings: dict[str, Any]) -> Any:
    """Settings in JSON types: a set as a sorted list, an enum as its value, any other object as text."""

    def convert(value: Any) -> Any:
        return sorted(value) if isinstance(value, (set, frozenset)) else getattr(value, "value", str(value))

    return json.loads(json.dumps(settings, default=convert))
