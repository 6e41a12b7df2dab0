"""Tensor-parallel models (DTensor) train as one process does, alone and in copies: gloo processes, many runs a spawn."""

import re

import pytest
import torch
from models import llama
from oracle import unmasked_sets
from rank_models import BUDGET, STEPS, assert_like, error_of, mlp, selecting, train, words
from rank_processes import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module,
)  # fmt: skip
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sparsify import SparseDelta, desparsify, get_engine, sparsify, summary, trained_state
from sparsify.common.ranks import num_ranks
from sparsify.core.importance import D3
from sparsify.integrations.distributed import check_ranks
from sparsify.strategies.importance import Magnitude
from sparsify.strategies.strategy import Increment, Repeat, Static, Strategy

WHOLE = Replicate()
WORDS = {
    "table": RowwiseParallel(input_layouts=WHOLE),
    "wide": ColwiseParallel(),
    "narrow": RowwiseParallel(),
    "again": ColwiseParallel(output_layouts=WHOLE),
    "out": ColwiseParallel(output_layouts=WHOLE),
}
# 3 rows on two ranks, and a norm of half of the tokens each
MLP = {
    "first": ColwiseParallel(output_layouts=Shard(0)),
    "norm": SequenceParallel(sequence_dim=0),
    "second": ColwiseParallel(input_layouts=Shard(0), output_layouts=WHOLE),
    "head": ColwiseParallel(output_layouts=WHOLE),
}
LLAMA = {
    "model.embed_tokens": ColwiseParallel(output_layouts=WHOLE),
    **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    **{f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=WHOLE),
}


def tiny_llama():
    torch.manual_seed(0)
    model, batch = llama(num_key_value_heads=2)
    return model.double(), [batch() for _ in range(STEPS)]


# name -> model and batches, plan, arguments of sparsify()
LIKE_ONE_PROCESS = {
    "tied and twice used": (words, WORDS, {}),
    "selecting as on a device": (words, WORDS, {}),
    "accumulating": (words, WORDS, {}),
    "checkpointed": (words, WORDS, {}),
    "by magnitude": (words, WORDS, {"strategy": Strategy(Magnitude(), Increment())}),
    "repeat": (words, WORDS, {"strategy": Strategy(D3(), Repeat()), "budget": 20}),
    "rows that do not divide": (mlp, MLP, {}),
    "static beside a dense head": (mlp, MLP, {"strategy": "pafi", "steps": None, "modules_to_save": ["head"]}),
    "calibrated": (mlp, MLP, {"strategy": Strategy(D3(), Static()), "steps": None}),
    "calibrated by examples": (words, WORDS, {"strategy": "fish", "steps": None}),
    "llama": (tiny_llama, LLAMA, {}),
}


def meshed():
    return init_device_mesh("cpu", (num_ranks() // 2, 2), mesh_dim_names=("copies", "parallel"))


def made(name):
    """A model, tensor-parallel where there are several processes, and its batches."""
    make, plan, settings = LIKE_ONE_PROCESS[name]
    model, batches = make()
    if num_ranks() > 1:
        parallelize_module(model, meshed()["parallel"], plan)
        if make is words:
            model.out.weight = model.table.weight
    if "calibrated" in name:
        settings = {**settings, "calibration": batches[:2], "loss_fn": lambda model, batch: model(**batch)}
    return sparsify(model, **{"budget": BUDGET, "steps": STEPS, **settings}), batches

def trained(rank, name, wrap=lambda model: model):
    with selecting("device" if "device" in name else "cpu", small=100):
        model, batches = made(name)
        if name == "checkpointed":
            wide = model.wide.forward
            model.wide.forward = lambda hidden: checkpoint(wide, hidden, use_reentrant=False)
        copies = max(1, num_ranks() // 2)
        micro = 2 if name == "accumulating" else 1
        result = train(rank // 2, model, batches, parallel=wrap(model), micro=micro, parts=copies)
    check_ranks(model)
    delta = SparseDelta.from_model(model)
    entries = {name: (own.indices, own.values) for name, own in delta.tensors.items()}
    return result | {"entries": entries, "whole": delta.whole, "ok": summary(model, verify=True).verification.ok}


def all_scenarios(rank):
    return {name: trained(rank, name) for name in LIKE_ONE_PROCESS}

@pytest.fixture(scope="module")
def two():
    return on_ranks(2, all_scenarios)


@pytest.mark.parametrize("name", LIKE_ONE_PROCESS)
def test_two_parallel_ranks_train_like_one_process(two, name):
    assert_like([result[name] for result in two], trained(0, name))


def replicated(model):
    """Copies by DDP."""
    return DistributedDataParallel(model, process_group=meshed()["copies"].get_group())


def sharded(model):
    """Copies by FSDP2, each of which has a part of the rows."""
    mesh = meshed()["copies"]
    for block in model.children():
        if getattr(block, "weight", None) is not getattr(getattr(model, "table", None), "weight", nn):
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh, ignored_params={model.sparse_values})


COPIES = {"replicated": replicated, "sharded": sharded}


def all_copies(rank):
    return {(way, name): trained(rank, name, wrap) for way, wrap in COPIES.items() for name in LIKE_ONE_PROCESS if name in NAMES}

import os
NAMES = os.environ.get("NAMES", "").split(",")

@pytest.mark.slow
def test_two_copies_of_two_parallel_ranks_train_like_one_process():
    results = on_ranks(4, all_copies)
    for way, name in results[0]:
        print(way, name)
        assert_like([result[way, name] for result in results], trained(0, name))
