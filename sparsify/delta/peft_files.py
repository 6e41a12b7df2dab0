"""Reads PEFT's SHiRA and Supertuning adapters, which are not trusted: all checks first, and no pickle.

    folder that PEFT wrote + base --read_adapter--> entries with the values that PEFT computes, tensors stored whole

Both methods give a layer a number of places that follows from its size. An unused place holds 0.0, and a position may
come twice: a difference that the dtype cannot hold exactly may be stored in two parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sparsify.common.names import tied_names
from sparsify.common.raw_bits import digest
from sparsify.delta.checkpoint.reader import base_tensor, open_base, read_json
from sparsify.delta.entries import DTYPES, Base, DeltaParts, StrPath, TensorDelta, one_of, require
from sparsify.delta.patch_plan import check_fits, counted
from sparsify.errors import BaseMismatchError, DeltaFormatError, SparsifyError, brief

CONFIG_NAME, WEIGHTS_NAME, _PICKLE_NAME = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."  # of every name in PEFT's files
_MERGE = "merge it with PEFT (`merge_and_unload`) and use `SparseDelta.diff(base, merged)`"

Shape = tuple[int, ...]


class Shira:
    """r * (in_features + out_features) places in a layer; rows and columns in int32, 8 bytes an entry."""

    name, values_key, indices_key = "shira", "shira_weight", "shira_indices"

    def places(self, settings: Mapping[str, Any], shape: Shape) -> int:
        """The number of places that PEFT makes for a weight of this shape (out_features, in_features)."""
        return int(float(settings["r"]) * sum(shape))

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raises where a config, as read from its file, asks for more than entries in a layer."""

    def read_positions(self, stored: Tensor, shape: Shape) -> Tensor:
        """The flat positions (count,) int64, checked to be in the weight."""
        rows, columns = _checked(stored, shape)
        return rows * shape[1] + columns

    def add(self, base: Tensor, positions: Tensor, differences: Tensor) -> Tensor:
        """The values that PEFT computes with: base (n,), plus differences (count,) at positions, some of them twice."""
        result = base.clone()
        # in place, as PEFT does, so that the sum of a low-precision weight and float32 is rounded once
        result += torch.sparse_coo_tensor(positions[None], differences, base.shape, check_invariants=False)
        return result


class Supertuning:
    """int(numel * (1 - sparsity)) places in a layer; flat positions in int32, 4 bytes an entry. Methods as Shira's."""

    name, values_key, indices_key = "supertuning", "supertuning_values", "supertuning_indices"

    def places(self, settings: Mapping[str, Any], shape: Shape) -> int:
        return int(math.prod(shape) * (1 - float(settings["sparsity"])))

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        if settings.get("r") is not None:
            part = f"a LoRA part (`r` is {settings['r']!r:.100}, the Supra hybrid)"
            raise SparsifyError(f"it has {part}: merge it with PEFT (`merge_and_unload`) and use `SparseDelta.diff`")
        if not settings.get("save_precomputed_indices", True):
            remedy = "load it with PEFT, and save it with them (`save_precomputed_indices`)"
            raise SparsifyError(f"it was saved without its indices: {remedy}")

    def read_positions(self, stored: Tensor, shape: Shape) -> Tensor:
        return _checked(stored, (math.prod(shape),))

    def add(self, base: Tensor, positions: Tensor, differences: Tensor) -> Tensor:
        return base.scatter_add(0, positions, differences.to(base.dtype))


Method = Shira | Supertuning
METHODS: dict[str, Method] = {method.name: method for method in (Shira(), Supertuning())}


def read_adapter(folder: StrPath, base: Base) -> DeltaParts:
    """Reads a sparse adapter of PEFT as a delta's parts; see :meth:`sparsify.SparseDelta.from_peft`."""
    folder, tensors = Path(folder), open_base(base)
    try:
        config = read_json(folder / CONFIG_NAME)
        method = _find_method(config.get("peft_type"))
        method.check_settings(config)
        layers, whole = _sort(_read_weights(folder), method)
        if isinstance(base, nn.Module):
            _check_ties(layers, base)
        found = {f"{layer}.weight": _entries(layer, own, config, method, tensors) for layer, own in layers.items()}
        saved = config.get("modules_to_save")
        _check_saved(whole, saved if isinstance(saved, list) else [], tensors)
    except BaseMismatchError:
        raise
    except (SparsifyError, SafetensorError) as error:
        raise DeltaFormatError(
            f"`{folder}` is no adapter that can become a delta: {brief(error, 1_000)}. Nothing was loaded."
        ) from error
    origin = {
        "base_model_name_or_path": config.get("base_model_name_or_path"),
        "base_model_revision": config.get("revision"),
        "converted_from": {key: config.get(key) for key in ("peft_type", "peft_version")},
    }
    return {name: entry for name, entry in found.items() if entry is not None}, whole, origin


def _find_method(peft_type: object) -> Method:
    method = METHODS.get(peft_type.lower()) if isinstance(peft_type, str) else None
    if method is None:
        others = " and ".join(map(str.upper, METHODS))
        raise SparsifyError(f"its `peft_type` is {peft_type!r:.100}, and only {others} change entries: {_MERGE}")
    return method


def _read_weights(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        pickle = f", and a `{_PICKLE_NAME}` can run code: load it with PEFT if you trust it, and save it again"
        raise SparsifyError(f"it has no `{WEIGHTS_NAME}`: give the folder that PEFT's `save_pretrained` wrote{pickle}")
    with safe_open(path, framework="pt", device="cpu") as file:
        return {key.removeprefix(_PREFIX): file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118


def _sort(stored: Mapping[str, Tensor], method: Method) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
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
                f"it changes `{name}`, which in this base is one tensor with `{others[0]}`, in one place only: {_MERGE}"
            )


def _entries(
    layer: str, parts: tuple[Tensor, Tensor], config: Mapping[str, Any], method: Method, tensors: Mapping[str, Tensor]
) -> TensorDelta | None:
    """One layer's entries, checked; None where nothing differs from the base."""
    weight = base_tensor(f"{layer}.weight", tensors)
    shape, (values, stored) = tuple(weight.shape), parts
    if weight.dim() != 2 or weight.dtype not in DTYPES.values():
        raise BaseMismatchError(
            f"tensor `{layer}.weight` of the base has shape {shape} and is {weight.dtype}; the adapter is of a linear "
            "layer: give the base that it was trained on, unquantized."
        )
    try:
        places = method.places(config, shape)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SparsifyError(f"its `{CONFIG_NAME}` gives no number of entries ({brief(error)})") from error
    if values.shape != (places,):
        raise BaseMismatchError(
            f"layer `{layer}` has values of shape {tuple(values.shape)}, where the adapter's config has {places:,} for "
            f"the base's weight of shape {shape}: give the base that it was trained on."
        )
    try:
        require(values.dtype in DTYPES.values(), "values are", values.dtype, one_of(DTYPES.values()))
        positions = method.read_positions(stored, shape)
        if positions.shape != values.shape:
            raise SparsifyError(f"there are {counted(positions.numel(), 'index', 'indices')} for {places:,} values")
        indices, owners = positions.unique(return_inverse=True)
        base = weight.detach().take(indices.to(weight.device)).cpu()
        trained = method.add(base, owners, values.to(torch.promote_types(base.dtype, torch.float32)))
        changed = trained != base  # also where it is not a number, which the entries' own check refuses
        if not changed.any():
            return None
        sha = digest(base[changed])
        return TensorDelta(indices[changed], trained[changed], shape, base.dtype, "replace", sha)
    except SparsifyError as error:
        raise SparsifyError(f"layer `{layer}`: {error}") from error


def _check_saved(whole: Mapping[str, Tensor], saved: Iterable[object], tensors: Mapping[str, Tensor]) -> None:
    """Raises unless every other tensor replaces one of the base's, or belongs to a module that was saved whole."""
    for name, tensor in whole.items():
        if name in tensors:
            check_fits(name, tensor, tensors[name].shape, tensors[name].dtype)
        elif not any(f".{module}." in f".{name}" for module in saved):
            raise SparsifyError(f"`{name}` is neither a tensor of the base nor in one of its `modules_to_save`")


def _checked(stored: Tensor, sizes: Shape) -> Tensor:
    """Stored positions as int64, a row for each of the sizes."""
    if stored.dim() != len(sizes) or (len(sizes) == 2 and stored.shape[0] != 2):
        expected = "(2, count)" if len(sizes) == 2 else "(count,)"
        raise SparsifyError(f"indices have shape {tuple(stored.shape)}, expected {expected}")
    if stored.dtype not in (torch.int32, torch.int64, torch.float32):  # the last is PEFT's on Windows
        raise SparsifyError(f"indices are {stored.dtype}, expected torch.int32")
    if stored.is_floating_point() and not torch.equal(stored, stored.round()):
        raise SparsifyError("indices are no whole numbers")
    positions = stored.long()
    for row, size in zip(positions.view(len(sizes), -1), sizes, strict=True):
        if row.numel() and not 0 <= int(row.min()) <= int(row.max()) < size:
            raise SparsifyError(f"indices go from {int(row.min())} to {int(row.max())}, expected 0 to {size - 1}")
    return positions
