"""Models that FSDP2 shards: what it was told to do, and the base values of entries that other ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from sparsify.common.ranks import Ranks, num_ranks
from sparsify.common.shards import check_shards, is_fully_sharded, is_shard, read_own_entries, reshard
from sparsify.core.entries import BASE, VALUES
from sparsify.core.tensor import MaskedTensor
from sparsify.errors import SparsifyError
from sparsify.training.entries import ModelEntries


def check_sharding(root: nn.Module, tensors: Sequence[MaskedTensor]) -> None:
    """Raises where ``fully_shard`` was called in a way that cannot work; before the first forward under it."""
    if quantized := [tensor.name for tensor in tensors if tensor.is_quantized]:
        raise SparsifyError(f"`{quantized[0]}` is quantized; such a model trains with DDP, not with fully_shard().")
    for module, name, parameter in _managed(root):
        if module is root and name == VALUES:
            raise SparsifyError(
                f"fully_shard() has sharded the flat delta, and would round it and its gradient with a mixed "
                f"precision policy. Leave it out: fully_shard(model, ignored_params={{model.{VALUES}}}); with "
                "accelerate: sparsify.integrations.distributed.keep_whole(model) as the plugin's ignored_modules."
            )
        check_shards(name, parameter)


def check_root(root: nn.Module, tensors: Sequence[MaskedTensor]) -> None:
    """Raises where parts of a model are sharded, but not the model itself."""
    if num_ranks() == 1 or is_fully_sharded(root):
        return
    sharded = [tensor.name for tensor in tensors if is_shard(tensor.parameter)]
    sharded += [name for name, module in root.named_modules() if is_fully_sharded(module)]
    if sharded:
        raise SparsifyError(
            f"`{sharded[0]}` is sharded, but not the model that was sparsified; call fully_shard() on its blocks and "
            f"then on the very model that was given to sparsify(), with ignored_params={{model.{VALUES}}}."
        )


@torch.no_grad()
def read_base(tensors: Sequence[MaskedTensor], entries: ModelEntries, ranks: Ranks, first: int) -> None:
    """Sets the base values of the entries from slot ``first`` on to their weights; on all ranks, after a backward."""
    reshard(entries.root)
    base = torch.zeros(entries.count, dtype=entries.values.dtype, device=entries.values.device)
    for tensor in tensors:
        new = tensor.slots >= first
        if is_shard(tensor.parameter) or dist.get_rank() == 0:
            read = read_own_entries(tensor.parameter, tensor.indices[new])
            base[tensor.slots[new].to(base.device)] = read.to(base)
    buffer = entries.root.get_buffer(BASE)
    buffer[first : entries.count] = ranks.sum_(base[first:]).to(buffer)
    entries.remember()


def _managed(root: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The parameters that FSDP2 shards: module, name in it, and this rank's part."""
    for module in root.modules():
        if is_fully_sharded(module):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            for group in groups:
                for sharded in group.fsdp_params if group is not None else ():
                    yield sharded._module_info.module, sharded._module_info.param_name, sharded.sharded_param
