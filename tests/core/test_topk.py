"""The streaming selection against a plain sort of all scores, whatever order the tensors come in."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsify.core.topk as selection
from sparsify.core.importance import D3
from sparsify.core.topk import TopK
from sparsify.selection.static import in_blocks, offer_scores
from sparsify.strategies.importance import SNIP, Magnitude, register_importance

GRADS = [0.0, 0.0, -0.0, 1.0, -1.0, 1.0, 2.0, 0.5, -0.5, 1e-3]  # few numbers, so that ties are everywhere
WEIGHTS = [0.0, 1.0, -1.0, 0.5, 1e30]  # the largest makes scores overflow in float32, and so does a tiny eps

tensor_shapes = st.tuples(st.integers(1, 5), st.integers(1, 6))


@pytest.fixture(autouse=True)
def _default_sizes(monkeypatch):
    """Tests set the sizes of blocks and cuts themselves; afterwards they are as before."""
    monkeypatch.setattr(selection, "BLOCK_ENTRIES", selection.BLOCK_ENTRIES)
    monkeypatch.setattr(selection, "SMALLEST_CUT", selection.SMALLEST_CUT)


def draw_sizes(data):
    selection.BLOCK_ENTRIES = data.draw(st.sampled_from([1, 2, 3, 7, 100]), label="BLOCK_ENTRIES")
    selection.SMALLEST_CUT = data.draw(st.sampled_from([1, 2, 5, 1000]), label="SMALLEST_CUT")


def draw_matrix(data, shape, numbers, dtype):
    count = shape[0] * shape[1]
    flat = data.draw(st.lists(st.sampled_from(numbers), min_size=count, max_size=count))
    return torch.tensor(flat, dtype=dtype).view(shape)


def draw_tensors(data, grads=GRADS, dtype=torch.float64):
    """(offset, weight, grad, rows) of a few tensors; half of them have the gradient of some rows only."""
    tensors, offset = [], 0
    for shape in data.draw(st.lists(tensor_shapes, min_size=1, max_size=4), label="shapes"):
        weight = draw_matrix(data, shape, WEIGHTS, dtype)
        rows = None
        if data.draw(st.booleans()):
            rows = torch.tensor(sorted(data.draw(st.sets(st.integers(0, shape[0] - 1), min_size=1))))
        grad = draw_matrix(data, (shape[0] if rows is None else rows.numel(), shape[1]), grads, dtype)
        tensors.append((offset, weight, grad, rows))
        offset += weight.numel()
    return tensors


def plain_sort(tensors, score):
    """(global id, gradient) of all entries with a positive finite score, best first; as plainly as can be."""
    entries = []
    for offset, weight, grad, rows in tensors:
        cols = weight.shape[1]
        for position, row in enumerate(range(len(weight)) if rows is None else rows.tolist()):
            for column in range(cols):
                value = score(weight[row, column], grad[position, column]).item()
                if value > 0 and math.isfinite(value):
                    entries.append((-value, offset + row * cols + column, grad[position, column].item()))
    return [(id_, gradient) for _, id_, gradient in sorted(entries)]


def offer_all(topk, tensors, importance):
    before = [grad.clone() for _, _, grad, _ in tensors]
    for offset, weight, grad, rows in tensors:
        topk.offer(importance, weight, grad, rows, offset)
    for (_, _, grad, _), same in zip(tensors, before, strict=True):
        assert torch.equal(grad, same) or not grad.isfinite().all()


def selected(topk):
    winners = topk.winners()
    return list(zip(winners.ids.tolist(), winners.grads.tolist(), strict=True))


@settings(max_examples=300)
@given(
    data=st.data(), size=st.integers(1, 40), exp=st.sampled_from([-2, -1, 0, 1, 2, None]),
    eps=st.sampled_from([0.5, 0.5, 1e-30]), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    bad=st.sampled_from([None, None, None, math.inf, -math.inf, math.nan]),
)  # fmt: skip
def test_any_order_of_arrival_selects_what_a_plain_sort_does(data, size, exp, eps, dtype, bad):
    draw_sizes(data)
    grads = GRADS if data.draw(st.booleans()) else data.draw(st.lists(st.floats(-10, 10, width=32), min_size=3))
    tensors, importance = draw_tensors(data, grads, dtype), SNIP() if exp is None else D3(exp=exp, eps=eps)
    if bad is not None:  # a gradient that is reported and never selected
        grad = tensors[-1][2]
        grad.view(-1)[data.draw(st.integers(0, grad.numel() - 1), label="place")] = bad
    scored = torch.promote_types(dtype, torch.float32)
    for topk_dtype in {scored, torch.float64}:  # a topk is float64 where any tensor of the model is
        topk = TopK(size, topk_dtype, "cpu")
        assert selected(topk) == []
        offer_all(topk, data.draw(st.permutations(tensors), label="arrival"), importance)
        assert topk.finite == (bad is None)
        expected = plain_sort(tensors, lambda weight, grad: importance.score(weight.to(scored), grad.to(scored)))
        assert selected(topk) == selected(topk) == expected[:size]


@pytest.mark.parametrize("size", [1, 50])
@pytest.mark.parametrize("order", ["ties", "ties, last first", "rising"])
def test_memory_stays_in_the_order_of_the_topk_under_mass_ties_and_while_scores_only_rise(size, order):
    selection.BLOCK_ENTRIES, selection.SMALLEST_CUT = 64, 16
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_numbers_are_never_selected(dtype):
    topk = TopK(3, torch.float32, "cpu")
    weight = torch.tensor([math.nan, 2.0, math.inf, 1.0], dtype=dtype)
    offer_scores(topk, [Magnitude().score(block, None) for block in in_blocks(weight)], 0, torch.arange(0))
    assert topk.winners().ids.tolist() == [3, 1]
