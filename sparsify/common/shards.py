"""Entries of weights that FSDP2 (``fully_shard``) shards by rows; every other weight is read and written directly."""

import sys
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist

from sparsify.core.devices import put
from sparsify.errors import SparsifyError

SHARDS = -1  # the dimension of a mesh over which rows are sharded; hybrid ones have copies over another, before it


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on this very module."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def is_shard(parameter: Tensor) -> bool:
    return hasattr(parameter, "to_local")


def reshard(root: nn.Module) -> None:
    """Puts all weights that FSDP2 manages back into their shards, where they can be written; outside a pass."""
    for module in root.modules():
        if is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]


def full_values(parameter: Tensor) -> Tensor:
    """Returns the parameter's values, detached; of a sharded one gathered from all ranks."""
    values: Any = parameter.detach()
    return values.full_tensor() if is_shard(parameter) else values


def read_entries(parameter: Tensor, indices: Tensor) -> Tensor:
    """Reads the values (n,) of a sharded parameter at flat indices (n,), in a call that all ranks make together."""
    values = read_own_entries(parameter, indices)
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    dist.all_reduce(values, group=mesh.get_group(mesh.ndim - 1))
    return values


def read_own_entries(parameter: Tensor, indices: Tensor) -> Tensor:
    """Reads the values (n,) at flat indices (n,); zero where another rank holds them."""
    if not is_shard(parameter):
        return parameter.detach().take(indices)
    local, own, places = _own_entries(parameter, indices)
    values = local.new_zeros(indices.shape)
    values[own] = local[places]
    return values


def write_own_entries(parameter: Tensor, indices: Tensor, values: Tensor) -> None:
    """Writes values (n,) at flat indices (n,) of a detached parameter; of a sharded one, those that this rank holds."""
    if not is_shard(parameter):
        put(parameter, indices, values)
        return
    local, own, places = _own_entries(parameter, indices)
    local[places] = values[own]


def is_first_copy(parameter: Tensor) -> bool:
    """Whether this rank is of those that hold the first copy of a sharded parameter; there is one unless hybrid."""
    coordinate: Any = parameter.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    return not any(coordinate[:SHARDS])


def check_shards(name: str, parameter: Tensor) -> None:
    """Raises ``SparsifyError`` where a weight is sharded other than by ``fully_shard`` over all ranks."""
    sharded: Any = parameter
    mesh, placements = sharded.device_mesh, sharded.placements
    copied = all(placement.is_replicate() for placement in placements[:SHARDS])
    if not copied or not placements[SHARDS].is_shard(0) or mesh.size() != dist.get_world_size():
        expected = "expected fully_shard(module) along its rows, over all ranks or, hybrid, over the last dimension of "
        expected += "a mesh of all ranks: not tensor-parallel, or over a part of the ranks."
        raise SparsifyError(f"`{name}` is placed as {placements} on a mesh of shape {tuple(mesh.shape)}; {expected}")


def _own_entries(parameter: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's rows, flat and writable; which of the indices (n,) are in them, and where."""
    sharded: Any = parameter.detach()
    local = sharded.to_local().view(-1)
    mesh = sharded.device_mesh
    rows = -(-parameter.shape[0] // mesh.shape[SHARDS])  # as torch.chunk deals them out
    start = mesh.get_coordinate()[SHARDS] * rows * (parameter.numel() // parameter.shape[0])
    own = (indices >= start) & (indices < start + local.numel())
    return local, own, indices[own] - start
