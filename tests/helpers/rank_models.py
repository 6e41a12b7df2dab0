"""Small models and batches that every rank of a test makes alike, and training on each rank's part of a batch."""

from contextlib import ExitStack, nullcontext
from unittest.mock import patch

import pytest
import torch
from models import build, loss_of
from oracle import unmasked_sets
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sparsify import SparsifyError, get_engine
from sparsify.common.ranks import num_ranks

STEPS, BUDGET, BATCH = 6, 60, 8
VOCABULARY, WIDTH = 24, 12
WAYS = ["cpu", "device"]  # whose top-k the ranks select with


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.wide = nn.Linear(WIDTH, 20)
        self.narrow = nn.Linear(20, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.out.weight = self.table.weight

    def between(self, hidden):
        hidden = hidden + self.narrow(torch.relu(self.wide(hidden)))
        return self.norm(self.again(torch.tanh(self.again(hidden))))

    def forward(self, x, labels):
        logits = self.out(self.between(self.table(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def words(dtype=torch.float64, model_class=Words):
    torch.manual_seed(0)
    model = model_class().to(dtype)
    batches = [torch.randint(1, VOCABULARY, (BATCH, 5)) for _ in range(STEPS)]
    return model, [{"x": batch, "labels": batch.roll(1, 1)} for batch in batches]


def mlp(seed=0):
    model, batches = build("mlp", seed, torch.float64)
    return model, batches[:STEPS]


def shard(model, **options):
    """Block by block, then the model itself, as the documentation says; nothing where there is one process."""
    if num_ranks() > 1:
        for block in model.children():
            if getattr(block, "weight", None) is not getattr(getattr(model, "table", None), "weight", nn):
                fully_shard(block, **options)
        fully_shard(model, ignored_params={model.sparse_values}, **options)
    return model


def own_part(batch, rank, parts=None):
    return {name: values.chunk(parts or num_ranks())[rank] for name, values in batch.items()}


def mean_over_ranks(loss):
    loss = loss.detach().clone()
    if num_ranks() > 1:
        dist.all_reduce(loss)
    return loss.item() / num_ranks()


def train(rank, model, batches, *, micro=1, steps=STEPS, parallel=None, parts=None):
    """Trains a model, as ``parallel`` wraps it; returns mean losses, unmasked sets, entries, what each step sent."""
    parallel, engine = parallel or model, get_engine(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW([{"params": [parameter]} for parameter in trained], lr=1e-2)
    losses, sent = [], []
    for step in range(steps):
        before = engine.ranks.bytes_sent
        optimizer.zero_grad()
        for part in range(micro):
            is_last = part + 1 == micro
            if hasattr(parallel, "set_requires_gradient_sync"):  # of FSDP2
                parallel.set_requires_gradient_sync(is_last)
            batch = {name: values.chunk(micro)[part] for name, values in batches[step].items()}
            is_waiting = isinstance(parallel, DistributedDataParallel) and not is_last
            with parallel.no_sync() if is_waiting else nullcontext():
                loss = loss_of(parallel, own_part(batch, rank, parts)) / micro
                loss.backward()
            losses.append(mean_over_ranks(loss))
        optimizer.step()
        sent.append(engine.ranks.bytes_sent - before)
    delta, base = engine.values.detach().clone(), engine.entries.base.clone()
    return {"losses": losses, "sets": unmasked_sets(model), "delta": delta, "base": base, "sent": sent}


def assert_like(results, alone):
    for own in results:
        assert own["sets"] == alone["sets"]
        assert own["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        for name in own.keys() & {"delta", "base", "head", "entries", "whole", "gradient"}:
            torch.testing.assert_close(own[name], alone[name], rtol=1e-4, atol=1e-5)


def error_of(function, *args, **options):
    try:
        function(*args, **options)
    except SparsifyError as error:
        return str(error)
    return "no error"


def selecting(way, small=0):
    """A context in which tensors of up to ``small`` entries are batched, and others come in several blocks."""
    limits = ExitStack()
    limits.enter_context(patch("sparsify.selection.joined.LARGEST", small))
    limits.enter_context(patch("sparsify.selection.distributed.MOST_AT_ONCE", 150))
    if way == "device":
        limits.enter_context(patch("sparsify.core.devices.AHEAD", ("cpu",)))
        limits.enter_context(patch("sparsify.kernels._found", lambda name: None))
    return limits
