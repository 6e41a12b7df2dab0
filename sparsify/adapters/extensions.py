"""Records the adapters (PEFT's or ours) that a base was extended by before training, and builds them again.

In: a model, or a delta's record of one. Out: the record, in JSON types; or the base with the same modules, not yet with
values. A record is not trusted: it is checked, and nothing is imported or allocated because of it alone.

PEFT interprets many settings as regular expressions, and some of these would take for ever. So a record holds the names
of the modules that they matched, and no recorded expression is run that could match in more than one way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
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
# of a setting, unless it lists names and the model has more modules: PEFT compares each item with each module's name,
# and compiles an expression anew where there are more than `re` keeps
_MAX_ITEMS = 256
_MODULES = ("target_modules", "exclude_modules", "feedforward_modules")  # a regular expression, or a list of names
_PATTERNS = ("rank_pattern", "alpha_pattern")  # settings of single modules, by a regular expression
_REMEDY = "build the model as it was in training (get_peft_model(base, config)), and call delta.apply(model)"


def record_extensions(model: nn.Module, held: Iterable[str]) -> dict[str, Any]:
    """Records PEFT's or our adapters in a model, for :func:`extend`; the record of a plain model is empty.

    ``held`` are the names of the delta's tensors: one of PEFT's adapters that has none of them, such as the copy that
    TRL's DPOTrainer adds as its reference, is left out.
    """
    named = {part for name in held for part in name.split(".")}
    found: dict[str, Any] = {}
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, dict) and configs and PEFT_KEY not in found:
            found[PEFT_KEY] = {
                str(name): _by_name(_as_json(config.to_dict()), _adapted(plain_model(module), str(name)))
                for name, config in configs.items()
                if str(name) in named
            }
        if isinstance(module, Adapter) and ADAPTERS_KEY not in found:
            found[ADAPTERS_KEY] = _as_json(asdict(module.config))
    return found


def extend(model: nn.Module, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Adds the modules that a delta recorded to a base, with uninitialised values; within a ``PeftModel`` for PEFT's.

    ``config`` is a delta's, ``shapes`` those of the tensors that it has all values of, by plain name. Raises where the
    record is invalid, no such model can be built from it, or the delta lacks tensors of the modules.
    """
    if isinstance(configs := config.get(PEFT_KEY), dict) and configs:
        model = _with_peft(model, configs)
    if isinstance(settings := config.get(ADAPTERS_KEY), dict):
        given: dict[str, Any] = {field.name: settings.get(field.name) for field in fields(AdapterConfig)}
        with torch.device("meta"):
            insert_adapters(model, AdapterConfig(**given))
    _materialise(model, shapes)
    return model


def _adapted(model: nn.Module, adapter: str) -> list[str]:
    """The names of the modules that one of PEFT's adapters changes, in the model that PEFT was given."""
    return [
        name
        for name, module in model.named_modules()
        if hasattr(module, "base_layer")
        and any(adapter in getattr(module, part, ()) for part in getattr(module, "adapter_layer_names", ()))
    ]


def _by_name(settings: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """PEFT's settings, with regular expressions replaced by the names of the adapted modules."""
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
    except Exception as error:  # PEFT does not check the settings
        raise SparsifyError(
            f"PEFT cannot build the adapter that the delta records ({brief(error)}): {_REMEDY}."
        ) from error
    return model


def _peft_config(name: str, settings: Any, most_items: int) -> Any:
    """PEFT's own config for a record."""
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
        _check_setting(name, key, value, most_items if key in _MODULES else _MAX_ITEMS)
    try:
        return config_class(**taken)
    except Exception as error:  # PEFT's own checks expect settings that PEFT wrote
        raise SparsifyError(f"the delta records an adapter that PEFT refuses ({brief(error)}): {_REMEDY}.") from error


def _check_setting(adapter: str, key: str, value: Any, most: int) -> None:
    """Raises where a setting has too many items, or an expression that could take for ever to match."""
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


def _materialise(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Allocates the tensors on the meta device, if the delta has values for each."""
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
    for module in model.modules():
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            module.to_empty(device=own[0].device if own else "cpu", recurse=False)


def _as_json(settings: dict[str, Any]) -> Any:
    """Settings in JSON types: a set as a sorted list, an enum as its value, any other object as text."""

    def convert(value: Any) -> Any:
        return sorted(value) if isinstance(value, (set, frozenset)) else getattr(value, "value", str(value))

    return json.loads(json.dumps(settings, default=convert))
