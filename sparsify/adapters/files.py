"""Saves and loads adapters in AdapterHub's format, without pickle; each library reads the other's files."""

import json
import os
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from sparsify.adapters import insert
from sparsify.common.names import near_names, plain_model, plain_name
from sparsify.delta.checkpoint.reader import read_json
from sparsify.delta.format import replace_file
from sparsify.errors import SparsifyError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter.safetensors"
_VERSION = "adapters.1.3.0"  # of AdapterHub, whose format it is
# settings of AdapterHub's BnConfig that the two kinds have in common
_SETTINGS: dict[str, Any] = {
    "output_adapter": True, "cross_adapter": False, "original_ln_after": True, "residual_before_ln": True,
    "adapter_residual_before_ln": False, "ln_before": False, "ln_after": False, "is_parallel": False,
    "use_gating": False, "scaling": 1.0, "dropout": 0.0, "stochastic_depth": 0.0, "phm_layer": False,
    "inv_adapter": None, "leave_out": [],
}  # fmt: skip


def save_adapters(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Writes a model's adapters, without its base and head, into a folder.

    Args:
        model: a model with adapters, sparsified or not.
        folder: made where it is missing; AdapterHub's ``model.load_adapter(folder, use_safetensors=True)`` reads it.

    Raises:
        SparsifyError: when the model has no adapters.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertModel
        >>> from sparsify.adapters import add_adapters
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapters(add_adapters(BertModel(BertConfig(num_hidden_layers=1))), folder)
        ...     _ = load_adapters(BertModel(BertConfig(num_hidden_layers=1)), folder)
    """
    adapters = insert.find_adapters(model)
    config = next(iter(adapters.values())).config
    state = model.state_dict()
    names = [f"{prefix}.{name}" for prefix, adapter in adapters.items() for name, _ in adapter.named_parameters()]
    tensors = {plain_name(name): state[name].detach().cpu().contiguous() for name in names}
    inner = plain_model(model)
    base = getattr(inner, "config", None)
    full = {  # that AdapterHub writes next to the weights, and the modules that the user named
        "config": {**_SETTINGS, **insert.KINDS[config.kind], "reduction_factor": config.reduction_factor},
        "hidden_size": getattr(base, "hidden_size", None),
        "model_class": type(inner).__name__,
        "model_name": getattr(base, "name_or_path", None),
        "model_type": getattr(base, "model_type", None),
        "name": config.name,
        "version": _VERSION,
        **({} if config.target_modules is None else {"target_modules": config.target_modules}),
    }
    text = json.dumps(full, indent=2, sort_keys=True) + "\n"
    replace_file(Path(folder) / WEIGHTS_NAME, safetensors.torch.save(tensors, {"format": "pt"}))
    replace_file(Path(folder) / CONFIG_NAME, text.encode())


def load_adapters(model: insert.Model, folder: str | os.PathLike[str]) -> insert.Model:
    """Adds the adapters of a folder to a model, in place, as :func:`add_adapters` does, and returns it.

    Args:
        model: a base without adapters.
        folder: written by :func:`save_adapters`, or by AdapterHub's ``save_adapter(..., use_safetensors=True)`` for
            its configs ``"seq_bn"`` and ``"double_seq_bn"``.

    Raises:
        SparsifyError: before any change, when the folder holds no such adapters, or those of another architecture.
    """
    insert.check_without_adapters(model)
    folder = Path(folder)
    config = _read_config(folder / CONFIG_NAME)
    shapes: dict[str, tuple[int, ...]] = {}
    for place in insert.find_places(model, config):
        with torch.device("meta"):
            parameters = insert.Adapter(place.width, config).named_parameters(f"{place.name}.{config.name}")
        shapes |= {name: tuple(parameter.shape) for name, parameter in parameters}
    file, model_class = folder / WEIGHTS_NAME, type(model).__name__
    try:
        tensors = safetensors.torch.load_file(file)
    except (OSError, SafetensorError) as error:
        how = "AdapterHub writes it with save_adapter(..., use_safetensors=True)"
        raise SparsifyError(f"{file} cannot be read ({error}); {how}.") from None
    for name in [*shapes, *tensors]:
        if name not in tensors:
            raise SparsifyError(f"{file} has no `{name}`, which {model_class} needs{near_names(name, tensors)}.")
        if name not in shapes:
            raise SparsifyError(f"{file} has `{name}`, for which {model_class} has no place{near_names(name, shapes)}.")
        if (shape := tuple(tensors[name].shape)) != shapes[name]:
            raise SparsifyError(f"{file}: `{name}` has the shape {shape}, {model_class} needs {shapes[name]}.")
    insert.insert_adapters(model, config)
    model.load_state_dict(tensors, strict=False)
    return model


def _read_config(path: Path) -> insert.AdapterConfig:
    full = read_json(path)
    given = full.get("config")
    if not isinstance(given, dict) or "name" not in full or "reduction_factor" not in given:
        raise SparsifyError(f"{path} is no config of AdapterHub's bottleneck adapters; expected save_adapters()'s.")
    for kind, known in insert.KINDS.items():
        if all(given.get(key, value) == value for key, value in {**_SETTINGS, **known}.items()):
            return insert.AdapterConfig(kind, given["reduction_factor"], full["name"], full.get("target_modules"))
    raise SparsifyError(f"{path} describes neither Houlsby nor Pfeiffer adapters as AdapterHub has them by default.")
