"""Trains as the first of two ranks on fake CUDA devices, and prints a line of JSON for each model.

    PYTHONPATH=FOLDER TRITON_INTERPRET=1 python tests/helpers/ranks_on_fake_cuda.py

The other rank is mocked: torch's fake process group returns what this one sends. A process of its own is needed, as by
``train_on_fake_cuda.py``.
"""

import json
import os
import traceback
from unittest.mock import patch

import fake_cuda
import torch
from torch import distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from sparsify import get_unmasker, sparsify

BUDGET, STEPS = 40, 10
SMALL = 40  # largest number of entries of the tensors that are batched
LARGE = 300  # and of those whose gradients are multiplied out at once


class Deep(nn.Module):
    """As many layers as it takes, after a table with more rows than a batch has tokens and one with fewer."""

    def __init__(self, layers):
        super().__init__()
        self.many, self.few = nn.Embedding(100, 8), nn.Embedding(6, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(layers))
        self.head = nn.Linear(8, 50, bias=False)

    def forward(self, ids):
        hidden = (self.many(ids) + self.few(ids % 6)).to(self.head.weight.device)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden).square().mean()


def third_step(layers, last):
    """What the third step does, with the layers on the device ``last``; the first two compare the ranks."""
    torch.manual_seed(0)
    model = Deep(layers).to("cuda")
    model.layers.to(last), model.head.to(last)
    sparsify(model, BUDGET, "id3", steps=STEPS)
    optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
    engine = get_unmasker(model)
    for batch in [torch.randint(100, (2, 5)).to("cuda") for _ in range(3)]:
        before = engine.ranks.exchanges
        with fake_cuda.Counted() as seen:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
    return {
        "waits": sum(seen.waits.values()),
        "races": seen.races,
        "exchanges": engine.ranks.exchanges - before,
        "unmasked": engine.unmasked,
    }


def main():
    fake_cuda.install()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    with (
        patch("sparsify.selection.small_tensors.LARGEST", SMALL),
        patch("sparsify.selection.sharded.MOST_AT_ONCE", LARGE),
    ):
        for layers, last in ((1, "cuda:0"), (4, "cuda:0"), (4, "cuda:1")):
            print(json.dumps(third_step(layers, last)), flush=True)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # autograd's threads for the fake devices cannot be joined
