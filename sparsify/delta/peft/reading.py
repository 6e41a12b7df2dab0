"""Reads PEFT's SHiRA and Supertuning adapters, which may come from strangers: all checks first, and no pickle.

In: a folder, and the base. Out: entries that replace the base's values by those that PEFT computes with, and the
tensors of ``modules_to_save``. Padding, and entries that were never trained, are left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sparsify.common.names import tied_names
from sparsify.common.raw_bits import digest
from sparsify.delta.checkpoint.reader import base_tensor, open_base
from sparsify.delta.entries import DTYPES, TensorDelta
from sparsify.delta.format import DeltaFile
from sparsify.delta.patch_plan import counted, plan_dense
from sparsify.delta.peft.base import Base, inside
from sparsify.delta.peft.methods import CONFIG_NAME, METHODS, PREFIX, WEIGHTS_NAME, SparseMethod, held_dtype
from sparsify.errors import BaseMismatchError, DeltaFormatError, SparsifyError, brief

MAX_CONFIG_BYTES = 2**20
_PICKLE_NAME = "adapter_model.bin"


def read_adapter(folder: str | os.PathLike[str], base: Base) -> DeltaFile:
    """Reads a sparse adapter of PEFT as a delta's parts; see :meth:`sparsify.SparseDelta.from_peft`."""
    folder, tensors = Path(folder), open_base(base)
    try:
        config = _read_config(folder)
        method = METHODS[config["peft_type"].lower()]
        method.check_settings(config)
        layers, whole = _sort(_read_weights(folder), method)
        if isinstance(base, nn.Module):
            _check_ties(layers, base)
        entries = {f"{layer}.weight": _layer(layer, parts, config, method, tensors) for layer, parts in layers.items()}
        _check_whole(whole, config, tensors)
    except BaseMismatchError:
        raise
    except (SparsifyError, SafetensorError) as error:
        raise DeltaFormatError(
            f"`{folder}` is no adapter that can become a delta: {brief(error, 1_000)}. Nothing was loaded."
        ) from error
    origin = {key: config.get(key) for key in ("peft_type", "peft_version")}
    return DeltaFile(
        {name: entry for name, entry in entries.items() if entry is not None},
        whole,
        {
            "base_model_name_or_path": config.get("base_model_name_or_path"),
            "base_model_revision": config.get("revision"),
            "converted_from": origin,
        },
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """The adapter's config, of one of the sparse methods."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise SparsifyError(f"it has no `{CONFIG_NAME}`: give the folder that PEFT's `save_pretrained` wrote")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise SparsifyError(f"its `{CONFIG_NAME}` is longer than {MAX_CONFIG_BYTES:,} bytes")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SparsifyError(f"its `{CONFIG_NAME}` is no JSON ({brief(error)})") from error
    peft_type = config.get("peft_type") if isinstance(config, dict) else None
    if not isinstance(peft_type, str) or peft_type.lower() not in METHODS:
        raise SparsifyError(
            f"its `peft_type` is {peft_type!r:.100}, and only {' and '.join(map(str.upper, METHODS))} change entries: "
            "merge it with PEFT (`merge_and_unload`) and use `SparseDelta.diff(base, merged)`"
        )
    saved = config.get("modules_to_save")
    if saved is not None and not (isinstance(saved, list) and all(isinstance(name, str) for name in saved)):
        raise SparsifyError(f"its `modules_to_save` is {saved!r:.100}, expected a list of names")
    return dict(config)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """The adapter's tensors by plain name, in memory of their own."""
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        pickle = (
            f", only a `{_PICKLE_NAME}`, a pickle, which can run code when it is loaded: load it with PEFT if you "
            "trust it, and save it again"
            if (folder / _PICKLE_NAME).is_file()
            else f": give the folder that PEFT's `save_pretrained` wrote, with its `{CONFIG_NAME}`"
        )
        raise SparsifyError(f"it has no `{WEIGHTS_NAME}`{pickle}")
    with safe_open(path, framework="pt", device="cpu") as file:
        return {key.removeprefix(PREFIX): file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118


def _sort(
    stored: Mapping[str, Tensor], method: SparseMethod
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """Values and indices by layer, and all other tensors."""
    layers: dict[str, tuple[Tensor, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        layer, _, role = name.rpartition(".")
        partner = {method.values_key: method.indices_key, method.indices_key: method.values_key}.get(role)
        if partner is None:
            whole[name] = tensor
        elif f"{layer}.{partner}" not in stored:
            raise SparsifyError(f"`{name}` is there without `{layer}.{partner}`")
        elif role == method.values_key:
            layers[layer] = (tensor, stored[f"{layer}.{partner}"])
    if not layers:
        raise SparsifyError(f"no tensor in it is called `<layer>.{method.values_key}`")
    return layers, whole


def _check_ties(layers: Iterable[str], base: nn.Module) -> None:
    """Raises where PEFT changes one use of a weight that a delta would change in all of them."""
    ties = tied_names(base)
    for name in (f"{layer}.weight" for layer in layers):
        if others := [other for other in ties.get(name, []) if other != name]:
            raise SparsifyError(
                f"it changes `{name}`, which in this base is one tensor with `{others[0]}`, and PEFT changes it in one "
                "place only: merge it with PEFT (`merge_and_unload`) and use `SparseDelta.diff(base, merged)`"
            )


def _layer(
    layer: str,
    parts: tuple[Tensor, Tensor],
    config: Mapping[str, Any],
    method: SparseMethod,
    tensors: Mapping[str, Tensor],
) -> TensorDelta | None:
    """One layer's entries, checked; None where nothing differs from the base."""
    name = f"{layer}.weight"
    weight = base_tensor(name, tensors)
    if weight.dim() != 2 or weight.dtype not in DTYPES.values():
        raise BaseMismatchError(
            f"tensor `{name}` of the base has shape {tuple(weight.shape)} and is {weight.dtype}; the adapter changes "
            "the weight of a linear layer: give the base that it was trained on, unquantized."
        )
    try:
        return _entries(parts, config, method, weight)
    except SparsifyError as error:
        raise type(error)(f"layer `{layer}`: {error}") from error


def _entries(
    parts: tuple[Tensor, Tensor], config: Mapping[str, Any], method: SparseMethod, weight: Tensor
) -> TensorDelta | None:
    values, stored = parts
    shape = tuple(weight.shape)
    places = method.places(config, shape)
    if values.shape != (places,):
        raise BaseMismatchError(
            f"it has values of shape {tuple(values.shape)}, where its config has {places:,} for the base's weight of "
            f"shape {shape}: give the base that it was trained on."
        )
    if values.dtype not in DTYPES.values():
        raise SparsifyError(f"values are {values.dtype}, expected one of {', '.join(map(str, DTYPES.values()))}")
    positions = method.read_positions(stored, shape)
    if positions.shape != values.shape:
        raise SparsifyError(f"there are {counted(positions.numel(), 'index', 'indices')} for {places:,} values")
    indices, owners = positions.unique(return_inverse=True)
    base = weight.detach().take(indices.to(weight.device)).cpu()
    trained = method.add(base, owners, values.to(held_dtype(base.dtype)))
    changed = trained != base  # also where it is not a number: that is for the entries' own check
    if not changed.any():
        return None
    return TensorDelta(
        indices=indices[changed],
        values=trained[changed],
        shape=shape,
        dtype=base.dtype,
        kind="replace",
        base_sha256=digest(base[changed]),
    )


def _check_whole(whole: Mapping[str, Tensor], config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raises unless every other tensor replaces one of the base's, or belongs to a module that was saved whole."""
    saved = config.get("modules_to_save") or []
    for name, tensor in whole.items():
        if name in tensors:
            plan_dense(name, tensor, tensors[name])
        elif not (inside(name, saved) or any(f".{module}." in name for module in saved)):
            raise SparsifyError(f"`{name}` is neither a tensor of the base nor in one of its `modules_to_save`")
