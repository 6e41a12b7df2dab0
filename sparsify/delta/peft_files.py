"""PEFT's adapters as files: a delta as one of type ``SPARSIFY``, and those of others as the change that they make.

    adapter_config.json          names the base, and in a file of PEFT the settings: a ``SparseConfig``
    adapter_model.safetensors    KEY: (n,) uint8, the bytes of a delta file; what PEFT stores itself (modules_to_save)

By these files transformers and PEFT load a base and a delta. To write them needs no PEFT. What loads them does, and
``import sparsify``, without which PEFT knows no such type.
"""

import copy
import io
import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from sparsify.common.names import check_plain, named_tensors
from sparsify.delta import format as delta_format
from sparsify.delta.checkpoint.reader import read_header, read_json
from sparsify.delta.diff import diff
from sparsify.delta.entries import Config, DeltaParts, StrPath
from sparsify.errors import DeltaFormatError, brief

PEFT_TYPE = "SPARSIFY"
CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in PEFT's files
LAYER, DELTAS = "delta_adapters", "sparse_values"  # a module of the model, and its modules by name of the adapter
KEY = f"{PREFIX}{LAYER}.{DELTAS}._extra_state"


def to_blob(*delta: Any) -> Tensor:
    """The bytes of a delta's file, from its parts, as a tensor (n,) uint8."""
    return torch.frombuffer(delta_format.to_bytes(*delta)[0], dtype=torch.uint8).clone()


def from_blob(blob: Tensor) -> DeltaParts:
    """Reverses :func:`to_blob`; raises ``DeltaFormatError`` for anything else."""
    file = io.BytesIO(blob.numpy().tobytes())
    with delta_format.refused("the adapter holds no delta that can be used", "download or save it again"):
        return delta_format.read_contents(file, *delta_format.read_header(file))[0]


def read_adapter(path: StrPath) -> DeltaParts | None:
    """The parts of the delta in the folder of an adapter, with the modules that PEFT stores; ``None`` for any other."""
    file = Path(path, WEIGHTS_NAME)
    if not file.is_file():
        _check_not_pickled(file.parent)
        return None
    if KEY not in read_header(file):
        return None
    stored = safetensors.torch.load_file(file)
    tensors, whole, config = from_blob(stored.pop(KEY))
    held = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
    saved = _saved(held, read_json(file.with_name(CONFIG_NAME)))  # PEFT adds resized tables, which are in the delta
    return tensors, whole | {name: held[name] for name in saved}, config


def _saved(names: Iterable[str], settings: Config) -> list[str]:
    """Those names that are of the ``modules_to_save`` in PEFT's settings."""
    parts = [f".{module}." for module in settings.get("modules_to_save") or ()]
    return [name for name in names if any(part in f".{name}" for part in parts)]


def _check_not_pickled(folder: Path) -> None:
    if (folder / "adapter_model.bin").is_file() and not (folder / WEIGHTS_NAME).is_file():
        problem = f"`{folder}` has an adapter in `adapter_model.bin`, a pickle, which can run code"
        raise DeltaFormatError(f"{problem}: load it with PEFT if you trust it, and save it again as safetensors.")


def settings_of(config: Config, base: str | None = None) -> dict[str, Any]:
    """The ``adapter_config.json`` of a delta's config and a base, by default its own; the adapter is to be run."""
    return {
        "peft_type": PEFT_TYPE,
        "base_model_name_or_path": base or config.get("base_model_name_or_path"),
        "revision": config.get("base_model_revision"),
        "inference_mode": True,
        "auto_mapping": {"base_model_class": config.get("architecture"), "parent_library": "transformers"},
    }


def write_adapter(folder: Path, delta: DeltaParts, base: str | None = None) -> None:
    """Writes a delta as an adapter of a base, by default the recorded one; nothing where none is known."""
    settings, file = settings_of(delta[2], base), folder / WEIGHTS_NAME
    if settings["base_model_name_or_path"] is not None:
        delta_format.replace_file(file, safetensors.torch.save({KEY: to_blob(*delta)}, {"format": "pt"}))
        delta_format.replace_file(folder / CONFIG_NAME, json.dumps(settings, indent=2).encode())


def convert_adapter(folder: StrPath, base: nn.Module) -> DeltaParts:
    """What PEFT changes in a base by merging an adapter; the adapter's ``modules_to_save`` whole."""
    from peft import PeftModel

    check_plain(base)
    settings = read_json(Path(folder, CONFIG_NAME))
    _check_not_pickled(Path(folder))
    if not Path(folder, WEIGHTS_NAME).is_file():
        raise DeltaFormatError(f"`{folder}` has no `{WEIGHTS_NAME}`, which PEFT's `save_pretrained` writes.")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            tuned = PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).merge_and_unload()
    except Exception as error:  # whatever PEFT meets in a broken file, or in one of another base
        problem = f"PEFT cannot merge the adapter in `{folder}` into this base: {brief(error, 1_000)}"
        raise DeltaFormatError(f"{problem}. Nothing was loaded.") from error
    tensors, whole, _ = diff(base, tuned, progress=False)
    held, stored = named_tensors(tuned), read_header(Path(folder, WEIGHTS_NAME))  # with the tables that were resized
    heads = {name: held[name] for name in (*_saved(held, settings), *tensors) if PREFIX + name in stored}
    origin = {
        "base_model_name_or_path": settings.get("base_model_name_or_path"),
        "base_model_revision": settings.get("revision"),
        "converted_from": {key: settings.get(key) for key in ("peft_type", "peft_version")},
    }
    return {name: own for name, own in tensors.items() if name not in heads}, whole | heads, origin
