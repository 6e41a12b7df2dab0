"""PEFT's adapters as files: a delta as one of type ``SPARSIFY``, and entries that SHiRA or Supertuning trained.

    adapter_config.json          names the base, and in a file of PEFT the settings: a ``SparseConfig``
    adapter_model.safetensors    KEY: (n,) uint8, the bytes of a delta file; what PEFT stores itself (modules_to_save)

By these files transformers and PEFT load a base and a delta. Nothing here needs PEFT. What loads them does, and
``import sparsify``, without which PEFT knows no such type.

The adapters of others are not trusted: all checks first, and no pickle. Their methods give a layer a number of places
that follows from its size. An unused place holds 0.0, and a position may come twice: a difference that the dtype cannot
hold exactly may be stored in two parts.
"""

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from sparsify.common.names import near_names, tied_names
from sparsify.common.raw_bits import digest
from sparsify.delta import format as delta_format
from sparsify.delta.checkpoint.reader import Checkpoint, open_base, read_header, read_json
from sparsify.delta.entries import DTYPES, Base, Config, DeltaParts, StrPath, TensorDelta, check, one_of
from sparsify.delta.patch_plan import check_fits
from sparsify.errors import BaseMismatchError, DeltaFormatError, SparsifyError, brief

PEFT_TYPE = "SPARSIFY"
CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in PEFT's files
LAYER, DELTAS = "delta_adapters", "sparse_values"  # a module of the model, and its modules by name of the adapter
KEY = f"{PREFIX}{LAYER}.{DELTAS}._extra_state"

# by method: the end of the names of values (count,); indices are rows and columns (2, count), or flat (count,)
METHODS = {"shira": "shira_weight", "supertuning": "supertuning_values"}
_MERGE = "merge it with PEFT (`merge_and_unload`) and use `SparseDelta.diff(base, merged)`"


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
    if not file.is_file() or (file.parent / delta_format.FILE_NAME).exists() or KEY not in read_header(file):
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


def convert_adapter(folder: StrPath, base: Base) -> DeltaParts:
    folder, tensors = Path(folder), open_base(base)
    ties = tied_names(base) if isinstance(base, nn.Module) else Checkpoint(base).conversion.tied
    found: dict[str, TensorDelta] = {}
    try:
        config = read_json(folder / CONFIG_NAME)
        method = _find_method(config)
        layers, whole = _read_weights(folder / WEIGHTS_NAME, method)
        for layer, parts in layers.items():
            name = f"{layer}.weight"
            if others := [other for other in ties.get(name, []) if other != name]:
                one = f"`{name}`, which in this base is one tensor with `{others[0]}`"
                raise SparsifyError(f"it changes {one}, in one place only: {_MERGE}")
            if (entries := _entries(layer, parts, config, method, tensors)) is not None:
                found[name] = entries
        saved = config.get("modules_to_save")
        for name, tensor in whole.items():
            if name in tensors:
                check_fits(name, tensor, tensors[name].shape, tensors[name].dtype)
            elif not isinstance(saved, list) or not any(f".{module}." in f".{name}" for module in saved):
                raise SparsifyError(f"`{name}` is neither a tensor of the base nor in one of its `modules_to_save`")
    except BaseMismatchError:
        raise
    except (SparsifyError, SafetensorError) as error:
        problem = f"`{folder}` is no adapter that can become a delta: {brief(error, 1_000)}"
        raise DeltaFormatError(f"{problem}. Nothing was loaded.") from error
    origin = {
        "base_model_name_or_path": config.get("base_model_name_or_path"),
        "base_model_revision": config.get("revision"),
        "converted_from": {key: config.get(key) for key in ("peft_type", "peft_version")},
    }
    return found, whole, origin


def _find_method(config: Mapping[str, Any]) -> str:
    """The method of a config, as read from its file; raises where it asks for more than entries in a layer."""
    kind = config.get("peft_type")
    if (name := str(kind).lower()) not in METHODS:
        others = " and ".join(map(str.upper, METHODS))
        raise SparsifyError(f"its `peft_type` is {kind!r:.100}, and only {others} change entries: {_MERGE}")
    if name == "supertuning" and config.get("r") is not None:
        raise SparsifyError(f"it has a LoRA part (`r` is {config['r']!r:.100}, the Supra hybrid): {_MERGE}")
    if name == "supertuning" and not config.get("save_precomputed_indices", True):
        raise SparsifyError("it was saved without its indices: save it with PEFT's `save_precomputed_indices`")
    return name


def _read_weights(path: Path, method: str) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    if not path.is_file():
        pickle = "an `adapter_model.bin` can run code: load it with PEFT if you trust it, and save it again"
        raise SparsifyError(f"it has no `{path.name}`: give the folder that PEFT's `save_pretrained` wrote; {pickle}")
    found = {key.removeprefix(PREFIX): own.clone() for key, own in safetensors.torch.load_file(path).items()}
    stored = {name: own for name, own in found.items() if ".base_layer." not in name}  # PEFT's copies of embeddings
    values_key, indices_key = METHODS[method], f"{method}_indices"
    partners = {values_key: indices_key, indices_key: values_key}
    layers: dict[str, tuple[Tensor, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        layer, _, role = name.rpartition(".")
        if role not in partners:
            whole[name] = tensor
        elif (partner := f"{layer}.{partners[role]}") not in stored:
            raise SparsifyError(f"`{name}` is there without `{partner}`")
        elif role == values_key:
            layers[layer] = (tensor, stored[partner])
    if not layers:
        raise SparsifyError(f"no tensor in it is called `<layer>.{values_key}`")
    return layers, whole


def _entries(
    layer: str, parts: tuple[Tensor, Tensor], config: Mapping[str, Any], method: str, tensors: Mapping[str, Tensor]
) -> TensorDelta | None:
    if (name := f"{layer}.weight") not in tensors:
        near = near_names(name, tensors)
        raise BaseMismatchError(f"the base has no tensor `{name}`{near}: give the base that was fine-tuned.")
    weight = tensors[name]
    shape, (values, stored) = tuple(weight.shape), parts
    if weight.dim() != 2 or weight.dtype not in DTYPES.values():
        found = f"tensor `{name}` of the base has shape {shape} and is {weight.dtype}; the adapter is of a"
        raise BaseMismatchError(f"{found} linear layer: give the base that it was trained on, unquantized.")
    try:
        is_flat = method == "supertuning"
        places = int(math.prod(shape) * (1 - float(config["sparsity"])) if is_flat else float(config["r"]) * sum(shape))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SparsifyError(f"its `{CONFIG_NAME}` gives no number of entries ({brief(error)})") from error
    if values.shape != (places,):
        found = f"values of shape {tuple(values.shape)}, where the adapter's config has {places:,} for shape {shape}"
        raise BaseMismatchError(f"layer `{layer}` has {found}: give the base that it was trained on.")
    try:
        check(values.dtype in DTYPES.values(), "values are", values.dtype, one_of(DTYPES.values()))
        expected, given = (places,) if is_flat else (2, places), tuple(stored.shape)
        check(given == expected, "indices have shape", given, f"{expected} for {places:,} values")
        indices, owners = _positions(stored, (math.prod(shape),) if is_flat else shape).unique(return_inverse=True)
        base = weight.detach().take(indices.to(weight.device)).cpu()
        differences = values.to(torch.promote_types(base.dtype, torch.float32))
        if is_flat:
            trained = base.scatter_add(0, owners, differences.to(base.dtype))
        else:  # in place, so that the sum of a low-precision weight and float32 is rounded once
            trained = base.clone()
            trained += torch.sparse_coo_tensor(owners[None], differences, base.shape, check_invariants=False)
        changed = trained != base  # also where it is not a number, which the entries' own check refuses
        if not changed.any():
            return None
        return TensorDelta(indices[changed], trained[changed], shape, base.dtype, "replace", digest(base[changed]))
    except SparsifyError as error:
        raise SparsifyError(f"layer `{layer}`: {error}") from error


def _positions(stored: Tensor, sizes: Sequence[int]) -> Tensor:
    """The flat positions (count,) int64 of stored indices, checked to be within the sizes that they are of."""
    expected = (torch.int32, torch.int64, torch.float32)  # the last is PEFT's on Windows
    check(stored.dtype in expected, "indices are", stored.dtype, "torch.int32")
    if stored.is_floating_point() and not torch.equal(stored, stored.round()):
        raise SparsifyError("indices are no whole numbers")
    positions = torch.zeros(stored.shape[-1], dtype=torch.int64, device=stored.device)
    for row, size in zip(stored.long().view(len(sizes), -1), sizes, strict=True):
        if row.numel() and not 0 <= int(row.min()) <= int(row.max()) < size:
            raise SparsifyError(f"indices go from {int(row.min())} to {int(row.max())}, expected 0 to {size - 1}")
        positions = positions * size + row
    return positions
