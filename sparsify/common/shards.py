"""Entries of weights that are DTensors: sharded by FSDP2 (``fully_shard``), tensor-parallel, or both.

What a rank holds of a weight is a *block* of it; an entry's index is that in the whole weight. Every other weight is
read and written directly.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from sparsify.core.devices import put
from sparsify.errors import SparsifyError


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on this very module."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def is_shard(parameter: Tensor | type[Tensor]) -> bool:
    return hasattr(parameter, "to_local")


def reshard(root: nn.Module) -> None:
    """Puts all weights that FSDP2 manages back into their shards, where they can be written; outside a pass."""
    for module in root.modules() if is_fully_sharded(root) else ():
        if is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]


def full_values(parameter: Tensor) -> Tensor:
    """Returns the parameter's values, detached; of a sharded one gathered from all ranks."""
    values: Any = parameter.detach()
    return values.full_tensor() if is_shard(parameter) else values


@dataclass(frozen=True)
class Block:
    """What this rank holds of a tensor: so many (``sizes``) in each dimension of its ``shape``, from ``starts`` on."""

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def locate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Places (n,) in the block of flat indices (n,) of the whole tensor, 0 for others; and which are in it."""
        own, places = torch.ones_like(indices, dtype=torch.bool), torch.zeros_like(indices)
        for whole, start, size, stride, _ in self._dimensions():
            place = indices % whole - start
            indices = indices.div(whole, rounding_mode="floor")
            own &= (place >= 0) & (place < size)
            places += place * stride
        return places.where(own, 0), own

    def indices(self, places: Tensor) -> Tensor:
        """Flat indices (n,) in the whole tensor of places (n,) in the block."""
        indices = torch.zeros_like(places)
        for _, start, size, _, stride in self._dimensions():
            indices += (places % size + start) * stride
            places = places.div(size, rounding_mode="floor")
        return indices

    def _dimensions(self) -> Iterator[tuple[int, int, int, int, int]]:
        """From the last one on: whole size, start and size, strides in the block and in the whole tensor."""
        inner = outer = 1
        for whole, start, size in zip(*map(reversed, (self.shape, self.starts, self.sizes)), strict=True):
            yield whole, start, size, inner, outer
            inner, outer = inner * size, outer * whole


def is_block(parameter: Any) -> bool:
    """Whether this rank holds a block of a sharded parameter, and not a term of a sum, or pieces of its rows."""
    return not any(p.is_partial() or (hasattr(p, "split_factor") and p.dim == 0) for p in parameter.placements)


def block_of(parameter: Any) -> Block:
    """This rank's block of a sharded parameter. The last dimension of its mesh was dealt out first, as FSDP2 does."""
    shape, mesh, last = list(parameter.shape), parameter.device_mesh, parameter.placements[-1]
    if pieces := getattr(last, "split_factor", 0):  # of packed experts, each dealt out to all ranks
        shape[last.dim : last.dim + 1] = pieces, shape[last.dim] // pieces
    starts, sizes = [0] * len(shape), list(shape)
    dimensions = list(zip(parameter.placements, mesh.shape, mesh.get_coordinate(), strict=True))
    for placement, ranks, rank in dimensions[::-1]:
        if not placement.is_replicate():
            dim = placement.dim + (placement is last and pieces > 0)
            most = -(-sizes[dim] // ranks)  # as torch.chunk deals them out
            first = min(rank * most, sizes[dim])
            starts[dim], sizes[dim] = starts[dim] + first, min(most, sizes[dim] - first)
    return Block(tuple(shape), tuple(starts), tuple(sizes))


def read_entries(parameter: Any, indices: Tensor) -> Tensor:
    """Reads the values (n,) of a sharded parameter at flat indices (n,), in a call that all ranks make together."""
    values = read_own_entries(parameter, indices, others=-0.0)  # which adds nothing, to another -0.0 as well
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            dist.all_reduce(values, group=parameter.device_mesh.get_group(dim))
    return values


def read_own_entries(parameter: Any, indices: Tensor, others: float = 0.0) -> Tensor:
    """Reads the values (n,) at flat indices (n,); ``others`` where another rank holds them."""
    if not is_shard(parameter):
        return parameter.detach().take(indices)
    local, (places, own) = parameter.detach().to_local(), block_of(parameter).locate(indices)
    return local.take(places).where(own, others) if local.numel() else local.new_full(indices.shape, others)


def write_own_entries(parameter: Any, indices: Tensor, values: Tensor) -> None:
    """Writes values (n,) at flat indices (n,) of a detached parameter; of a sharded one, those that this rank holds."""
    values = values.to(parameter.device, parameter.dtype)
    if is_shard(parameter):
        places, own = block_of(parameter).locate(indices)
        parameter, indices, values = parameter.detach().to_local(), places[own], values[own]
    put(parameter, indices, values)


def parallel_ranks(model: nn.Module) -> int:
    """Number of ranks that a tensor-parallel model is on, 1 where it is none; there may be copies of these."""
    parameters: Any = model.parameters()
    return max((parameter.device_mesh.size() for parameter in parameters if is_shard(parameter)), default=1)


def parallel_style(module: nn.Module) -> str | None:
    """The class of transformers' tensor-parallel style that has replaced the module's forward, if one has."""
    forward: Any = vars(module).get("forward")
    if not vars(module).get("_is_hooked") or not hasattr(forward, "__code__"):
        return None
    style = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True)).get("self")
    return forward.__qualname__.partition(".")[0] if style is None else type(style.cell_contents).__name__


def check_shards(name: str, parameter: Any, parallel: int, *, is_parallel: bool) -> None:
    """Raises ``SparsifyError`` where ``fully_shard`` has sharded a weight other than over all ranks, or their copies.

    ``parallel`` is the number of tensor-parallel ranks that each of these consists of, over which the last dimension of
    the weight's mesh is if it ``is_parallel``.
    """
    mesh, placements, ranks = parameter.device_mesh, parameter.placements, dist.get_world_size()
    *copies, rows = placements[:-1] if is_parallel else placements
    along_rows = not rows.is_replicate() and rows.dim == 0
    is_whole = all(each.is_replicate() for each in copies) and not (is_parallel and parallel == 1)
    if not (along_rows and is_whole) or mesh.size() * (1 if is_parallel else parallel) != ranks:
        expected = "expected fully_shard(module) along its rows, over all ranks or, hybrid, over the last dimension of "
        expected += "a mesh of all ranks, not over a part of them; parallelize_module() before sparsify()."
        raise SparsifyError(f"`{name}` is placed as {placements} on a mesh of shape {tuple(mesh.shape)}; {expected}")


def check_parallel(model: nn.Module) -> None:
    """Raises ``SparsifyError`` where a plain model is sharded other than by tensor parallelism over one mesh."""
    sharded: list[tuple[str, Any]] = [(name, p) for name, p in model.named_parameters() if is_shard(p)]
    if not sharded and any((vars(module).get("_tp_size") or 1) > 1 for module in model.modules()):
        problem = "the model is tensor-parallel in plain tensors, as earlier versions of transformers load it"
        raise SparsifyError(f"{problem}; expected DTensors: update transformers, or use parallelize_module().")
    is_managed = bool(sharded) and any(map(is_fully_sharded, model.modules()))
    for name, parameter in sharded:
        mesh, problem = parameter.device_mesh, ""
        if mesh.ndim > 1 or is_managed:
            problem = "is sharded; call sparsify() on the plain model, and fully_shard() later"
        elif not mesh.mesh.equal(sharded[0][1].device_mesh.mesh) or dist.get_world_size() % mesh.size():
            problem = "is tensor-parallel over other ranks than other weights; expected one mesh, and copies of it"
        if problem:
            raise SparsifyError(f"`{name}` {problem}.")
