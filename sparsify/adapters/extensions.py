"""Records the adapters (PEFT's or ours) that a base was extended by before training, and builds them again.

A record is not trusted: nothing is imported or allocated because of it alone. PEFT takes many settings for regular
expressions, some of which would run for ever: none is run that could match in more than one way, and a record has the
names of the modules that such ones matched.
"""

import json
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import nn

from sparsify.adapters.insert import Adapter, AdapterConfig, insert_adapters
from sparsify.common.names import named_tensors, plain_model, tied_names
from sparsify.delta.format import ADAPTERS_KEY, PEFT_KEY
from sparsify.delta.patch_plan import check_has_values
from sparsify.errors import BaseMismatchError, SparsifyError, brief

_REMEDY = "build the model as it was in training (get_peft_model(base, config)), and call delta.apply(model)"
_ALWAYS_ALLOWED = 2**24  # numbers that a delta may add to a base, however small the base is
_REBUILT = ("LORA", "IA3", "LOHA", "LOKR")  # their weights are all in the delta, and the base's stay as they are
_INITS = ("gaussian", "eva", "orthogonal")  # of LoRA, that leave the base's weights alone, too
_NOT_TAKEN = {"auto_mapping", "base_model_name_or_path", "megatron_config", "megatron_core", "revision"}
_NOT_TAKEN |= {"eva_config", "init_lora_weights"}  # the delta has the weights
_MAX_ITEMS = 256  # of a setting that PEFT compares with each module's name, or the number of modules
# an unescaped character, with which an expression could match in more than one way
_MAY_BACKTRACK = re.compile(r"(?<!\\)(\\\\)*[*+?{(]")
_MODULES = ("target_modules", "exclude_modules", "feedforward_modules")  # a regular expression, or a list of names


def record_extensions(model: nn.Module, held: Iterable[str]) -> dict[str, Any]:
    """Records PEFT's adapters of which a delta ``held`` tensors, and ours, for :func:`rebuild`."""
    found: dict[str, Any] = {}
    parts = {part for name in held for part in name.split(".")}
    for module in model.modules():
        if isinstance(configs := getattr(module, "peft_config", None), dict) and configs and PEFT_KEY not in found:
            inner = plain_model(module)
            layer = next((each for each in module.modules() if hasattr(each, "adapter_layer_names")), None)
            active = getattr(layer, "active_adapters", ())  # first, since the first that is built is active
            names = sorted(configs, key=lambda name: name not in active)
            own = {name: getattr(configs[name], "lora", configs[name]) for name in names if name in parts}
            found[PEFT_KEY] = {name: _record(inner, name, config) for name, config in own.items() if config is not None}
        if isinstance(module, Adapter) and ADAPTERS_KEY not in found:
            found[ADAPTERS_KEY] = as_json(asdict(module.config))
    return found


def _record(model: nn.Module, adapter: str, config: Any) -> dict[str, Any]:
    """PEFT's settings, with a regular expression that selects modules replaced by the names of those it selected."""
    settings: dict[str, Any] = as_json({**config.to_dict(), "base_model_name_or_path": None})  # the delta has its own
    if not any(_MAY_BACKTRACK.search(str(settings.get(key) or "")) for key in (*_MODULES, "layers_pattern")):
        return settings
    layers = [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "base_layer")]
    parts = [(name, layer, part) for name, layer in layers for part in getattr(layer, "adapter_layer_names", ())]
    names = dict.fromkeys(name for name, layer, part in parts if adapter in getattr(layer, part, ()))
    dropped = [key for key in ("exclude_modules", "layers_to_transform", "layers_pattern") if key in settings]
    return {**settings, **dict.fromkeys(dropped), "target_modules": "|".join(map(re.escape, names))}


def as_json(settings: dict[str, Any]) -> Any:
    """Settings in JSON types: a set as a sorted list, an enum as its value, any other object as text."""
    text = json.dumps(settings, default=lambda v: sorted(v) if isinstance(v, Set) else getattr(v, "value", str(v)))
    return json.loads(text)


def check_rebuilt(config: Mapping[str, Any]) -> None:
    configs = config.get(PEFT_KEY)
    for name, settings in configs.items() if isinstance(configs, dict) else ():
        kind = settings.get("peft_type") if isinstance(settings, dict) else None
        if kind not in _REBUILT:
            problem = f"an adapter {brief(name, 100)!r} of type {kind!r:.100}, and only {', '.join(_REBUILT)} are built"
            raise SparsifyError(f"the delta records {problem}: {_REMEDY}.")
        if isinstance(init := settings.get("init_lora_weights"), str) and init not in _INITS:
            setting = f"init_lora_weights={init!r:.100}, which may have changed the base's own weights"
            raise SparsifyError(f"the delta records {setting}: {_REMEDY}.")


def rebuild(model: nn.Module, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Adds the modules in a delta's ``config`` to a base, uninitialised; all their tensors have to be in ``shapes``."""
    configs, settings = (config.get(key) for key in (PEFT_KEY, ADAPTERS_KEY))
    if not configs and not isinstance(settings, dict):
        return model
    for name, tensor in named_tensors(model).items():
        check_has_values(name, tensor)
    if isinstance(configs, dict) and configs:
        model = _add_peft_adapters(model, configs)
    if isinstance(settings, dict):
        given: dict[str, Any] = {field.name: settings.get(field.name) for field in fields(AdapterConfig)}
        with torch.device("meta"):
            insert_adapters(model, AdapterConfig(**given))
    tied = tied_names(model)  # of which the delta has the first
    new = {n: t for n, t in named_tensors(model).items() if t.is_meta and tied.get(n, [n])[0] == n}
    for name, tensor in new.items():
        if (held := shapes.get(name, "no values")) != tuple(tensor.shape):
            shape = f"shape {tuple(tensor.shape)} in the model that the delta records, and {held} in the delta"
            raise BaseMismatchError(f"tensor `{brief(name)}` has {shape}: {_REMEDY}.")
    own = [parameter for parameter in model.parameters() if not parameter.is_meta]
    if (size := sum(tensor.numel() for tensor in new.values())) > max(_ALWAYS_ALLOWED, sum(p.numel() for p in own)):
        raise SparsifyError(f"the delta adds {size:,} numbers to the base, more than the base has itself: {_REMEDY}.")
    for module in model.modules():
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            module.to_empty(device=own[0].device if own else "cpu", recurse=False)
    return model


def _add_peft_adapters(model: nn.Module, configs: Mapping[str, Any]) -> nn.Module:
    from peft import PeftModel, get_peft_config, get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    if len(configs) > _MAX_ITEMS:
        raise SparsifyError(f"the delta records {len(configs):,} adapters, at most {_MAX_ITEMS} are built: {_REMEDY}.")
    most_modules = max(_MAX_ITEMS, sum(1 for _ in model.modules()))
    checked: dict[str, dict[str, Any]] = {}
    for name, settings in configs.items():
        config_class: Any = PEFT_TYPE_TO_CONFIG_MAPPING[settings["peft_type"]]
        taken = {field.name for field in fields(config_class) if field.init} - _NOT_TAKEN
        checked[name] = {key: value for key, value in settings.items() if key in taken}
        for key, value in checked[name].items():
            _check_setting(name, key, value, most_modules if key in _MODULES else _MAX_ITEMS)
    try:
        with torch.device("meta"):
            for name, settings in checked.items():
                if isinstance(model, PeftModel):
                    model.add_adapter(name, get_peft_config(settings), low_cpu_mem_usage=True)
                else:
                    model = get_peft_model(model, get_peft_config(settings), name, low_cpu_mem_usage=True)
    except Exception as error:  # PEFT expects settings that PEFT wrote
        problem = f"PEFT cannot build the adapter that the delta records ({brief(error)})"
        raise SparsifyError(f"{problem}: {_REMEDY}.") from error
    return model


def _check_setting(adapter: str, key: str, value: Any, most: int) -> None:
    given = f"the delta records an adapter {brief(adapter, 100)!r} with"
    if isinstance(value, (dict, list)) and len(value) > most:
        raise SparsifyError(f"{given} {len(value):,} items in `{key}`, expected at most {most:,}: {_REMEDY}.")
    if isinstance(value, str) and _MAY_BACKTRACK.search(value):
        problem = f"a regular expression in `{key}` ({brief(value, 100)!r}), which may take for ever and is not run"
        raise SparsifyError(f"{given} {problem}: {_REMEDY}.")
    value = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    for item in value if isinstance(value, list) else ():
        _check_setting(adapter, key, item, most)
