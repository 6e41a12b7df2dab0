"""The plan of a sparsified model: everything that its engine is built from, settled before the model is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.common.names import ENGINE, SETTINGS
from sparsify.common.quantized import is_quantized
from sparsify.common.shards import is_shard
from sparsify.core.entries import VALUES
from sparsify.core.install import frozen_row
from sparsify.core.module import masked_tensors
from sparsify.core.schedule import Schedule
from sparsify.errors import SparsifyError
from sparsify.masked.quantized import QuantizedTensor
from sparsify.masked.swap import check_maskable
from sparsify.masked.tensor import ModelTensor
from sparsify.strategies.strategy import Strategy
from sparsify.strategies.targets import Candidate, Targets, check_own_memory
from sparsify.training.entries import BUFFERS

STATE = (VALUES, *BUFFERS, SETTINGS)  # what the root's state dict has in addition to the model's own


@dataclass(frozen=True)
class Plan:
    """How a model is to be trained; an :class:`~sparsify.training.engine.Engine` is built from it in one go."""

    model: nn.Module  # still plain
    targets: Targets  # the candidates, and the parameters that are trained dense or frozen
    tensors: tuple[ModelTensor, ...]  # the candidates, by ascending number and offset
    strategy: Strategy
    schedule: Schedule
    steps: int | None  # planned optimizer steps; ``None`` where the number becomes known later
    budget: int  # entries to unmask
    capacity: int  # entries that there is room for: the budget, or more where repeat-S touches more
    selected: Tensor  # (n,) int64 global ids of the entries that are chosen before training, best first
    new_names: tuple[str, ...]  # parameters, dense ones apart, that the base does not have
    buffer_digests: Mapping[str, str]  # of the model's own buffers before anything ran
    seed: int  # of a random importance


def mask_candidates(targets: Targets) -> tuple[ModelTensor, ...]:
    """Makes masked tensors of the candidates, no module is changed."""
    tensors: list[ModelTensor] = []
    offset = 0
    for number, candidate in enumerate(targets.candidates):
        (owner, attribute), *_ = owners = [owner[1:] for owner in candidate.owners]
        kind = QuantizedTensor if is_quantized(candidate.parameter) else ModelTensor
        tensors.append(kind(number, owner, attribute, candidate.name, offset, frozen_row(owners), candidate.rows))
        offset += tensors[-1].numel
    return tuple(tensors)


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise SparsifyError(f"expected a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise SparsifyError("a TorchScript module cannot be sparsified; sparsify the Python module it was made from.")
    if type(model).__name__ == "OptimizedModule":
        raise SparsifyError("the model is wrapped by torch.compile; call sparsify() first, then torch.compile(model).")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise SparsifyError(
            f"the model is wrapped in {type(model).__name__}; call sparsify() on the model itself"
            + (", and train on one device." if isinstance(model, nn.DataParallel) else " before wrapping it.")
        )
    for name, module in model.named_modules():
        if ENGINE in vars(module) or masked_tensors(module):
            raise SparsifyError(f"`{name or '(root)'}` is already sparsified; call desparsify(model) first.")
    if taken := [name for name in STATE if hasattr(model, name)]:
        raise SparsifyError(f"the model's own `{taken[0]}` is in the way; rename it, or sparsify the module within.")
    for name, parameter in model.named_parameters():
        if is_shard(parameter):
            raise SparsifyError(f"`{name}` is sharded; call sparsify() on the plain model, and fully_shard() later.")
        if hasattr(parameter, "ds_id"):
            raise SparsifyError(f"`{name}` is partitioned by DeepSpeed ZeRO stage 3; use ZeRO stage 0.")


def check_candidates(model: nn.Module, candidates: tuple[Candidate, ...]) -> None:
    """Raises where a module that has a candidate cannot be masked."""
    check_own_memory(model, candidates)
    for candidate in candidates:
        for name, module, attribute in candidate.owners:
            path = name.split(".")
            around = [model.get_submodule(".".join(path[:end])) for end in range(len(path))]
            check_maskable(name, module, attribute, around)
