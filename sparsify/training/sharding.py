"""A sparsified model under FSDP2: what differs from training on several ranks with DDP.

flat delta    whole on every rank, not managed by FSDP2 (``ignored_params``), so the engine averages its gradient
weights       whole in forward and backward, written to in their shards, each rank its own rows
base values   of new entries: read after the backward pass, when the weights are back in their shards; the copies in
              a forward pass may be rounded (``MixedPrecisionPolicy``)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsify.common.ranks import num_ranks
from sparsify.common.shards import check_shards, is_fully_sharded, is_shard, read_own_entries, reshard
from sparsify.errors import SparsifyError
from sparsify.training.flat_delta import VALUES

if TYPE_CHECKING:
    from sparsify.training.engine import Engine


def check_sharding(engine: Engine) -> None:
    """Raises where ``fully_shard`` was called in a way that cannot work; before the first forward under it."""
    if packed := [tensor.name for tensor in engine.tensors if tensor.packed]:
        raise SparsifyError(f"`{packed[0]}` is quantized; such a model trains with DDP, not with fully_shard().")
    for module, name, parameter in _managed(engine.root):
        if module is engine.root and name == VALUES:
            raise SparsifyError(
                f"fully_shard() has sharded the flat delta, and would round it and its gradient with a mixed "
                f"precision policy. Leave it out: fully_shard(model, ignored_params={{model.{VALUES}}}); with "
                "accelerate: sparsify.integrations.distributed.keep_whole(model) as the plugin's ignored_modules."
            )
        check_shards(name, parameter)


def check_root(engine: Engine) -> None:
    """Raises where parts of a model are sharded, but not the model itself."""
    if num_ranks() == 1 or engine.sharded:
        return
    sharded = [tensor.name for tensor in engine.tensors if is_shard(tensor.parameter)]
    sharded += [name for name, module in engine.root.named_modules() if is_fully_sharded(module)]
    if sharded:
        raise SparsifyError(
            f"`{sharded[0]}` is sharded, but not the model that was sparsified; call fully_shard() on its blocks and "
            f"then on the very model that was given to sparsify(), with ignored_params={{model.{VALUES}}}."
        )


def read_base(engine: Engine, first: int) -> None:
    """Sets the base values of the entries from slot ``first`` on to their weights, which must not have changed yet.

    On all ranks, after a backward pass.
    """
    reshard(engine.root)
    values, pending = engine.values.detach(), engine.buffers.slots() >= first
    parts = []
    for tensor, own in zip(engine.tensors, engine.buffers.split(pending), strict=True):
        read = read_own_entries(tensor.parameter, tensor.indices[own.to(tensor.parameter.device)]).to(values)
        parts.append(read if is_shard(tensor.parameter) or engine.ranks.is_first else torch.zeros_like(read))
    base = engine.buffers.base()
    base[pending] = engine.ranks.sum_(torch.cat(parts)).to(base)


def _managed(root: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The parameters that FSDP2 shards: module, name in it, and this rank's part."""
    for module in root.modules():
        if is_fully_sharded(module):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            for group in groups:
                for sharded in group.fsdp_params if group is not None else ():
                    yield sharded._module_info.module, sharded._module_info.param_name, sharded.sharded_param
