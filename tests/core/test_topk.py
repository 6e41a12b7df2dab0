"""The memory of the streaming top-k, and entries without a gradient; its winners: test_device_topk.py."""

import pytest
import torch

from sparsify.core.importance import D3
from sparsify.core.topk import TopK
from sparsify.strategies.importance import register_importance


@pytest.mark.parametrize("size", [1, 50])
@pytest.mark.parametrize("order", ["ties", "ties, last first", "rising"])
def test_memory_stays_in_the_order_of_the_topk_under_mass_ties_and_while_scores_only_rise(size, order, monkeypatch):
    monkeypatch.setattr("sparsify.core.topk.BLOCK_ENTRIES", 64)
    monkeypatch.setattr("sparsify.core.topk.SMALLEST_CUT", 16)
    topk, blocks = TopK(size, torch.float32, "cpu"), range(0, 20_000, 64)
    for offset in reversed(blocks) if order == "ties, last first" else blocks:
        score = 1.0 + offset if order == "rising" else 1.0
        topk.offer(D3(), torch.zeros(1, 64), torch.full((1, 64), score), None, offset)
        assert topk._num_waiting + topk._best[0].numel() <= size + max(size // 4, 16) + 64
    first = blocks[-1] if order == "rising" else 0
    assert topk.winners().ids.tolist() == list(range(first, first + size))


def test_an_entry_without_a_gradient_is_not_offered_whatever_a_users_function_says():
    generous = register_importance("test-topk-generous")(lambda weight, grad: torch.ones_like(grad))
    topk = TopK(4, torch.float32, "cpu")
    topk.offer(generous, torch.ones(2, 2), torch.tensor([[0.0, 1.0], [2.0, 0.0]]), None, 0)
    assert topk.winners().ids.tolist() == [1, 2]
