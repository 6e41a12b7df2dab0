"""The tensors that PEFT's sparse adapters, SHiRA and Supertuning, store for a layer, and the weights that it computes.

Both give a layer a number of places that follows from its size. An unused place holds 0.0, and a position may come
twice: a difference that the dtype cannot hold exactly may be stored in two parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsify.errors import SparsifyError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in PEFT's files

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
