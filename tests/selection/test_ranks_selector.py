"""Several ranks average a part of a gradient while they offer the one before; test_distributed.py runs such ranks."""

from collections import Counter

import torch
from torch import distributed as dist
from torch import nn

from sparsify import D3, get_engine, sparsify
from sparsify.core.gradients import DenseGradient, Product
from sparsify.core.topk import TopK
from sparsify.selection import distributed
from sparsify.selection.distributed import RanksSelector


class Recorded(TopK):
    """The top-k of the first of two ranks, and its exchanges with the other, which has the same gradients."""

    def __init__(self, size):
        super().__init__(size, torch.float32, "cpu")
        self.events, self.sizes = [], []

    def headers(self, *places):
        pass

    def mean_share(self, values, group=None):
        self.events.append("begin")
        self.sizes.append(values.numel())
        return lambda: self.events.append("wait") or values.chunk(2)[0]

    def offer(self, *entries):
        self.events.append("offer")
        super().offer(*entries)

    def gather(self, own):
        return own[None]


def test_a_bounded_part_of_a_gradient_is_averaged_while_the_one_before_is_offered(monkeypatch):
    monkeypatch.setattr(distributed, "MOST_AT_ONCE", 12)
    monkeypatch.setattr(distributed, "num_ranks", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr("sparsify.selection.joined.LARGEST", 0)
    model = sparsify(nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 4, bias=False)), 6, "id3", steps=1)
    first, second = get_engine(model).tensors
    ranks = Recorded(6)
    selector = RanksSelector(ranks, D3(), Counter(), True, ranks, [first, second])
    selector.offer(second, DenseGradient(torch.randn(4, 5)))
    selector.offer(first, Product(torch.randn(3, 5), torch.randn(3, 4)))
    selector.winners()
    assert sum(ranks.sizes) == 40
    assert max(ranks.sizes) <= 12
    overlapped = ["begin", "wait", "offer"] * (len(ranks.sizes) - 1)
    assert ranks.events == ["begin", *overlapped, "wait", "offer"]
