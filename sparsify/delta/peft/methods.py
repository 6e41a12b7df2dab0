"""PEFT's sparse adapters, SHiRA and Supertuning: the tensors that PEFT stores for a layer, and the weights it computes.

In: positions in a weight, and differences to add there. Both methods fix the number of places in a layer by one setting
for the whole model; an unused place holds -0.0, which changes no number that it is added to.

A difference that PEFT's dtype cannot hold exactly (bfloat16 mostly, and Supertuning, which adds in the weight's dtype)
takes two places: the rounded difference and the rest. PEFT adds them in order, so that the sum is the trained value
exactly; on a GPU, which may add in another order, it may be a neighbouring value.
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
Needs = Mapping[str, tuple[int, Shape]]  # of each layer: the places that it needs, and its weight's shape


class Shira:
    """r * (in_features + out_features) places in a layer; rows and columns in int32, 8 bytes an entry."""

    name, values_key, indices_key = "shira", "shira_weight", "shira_indices"
    config_class = "ShiraConfig"
    in_weights_dtype = False  # whether PEFT rounds differences to the weight's dtype before it adds them

    def fit(self, needs: Needs) -> dict[str, Any]:
        """The setting of PEFT's config with the fewest places that gives every layer as many as it needs."""
        return {"r": max(math.ceil(count / sum(shape)) for count, shape in needs.values())}

    def places(self, settings: Mapping[str, Any], shape: Shape) -> int:
        """The number of places that PEFT makes for a weight of this shape (out_features, in_features)."""
        return int(float(settings["r"]) * sum(shape))

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raises where a config, as read from its file, asks for more than entries in a layer."""
        if settings.get("scaling", 1.0) != 1.0:
            raise SparsifyError("it has a `scaling`, which PEFT's SHiRA does not read")

    def store_positions(self, positions: Tensor, shape: Shape) -> Tensor:
        """The tensor that PEFT stores for flat positions (count,) in a weight (out_features, in_features)."""
        return torch.stack([positions // shape[1], positions % shape[1]]).int()

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
    config_class = "SupertuningConfig"
    in_weights_dtype = True

    def fit(self, needs: Needs) -> dict[str, Any]:
        sparsity = 1.0 - max(count / math.prod(shape) for count, shape in needs.values())
        while any(self.places({"sparsity": sparsity}, shape) < count for count, shape in needs.values()):
            sparsity = max(0.0, sparsity - 2.0**-53)  # a product was rounded down: one float64 step below 1 at a time
        return {"sparsity": sparsity}

    def places(self, settings: Mapping[str, Any], shape: Shape) -> int:
        return int(math.prod(shape) * (1 - float(settings["sparsity"])))

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        if settings.get("r") is not None:
            raise SparsifyError(
                f"it has a LoRA part (`r` is {settings['r']!r:.100}, the Supra hybrid), which is no set of entries: "
                "merge it with PEFT (`merge_and_unload`) and use `SparseDelta.diff`"
            )
        if not settings.get("save_precomputed_indices", True):
            raise SparsifyError(
                "it was saved without its indices (`save_precomputed_indices` is false): load it with PEFT, and save "
                "it with them"
            )

    def store_positions(self, positions: Tensor, shape: Shape) -> Tensor:
        if math.prod(shape) > 2**31:
            raise SparsifyError(f"a weight of shape {shape} has positions that PEFT's int32 cannot hold")
        return positions.int()

    def read_positions(self, stored: Tensor, shape: Shape) -> Tensor:
        return _checked(stored, (math.prod(shape),))

    def add(self, base: Tensor, positions: Tensor, differences: Tensor) -> Tensor:
        return base.scatter_add(0, positions, differences.to(base.dtype))


Method = Shira | Supertuning
METHODS: dict[str, Method] = {method.name: method for method in (Shira(), Supertuning())}


def find_differences(method: Method, base: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the differences that PEFT has to add to base values (n,) to get trained ones (n,), in one dtype.

    Returns:
        (count >= n,) int64, which of the n each difference belongs to, ascending; and (count,) the differences, in
        the dtype that PEFT holds them in: float32, or float64 for a base in float64.

    Raises:
        SparsifyError: when a difference is too large for the dtype.
    """
    each = torch.arange(base.numel())
    wide = held_dtype(base.dtype)
    first = trained.to(wide) - base.to(wide)
    if method.in_weights_dtype:
        first = first.to(base.dtype).to(wide)
    reached = method.add(base, each, first)
    missed = (reached != trained).nonzero().flatten()
    # torch may round after every number or after the last one: the middle between both serves either
    rounded, unrounded = reached[missed].to(wide), base[missed].to(wide) + first[missed]
    rest = trained[missed].to(wide) - (rounded + unrounded) / 2
    owners, order = torch.cat([each, missed]).sort(stable=True)
    differences = torch.cat([first, rest])[order]
    if bad := int((method.add(base, owners, differences) != trained).sum()):
        raise SparsifyError(f"{bad} of {base.numel()} values are too far from the base's for {base.dtype}")
    return owners, differences


def held_dtype(base: torch.dtype) -> torch.dtype:
    """The dtype in which PEFT holds the differences of a base in this one."""
    return torch.promote_types(base, torch.float32)


def _checked(stored: Tensor, sizes: Shape) -> Tensor:
    """Stored positions as int64, a row for each of the sizes; PEFT on Windows stores them as float32."""
    if stored.dim() != len(sizes) or (len(sizes) == 2 and stored.shape[0] != 2):
        expected = "(2, count)" if len(sizes) == 2 else "(count,)"
        raise SparsifyError(f"indices have shape {tuple(stored.shape)}, expected {expected}")
    if stored.dtype not in (torch.int32, torch.int64, torch.float32):
        raise SparsifyError(f"indices are {stored.dtype}, expected torch.int32")
    if stored.is_floating_point() and not torch.equal(stored, stored.round()):
        raise SparsifyError("indices are no whole numbers")
    positions = stored.long()
    for row, size in zip(positions.view(len(sizes), -1), sizes, strict=True):
        if row.numel() and not 0 <= int(row.min()) <= int(row.max()) < size:
            raise SparsifyError(f"indices go from {int(row.min())} to {int(row.max())}, expected 0 to {size - 1}")
    return positions
