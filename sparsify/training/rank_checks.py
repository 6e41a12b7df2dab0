"""Checks that all ranks train the same model, by digests of the parts of its state; all raise the same error."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from sparsify.common.ranks import BEGIN, Ranks
from sparsify.common.raw_bits import digest
from sparsify.common.shards import is_shard
from sparsify.core.entries import Entries, count_by_tensor
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import Winners
from sparsify.errors import SparsifyError

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
REMEDIES = {  # by part; the flat delta before the weights, which are written from it
    **dict.fromkeys(("settings", "step", "candidates"), _SETTINGS),
    "flat delta": _AVERAGE,
    **dict.fromkeys(("weights", "unmasked entries", "base values"), _SEED),
}


def check_ranks_alike(engine: Any) -> None:
    """Compares an engine with the other ranks'; raises ``SparsifyError`` on each of them when they differ."""
    entries, policy, strategy = engine.entries, engine.policy, engine.strategy.to_dict()
    parts = {
        "settings": (strategy, policy.schedule, policy.steps, policy.budget, entries.values.numel(), engine.seed),
        "step": entries.step,
        "candidates": [(tensor.name, tuple(tensor.shape)) for tensor in engine.tensors],
        "flat delta": digest(entries.values.detach()),
        "weights": [_sample(tensor) for tensor in engine.tensors],
        "unmasked entries": digest(entries.ids),
        "base values": digest(entries.base),
    }
    digests = [hashlib.sha256(repr(part).encode()).digest() for part in parts.values()]
    numbers = [int.from_bytes(own[:8], "little") >> 1 for own in digests]  # 63 bits
    headers = engine.ranks.headers(BEGIN, numbers, [tensor.name for tensor in engine.tensors])
    differing = [part for part, column in zip(parts, headers.unbind(1), strict=True) if (column != column[0]).any()]
    if differing:
        raise SparsifyError(f"the ranks differ in their {', '.join(differing)}. {REMEDIES[differing[0]]}")


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
        raise SparsifyError(
            "the ranks chose different entries from the same gradients, so their weights are not the same or their "
            "hardware rounds differently; sparsify.integrations.distributed.check_ranks(model) tells which."
        )
    return sizes, bool(is_finite)


def _sample(tensor: MaskedTensor) -> str:
    if is_shard(tensor.parameter):
        return "sharded"  # there is only one
    flat = tensor.weight.reshape(-1)
    return digest(flat[:: max(1, flat.numel() // SAMPLED)])
