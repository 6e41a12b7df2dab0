"""Choosers: entries that are known ahead get their gradients, wherever their tensors come by."""

import torch
from recorder import mask
from torch import nn

from sparsify import D3
from sparsify.masked.tensor import Gradient
from sparsify.selection.context import Search
from sparsify.selection.counters import Work
from sparsify.selection.selectors import RankedChooser, StreamingChooser
from sparsify.selection.topk import Pool


def masked_layer():
    """A weight (4, 3) with global ids 0 to 11 and a bias (4,) with 12 to 15."""
    _, tensors = mask(nn.Linear(3, 4))
    weight, bias = tensors["weight"], tensors["bias"]
    bias.offset = 12
    return weight, bias


def test_ranked_winners_come_best_first_with_their_own_gradients():
    weight, bias = masked_layer()
    chooser = RankedChooser(torch.tensor([13, 2, 11, 0]), [weight, bias], torch.zeros(4))
    chooser.offer(bias, Gradient(torch.tensor([[10.0, 11.0, 12.0, 13.0]])))
    chooser.offer(weight, Gradient(torch.arange(12.0).view(4, 3)))
    winners = chooser.winners()
    assert winners.ids.tolist() == [13, 2, 11, 0]
    assert winners.grads.tolist() == [11.0, 2.0, 11.0, 0.0]


def test_a_tensor_without_ranked_entries_is_not_wanted_and_one_that_never_came_has_no_gradient():
    weight, bias = masked_layer()
    chooser = RankedChooser(torch.tensor([1]), [weight, bias], torch.zeros(4))
    assert chooser.wants(weight)
    assert not chooser.wants(bias)
    assert chooser.winners().grads.tolist() == [0.0]


def test_ranked_gradients_that_are_not_finite_are_noticed():
    weight, bias = masked_layer()
    chooser = RankedChooser(torch.tensor([1]), [weight, bias], torch.zeros(4))
    assert all(chooser.finite())
    chooser.offer(weight, Gradient(torch.full((4, 3), torch.inf)))
    assert not all(chooser.finite())


def test_streaming_leaves_out_what_is_unmasked_only_where_it_is_told_to():
    for masked_only, expected in ((True, [3]), (False, [7])):
        weight, bias = masked_layer()
        weight.collector.buffers.append([1, 0], torch.tensor([7]), torch.tensor([0]), torch.zeros(1))
        grad = torch.zeros(4, 3)
        grad.view(-1)[[3, 7]] = torch.tensor([1.0, 2.0])
        chooser = StreamingChooser(Search(Pool(1, torch.float32, "cpu"), D3(exp=0), Work()), masked_only=masked_only)
        assert chooser.wants(bias)
        assert chooser.offer(weight, Gradient(grad)).tolist() == [2.0], "the unmasked entry's"
        assert chooser.winners().ids.tolist() == expected
        assert all(chooser.finite())
