"""A delta as a PEFT adapter of type ``SPARSIFY``: the files by which transformers and PEFT load a base and a delta.

    adapter_config.json          names the base, and in a file of PEFT the settings: a ``SparseConfig``
    adapter_model.safetensors    KEY: (n,) uint8, the bytes of a delta file; what PEFT stores itself (modules_to_save)

Nothing here needs PEFT. What loads these files does, and ``import sparsify``, without which PEFT knows no such type.
"""

import io
import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from sparsify.delta import format as delta_format
from sparsify.delta.checkpoint.reader import read_header
from sparsify.delta.entries import Config, DeltaParts, StrPath
from sparsify.delta.format import FILE_NAME
from sparsify.delta.peft_files import CONFIG_NAME, PREFIX

PEFT_TYPE = "SPARSIFY"
WEIGHTS_NAME = "adapter_model.safetensors"
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
    if not file.is_file() or (file.parent / FILE_NAME).exists() or KEY not in read_header(file):
        return None
    stored = safetensors.torch.load_file(file)
    tensors, whole, config = from_blob(stored.pop(KEY))
    return tensors, whole | {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}, config


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
