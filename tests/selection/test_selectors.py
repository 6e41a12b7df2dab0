"""Selectors: ranked entries get their gradients in whatever order the tensors come; streaming ones leave some out."""

import torch
from recorder import mask
from torch import nn

from sparsify import D3
from sparsify.masked.gradients import DenseGradient
from sparsify.selection.context import SelectionContext, Work
from sparsify.selection.selectors import RankedSelector, StreamingSelector
from sparsify.selection.topk import TopK


def masked_layer():
    """A weight (4, 3) with global ids 0 to 11 and a bias (4,) with 12 to 15."""
    _, tensors = mask(nn.Linear(3, 4))
    weight, bias = tensors["weight"], tensors["bias"]
    bias.offset = 12
    return weight, bias


def test_ranked_winners_come_best_first_with_their_own_gradients():
    weight, bias = masked_layer()
    selector = RankedSelector(torch.tensor([13, 2, 11, 0]), [weight, bias], torch.zeros(4))
    selector.offer(bias, DenseGradient(torch.tensor([[10.0, 11.0, 12.0, 13.0]])))
    selector.offer(weight, DenseGradient(torch.arange(12.0).view(4, 3)))
    winners = selector.winners()
    assert winners.ids.tolist() == [13, 2, 11, 0]
    assert winners.grads.tolist() == [11.0, 2.0, 11.0, 0.0]


def test_a_tensor_without_ranked_entries_is_not_wanted_and_one_that_never_came_has_no_gradient():
    weight, bias = masked_layer()
    selector = RankedSelector(torch.tensor([1]), [weight, bias], torch.zeros(4))
    assert selector.wants(weight)
    assert not selector.wants(bias)
    assert selector.winners().grads.tolist() == [0.0]


def test_ranked_gradients_that_are_not_finite_are_noticed():
    weight, bias = masked_layer()
    selector = RankedSelector(torch.tensor([1]), [weight, bias], torch.zeros(4))
    assert selector.finite()
    selector.offer(weight, DenseGradient(torch.full((4, 3), torch.inf)))
    assert not selector.finite()


def test_streaming_leaves_out_what_is_unmasked_only_where_it_is_told_to():
    for masked_only, expected in ((True, [3]), (False, [7])):
        weight, bias = masked_layer()
        weight.collector.buffers.append([1, 0], torch.tensor([7]), torch.tensor([0]), torch.zeros(1))
        grad = torch.zeros(4, 3)
        grad.view(-1)[[3, 7]] = torch.tensor([1.0, 2.0])
        context = SelectionContext(TopK(1, torch.float32, "cpu"), D3(exp=0), Work(), masked_only)
        selector = StreamingSelector(context)
        assert selector.wants(bias)
        assert selector.offer(weight, DenseGradient(grad)).tolist() == [2.0], "the unmasked entry's"
        assert selector.winners().ids.tolist() == expected
        assert selector.finite()
