"""Selectors: ranked entries get their gradients in whatever order the tensors come; streaming ones leave some out."""

import pytest
import torch
from recorder import mask
from torch import nn

from sparsify import D3
from sparsify.masked.gradients import DenseGradient
from sparsify.selection.context import SelectionContext, Work
from sparsify.selection.device_topk import DeviceTopK
from sparsify.selection.selectors import RankedSelector, StreamingSelector
from sparsify.selection.topk import TopK


@pytest.fixture
def tensors():
    """A weight (4, 3) with global ids 0 to 11 and a bias (4,) with 12 to 15."""
    _, tensors = mask(nn.Linear(3, 4))
    tensors["bias"].offset = 12
    return tensors["weight"], tensors["bias"]


def test_ranked_winners_come_best_first_with_their_own_gradients(tensors):
    weight, bias = tensors
    selector = RankedSelector(torch.tensor([13, 2, 11, 0]), tensors, torch.zeros(4))
    selector.offer(bias, DenseGradient(torch.tensor([[10.0, 11.0, 12.0, 13.0]])))
    selector.offer(weight, DenseGradient(torch.arange(12.0).view(4, 3)))
    winners = selector.winners()
    assert winners.ids.tolist() == [13, 2, 11, 0]
    assert winners.grads.tolist() == [11.0, 2.0, 11.0, 0.0]


def test_a_tensor_without_ranked_entries_is_not_wanted_and_gradients_count_as_they_come(tensors):
    weight, bias = tensors
    selector = RankedSelector(torch.tensor([1]), tensors, torch.zeros(4))
    assert selector.wants(weight)
    assert not selector.wants(bias)
    assert selector.winners().grads.tolist() == [0.0]
    assert selector.finite()
    selector.offer(weight, DenseGradient(torch.full((4, 3), torch.inf)))
    assert not selector.finite()


@pytest.mark.parametrize("topk", [TopK, DeviceTopK])
@pytest.mark.parametrize(("masked_only", "expected"), [(True, [4]), (False, [7])])
def test_streaming_leaves_out_what_is_unmasked_where_it_is_told_to_and_a_frozen_row_always(
    tensors, topk, masked_only, expected
):
    weight, bias = tensors
    weight.frozen_row = 0
    weight.collector.buffers.append([1, 0], torch.tensor([7]), torch.tensor([0]), torch.zeros(1))
    grad = torch.zeros(4, 3)
    grad.view(-1)[[2, 4, 7]] = torch.tensor([9.0, 1.0, 2.0])
    total = [16] if topk is DeviceTopK else []
    topk = topk(1, *total, torch.float32, torch.device("cpu"))
    selector = StreamingSelector(SelectionContext(topk, D3(exp=0), Work(), masked_only))
    assert selector.wants(bias)
    assert selector.offer(weight, DenseGradient(grad)).tolist() == [2.0], "the unmasked entry's"
    selector.skip(bias)
    assert selector.winners().ids.tolist() == expected
    assert selector.finite()
