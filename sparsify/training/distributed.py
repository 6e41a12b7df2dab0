"""Training on several ranks: checks that all train the same model, by digests of its parts, and FSDP2's shards of it.

Where ranks differ, all raise the same error. Under FSDP2 a rank reads the base values that it holds, for all.
"""

import gc
import hashlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from sparsify.common.ranks import BEGIN, Ranks, num_ranks
from sparsify.common.raw_bits import digest
from sparsify.common.shards import check_shards, is_fully_sharded, is_shard, read_own_entries, reshard
from sparsify.core.entries import BASE, VALUES, Entries, count_by_tensor
from sparsify.core.topk import Winners
from sparsify.errors import SparsifyError
from sparsify.masked.tensor import ModelTensor
from sparsify.training.entries import ModelEntries

SAMPLED = 4096  # entries of each tensor that stand for all of them

_SEED = (
    "Seed before the model is built (torch.manual_seed on every rank), since a new head is drawn at random; give every "
    "rank the same calibration batches; call sparsify() first and wrap the model in DistributedDataParallel afterwards."
)
_SETTINGS = "Call sparsify() with the same arguments, and set the same steps, on every rank."
_AVERAGE = (
    "Every rank took a step of its own: wrap the model in DistributedDataParallel after sparsify(), and call the "
    "wrapper, so that gradients are averaged; load the same state on every rank."
)
_REMEDIES = {"settings": _SETTINGS, "step": _SETTINGS, "candidates": _SETTINGS, "flat delta": _AVERAGE}


def living(kind: Any) -> Iterator[Any]:
    """All objects of a class that exist in this process."""
    return (each for each in gc.get_objects() if issubclass(type(each), kind))  # isinstance() would wake up lazy ones


def check_ranks_alike(engine: Any) -> None:
    """Compares an engine with the other ranks'; raises ``SparsifyError`` on each of them when they differ."""
    wrappers = living(nn.parallel.DistributedDataParallel)
    if any(ddp._join_config.enable and engine.root in ddp.module.modules() for ddp in wrappers):
        problem = "under join() of DistributedDataParallel, a rank without batches chooses nothing with the others"
        raise SparsifyError(f"{problem}: leave it out, and give every rank as many batches (DistributedSampler).")
    entries, policy, strategy = engine.entries, engine.policy, engine.strategy.to_dict()
    parts = {
        "settings": (strategy, policy.schedule, policy.steps, policy.budget, entries.values.numel(), engine.seed),
        "step": entries.step,
        "candidates": [(tensor.name, tuple(tensor.shape)) for tensor in engine.tensors],
        "flat delta": digest(entries.values.detach()),  # before the weights, which are written from it
        "weights": [_sample(tensor) for tensor in engine.tensors],
        "unmasked entries": digest(entries.ids),
        "base values": digest(entries.base),
    }
    digests = [hashlib.sha256(repr(part).encode()).digest() for part in parts.values()]
    numbers = [int.from_bytes(own[:8], "little") >> 1 for own in digests]  # 63 bits
    same = engine.ranks.headers([BEGIN], numbers, [tensor.name for tensor in engine.tensors])
    if differing := [part for part, is_same in zip(parts, same.tolist(), strict=True) if not is_same]:
        raise SparsifyError(f"the ranks differ in their {', '.join(differing)}. {_REMEDIES.get(differing[0], _SEED)}")


def agree(entries: Entries, ranks: Ranks, winners: Winners, finite: Tensor) -> tuple[list[int], bool]:
    """``TrainingStep.agree`` over all ranks; raises ``SparsifyError`` where their flat deltas or winners differ."""
    counts = count_by_tensor(winners.ids, entries.ends)
    bits = entries.values.detach().view(torch.int32).sum(dtype=torch.int64)
    order = torch.arange(1, winners.ids.numel() + 1, device=winners.ids.device)
    everyone = ranks.gather(torch.stack([finite.to(bits), bits, (winners.ids * order).sum()]))
    same = (everyone == everyone[0]).all(0)
    outcome = torch.cat([counts, everyone[:, :1].all().view(1).to(counts), same[1:].to(counts)])
    *sizes, is_finite, same_deltas, same_winners = outcome.tolist()
    if not same_deltas:
        raise SparsifyError(f"the ranks differ in their flat delta. {_AVERAGE}")
    if is_finite and not same_winners:
        reason = "their weights are not the same or their hardware rounds differently"
        remedy = "sparsify.integrations.distributed.check_ranks(model) tells which."
        raise SparsifyError(f"the ranks chose different entries from the same gradients, so {reason}; {remedy}")
    return sizes, bool(is_finite)


def _sample(tensor: ModelTensor) -> str:
    if is_shard(tensor.parameter):
        return "sharded"  # there is only one
    flat = tensor.weight.reshape(-1)
    return digest(flat[:: max(1, flat.numel() // SAMPLED)])


def check_sharding(root: nn.Module, tensors: Sequence[ModelTensor], parallel: int) -> None:
    """Raises where ``fully_shard`` was called in a way that cannot work; before the first forward under it."""
    if quantized := [tensor.name for tensor in tensors if tensor.is_quantized]:
        raise SparsifyError(f"`{quantized[0]}` is quantized; such a model trains with DDP, not with fully_shard().")
    for module, name, parameter, is_parallel in _managed(root):
        if module is root and name == VALUES:
            problem = "fully_shard() has sharded the flat delta, and would round it with a mixed precision policy"
            remedy = f"Leave it out: fully_shard(model, ignored_params={{model.{VALUES}}}); with accelerate:"
            raise SparsifyError(f"{problem}. {remedy} ignored_modules=[torch.nn.ParameterList([model.{VALUES}])].")
        check_shards(name, parameter, parallel, is_parallel=is_parallel)


def check_no_stage(root: nn.Module) -> None:
    """Raises in a stage of a pipeline, whose backward waits for that of the next, which would wait for it to choose."""
    kind = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    if kind is None or num_ranks() == 1:
        return
    if any(module is root for stage in living(kind) for module in stage.submod.modules()):
        text = "the model is a stage of a pipeline (torch.distributed.pipelining), whose ranks cannot choose together:"
        raise SparsifyError(f"{text} shard it instead, by fully_shard(), or parallelize_module() before sparsify().")


def check_root(root: nn.Module, tensors: Sequence[ModelTensor]) -> None:
    if num_ranks() == 1 or is_fully_sharded(root):
        return
    sharded = [tensor.name for tensor in tensors if is_shard(tensor.parameter) and not tensor.is_parallel]
    sharded += [name for name, module in root.named_modules() if is_fully_sharded(module)]
    if sharded:
        remedy = "call fully_shard() on its blocks and then on the very model that was given to sparsify(), with"
        remedy += f" ignored_params={{model.{VALUES}}}; parallelize_module() belongs before sparsify()."
        raise SparsifyError(f"`{sharded[0]}` is sharded, but not the model that was sparsified; {remedy}")


@torch.no_grad()
def read_base(tensors: Sequence[ModelTensor], entries: ModelEntries, ranks: Ranks, first: int) -> None:
    """Sets the base values of the entries from slot ``first`` on to their weights; on all ranks, after a backward."""
    reshard(entries.root)
    base = torch.full_like(entries.values.detach()[: entries.count], -torch.inf)
    for tensor in tensors:
        new = tensor.slots >= first
        read = read_own_entries(tensor.parameter, tensor.indices[new], others=-torch.inf)
        base[tensor.slots[new].to(base.device)] = read.to(base)
    buffer = entries.root.get_buffer(BASE)
    buffer[first : entries.count] = ranks.sum_(base[first:], dist.ReduceOp.MAX).to(buffer)
    entries.remember()


def _managed(root: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, bool]]:
    """The parameters that FSDP2 shards: module, name in it, this rank's part, and whether it was a DTensor before."""
    for module in root.modules():
        if is_fully_sharded(module):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            for group in groups:
                for sharded in group.fsdp_params if group is not None else ():
                    info = sharded._module_info
                    yield info.module, info.param_name, sharded.sharded_param, sharded.is_dtensor
