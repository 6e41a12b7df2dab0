"""PEFT's two sparse adapters, SHiRA and Supertuning: how they hold a layer's differences, and how PEFT adds them.

In: positions in a weight and numbers to add there. Out: the tensors that PEFT stores for them, and the weights that it
computes from those. Both fix the number of places in a layer by one setting for the whole model; a place that nothing
needs holds -0.0, which changes no number that it is added to.

A difference may be one that the dtype cannot hold exactly (bfloat16 mostly, and Supertuning, which adds in the weight's
dtype). Such an entry has two places: its rounded difference, and after it what the rounding lost. PEFT adds them in
order, so that the sum is the trained value exactly; where a GPU adds them in another order, it may be a neighbour.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsify.errors import SparsifyError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in PEFT's files

Shape = tuple[int, ...]
Needs = Mapping[str, tuple[int, Shape]]  # of each layer: how many places it needs, and its weight's shape


class SparseMethod(ABC):
    """One of PEFT's sparse adapters.

    Attributes:
        name: what PEFT calls it in lower case.
        values_key: the stored tensor that holds a layer's differences.
        indices_key: the stored tensor that holds their positions.
    """

    name: str
    values_key: str
    indices_key: str

    @abstractmethod
    def fit(self, needs: Needs) -> dict[str, Any]:
        """The setting of PEFT's config with the fewest places that gives every layer as many as it needs."""

    @abstractmethod
    def places(self, settings: Mapping[str, Any], shape: Shape) -> int:
        """How many places PEFT makes for a weight of this shape (out_features, in_features)."""

    @abstractmethod
    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raises where a config, as read from its file, asks for more than entries in a layer."""

    @abstractmethod
    def store_positions(self, positions: Tensor, shape: Shape) -> Tensor:
        """The tensor that PEFT stores for flat positions (count,) in a weight (out_features, in_features)."""

    @abstractmethod
    def read_positions(self, stored: Tensor, shape: Shape) -> Tensor:
        """The flat positions (count,) int64, all in the weight; raises where the stored tensor holds none."""

    @abstractmethod
    def add(self, base: Tensor, positions: Tensor, differences: Tensor) -> Tensor:
        """What PEFT computes with: base (n,), plus differences (count,) at positions (count,), some of them twice."""

    @abstractmethod
    def as_added(self, differences: Tensor, dtype: torch.dtype) -> Tensor:
        """The differences in the dtype in which PEFT adds them to a base in ``dtype``."""

    def differences(self, base: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
        """What PEFT has to add to base values to get trained ones.

        Args:
            base: (n,) in the model's dtype.
            trained: (n,) in the same dtype.

        Returns:
            (count >= n,) int64, which of the n each difference belongs to, ascending; and (count,) the differences, in
            the dtype that PEFT holds them in: float32, or float64 for a base in float64.

        Raises:
            SparsifyError: when a difference is too large for the dtype.
        """
        each = torch.arange(base.numel())
        wide = held_dtype(base.dtype)
        first = self.as_added(trained.to(wide) - base.to(wide), base.dtype).to(wide)
        reached = self.add(base, each, first)
        missed = (reached != trained).nonzero().flatten()
        # torch may round after every number or after the last one: half-way between both, the second serves either.
        rounded, unrounded = reached[missed].to(wide), base[missed].to(wide) + first[missed]
        rest = trained[missed].to(wide) - (rounded + unrounded) / 2
        owners, differences = torch.cat([each, missed]), torch.cat([first, rest])
        owners, order = owners.sort(stable=True)
        differences = differences[order]
        if bad := int((self.add(base, owners, differences) != trained).sum()):
            raise SparsifyError(f"{bad} of {base.numel()} values are too far from the base's for {base.dtype}")
        return owners, differences


class _Shira(SparseMethod):
    """r * (in_features + out_features) places in a layer; rows and columns in int32, 8 bytes an entry."""

    name, values_key, indices_key = "shira", "shira_weight", "shira_indices"

    def fit(self, needs: Needs) -> dict[str, Any]:
        return {"r": max(math.ceil(count / sum(shape)) for count, shape in needs.values())}

    def places(self, settings: Mapping[str, Any], shape: Shape) -> int:
        return int(settings["r"] * sum(shape))

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        r = settings.get("r")
        if isinstance(r, bool) or not isinstance(r, int) or not 0 < r < 2**31:
            raise SparsifyError(f"`r` is {r!r:.100}, expected a positive int")
        if settings.get("scaling", 1.0) != 1.0:
            raise SparsifyError("it has a `scaling`, which PEFT's SHiRA does not read")

    def store_positions(self, positions: Tensor, shape: Shape) -> Tensor:
        return torch.stack([positions // shape[1], positions % shape[1]]).int()

    def read_positions(self, stored: Tensor, shape: Shape) -> Tensor:
        rows, columns = _integers(stored, dim=2)
        _check_range(rows, shape[0])
        _check_range(columns, shape[1])
        return rows * shape[1] + columns

    def add(self, base: Tensor, positions: Tensor, differences: Tensor) -> Tensor:
        result = base.clone()
        # As its forward does: in place, so that the sum of a low-precision weight and float32 is rounded once.
        result += torch.sparse_coo_tensor(positions[None], differences, base.shape, check_invariants=False)
        return result

    def as_added(self, differences: Tensor, dtype: torch.dtype) -> Tensor:
        return differences


class _Supertuning(SparseMethod):
    """int(numel * (1 - sparsity)) places in a layer; flat positions in int32, 4 bytes an entry."""

    name, values_key, indices_key = "supertuning", "supertuning_values", "supertuning_indices"

    def fit(self, needs: Needs) -> dict[str, Any]:
        sparsity = 1.0 - max(count / math.prod(shape) for count, shape in needs.values())
        while any(self.places({"sparsity": sparsity}, shape) < count for count, shape in needs.values()):
            sparsity = max(0.0, sparsity - 2.0**-53)  # a product was rounded down: one float64 step below 1 at a time
        return {"sparsity": sparsity}

    def places(self, settings: Mapping[str, Any], shape: Shape) -> int:
        return int(math.prod(shape) * (1 - settings["sparsity"]))

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        sparsity = settings.get("sparsity")
        if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity < 1:
            raise SparsifyError(f"`sparsity` is {sparsity!r:.100}, expected a number in [0, 1)")
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
        positions = _integers(stored, dim=1)
        _check_range(positions, math.prod(shape))
        return positions

    def add(self, base: Tensor, positions: Tensor, differences: Tensor) -> Tensor:
        return base.scatter_add(0, positions, self.as_added(differences, base.dtype))

    def as_added(self, differences: Tensor, dtype: torch.dtype) -> Tensor:
        return differences.to(dtype)


METHODS: dict[str, SparseMethod] = {method.name: method for method in (_Shira(), _Supertuning())}


def held_dtype(base: torch.dtype) -> torch.dtype:
    """The dtype in which PEFT holds the differences of a base in this one."""
    return torch.promote_types(base, torch.float32)


def _integers(stored: Tensor, dim: int) -> Tensor:
    """Stored positions as int64; PEFT on Windows stores them as float32."""
    if stored.dim() != dim or (dim == 2 and stored.shape[0] != 2):
        raise SparsifyError(f"indices have shape {tuple(stored.shape)}, expected {'(2, count)' if dim == 2 else 'one'}")
    if stored.dtype not in (torch.int32, torch.int64, torch.float32):
        raise SparsifyError(f"indices are {stored.dtype}, expected torch.int32")
    if stored.is_floating_point() and not torch.equal(stored, stored.round()):
        raise SparsifyError("indices are no whole numbers")
    return stored.long()


def _check_range(indices: Tensor, size: int) -> None:
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        raise SparsifyError(f"indices go from {int(indices.min())} to {int(indices.max())}, expected 0 to {size - 1}")
