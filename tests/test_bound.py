"""The part of a product that its norms leave shows the pool what the full product would have."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import unmasked_sets
from test_screen import a_tensor, searching, winners
from torch import nn

from sparsify import D3, SNIP, bound, sparsify
from sparsify.costs import Costs
from sparsify.masked.product import Product
from sparsify.selection import Pool, offer_gradient

ROWS, COLS, TOKENS = 48, 40, 24
CHEAP_SAMPLES = Costs(product=1, whole=1, survey=1, base=0, entry=0)


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch):
    monkeypatch.setattr(bound, "costs_of", lambda *_: CHEAP_SAMPLES)
    monkeypatch.setattr(bound, "LARGEST_PART", 1)


def factors(seed, shape, scale, dtype):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(TOKENS, ROWS, generator=generator, dtype=dtype) * scale
    right = torch.randn(TOKENS, COLS, generator=generator, dtype=dtype)
    if shape == "one huge row":
        left[:, 3] *= 1e3
    if shape == "outliers":
        left[:, 7] *= 30
        right[:, [2, 9]] *= 50
    if shape == "zeros":
        left[:, ::2], right[:, 1::2] = 0, 0
    if shape == "aligned":  # the norms' product is the entry: nothing is to spare
        left, right = (
            left[:, :1] * torch.rand(ROWS, generator=generator),
            left[:, :1] / scale * torch.rand(COLS, generator=generator),
        )
    return left, right


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    importance=st.one_of(
        st.builds(D3, exp=st.sampled_from([0.0, 1.0, 2.0, -1.0]), eps=st.sampled_from([1.0, 1e-3])), st.just(SNIP())
    ),
    scale=st.sampled_from([1e-12, 1.0, 1e6]),
    shape=st.sampled_from(["normal", "one huge row", "outliers", "zeros", "aligned"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    rank=st.integers(2, 40),
)
def test_the_part_has_the_winners_of_the_full_product(seed, importance, scale, shape, dtype, rank):
    left, right = factors(seed, shape, scale, dtype)
    weight = torch.randn(ROWS, COLS, dtype=dtype, generator=torch.Generator().manual_seed(seed + 1))
    unmasked = torch.randperm(ROWS * COLS, generator=torch.Generator().manual_seed(seed + 2))[:15]
    tensor, product = a_tensor(weight, unmasked), Product(left, right)
    full = product.dense()
    unmasked_grads = full.take(unmasked)
    full.clear(unmasked)
    scores = importance.score(weight, full.values).flatten()
    others = torch.full((20,), scores.topk(rank).values[-1].item())

    def bounded(pool):
        taken = bound.offer_bounded(searching(pool, importance), tensor, product, unmasked)
        torch.testing.assert_close(
            taken.unmasked, unmasked_grads, rtol=1e-4, atol=1e-5 * full.values.abs().max().item()
        )

    def dense(pool):
        offer_gradient(pool, importance, weight, full.values, None, 100)

    found, expected = winners(bounded, 20, others), winners(dense, 20, others)
    cut = others[0].item()
    for index in set(found.ids.tolist()) ^ set(expected.ids.tolist()):
        # the part and the whole may round differently: at the cut either entry is right
        assert (scores[index - 100].item() if index >= 100 else cut) == pytest.approx(cut, rel=1e-5)
    assert not set(found.ids.tolist()) & set((unmasked + 100).tolist())


def test_rows_and_columns_that_cannot_reach_are_left_out():
    left, right = factors(0, "outliers", 1.0, torch.float32)
    part = bound.part_that_reaches(Product(left, right), torch.full((ROWS,), 3000.0))
    assert part.rows.tolist() == [7]
    assert part.columns.tolist() == [2, 9]


def test_squares_that_underflow_are_not_taken_for_zeros():
    left, right = torch.full((4, 1), 1e-25), torch.full((4, 1), 1e15)
    product = Product(left, right)
    part = bound.part_that_reaches(product, product.dense().values.flatten())
    assert part.rows.numel() == part.columns.numel() == 1


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e38])
def test_an_overflow_is_left_to_the_full_product(value):
    left, right = torch.ones(2, ROWS), torch.ones(2, COLS)
    left[0, 0] = value
    pool = Pool(1, torch.float32, "cpu")
    pool.add(torch.tensor([0]), torch.tensor([1.0]), torch.tensor([1.0]))
    nothing = torch.empty(0, dtype=torch.int64)
    right[0, 0] = 1e3
    tensor = a_tensor(torch.zeros(ROWS, COLS))
    assert bound.offer_bounded(searching(pool), tensor, Product(left, right), nothing) is None
    assert pool.winners().ids.tolist() == [0]


def test_a_large_part_is_left_to_the_full_product(monkeypatch):
    monkeypatch.setattr(bound, "LARGEST_PART", 0.5)
    pool = Pool(1, torch.float32, "cpu")
    pool.add(torch.tensor([0]), torch.tensor([1e-3]), torch.tensor([1e-3]))
    product = Product(torch.ones(2, ROWS), torch.ones(2, COLS))
    tensor = a_tensor(torch.zeros(ROWS, COLS))
    assert bound.offer_bounded(searching(pool), tensor, product, torch.empty(0, dtype=torch.int64)) is None


def test_the_engine_unmasks_the_same_with_and_without_the_bound(monkeypatch):
    monkeypatch.setattr("sparsify.small.LARGEST", 64)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).double()
    offered = []
    original = bound.offer_bounded

    def counting(*args):
        offered.append(original(*args))
        return offered[-1]

    monkeypatch.setattr("sparsify.choosers.offer_bounded", counting)
    sets = []
    for smallest in (1, 1 << 30):
        monkeypatch.setattr(bound, "SMALLEST_BOUNDED", smallest)
        model = sparsify(copy.deepcopy(plain), 60, steps=6)
        optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
        generator = torch.Generator().manual_seed(1)
        for _ in range(6):
            model(torch.randn(16, 32, generator=generator, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sets.append(unmasked_sets(model))
    assert sets[0] == sets[1]
    assert sum(taken is not None for taken in offered) >= 6


def test_what_can_be_bounded():
    pool = Pool(1, torch.float32, "cpu")
    product = Product(torch.randn(4, 300), torch.randn(4, 300))
    assert not bound.can_bound(searching(pool), product), "an empty pool has no floor"
    pool.add(torch.tensor([0]), torch.tensor([1.0]), torch.tensor([1.0]))
    assert bound.can_bound(searching(pool), product)
    assert bound.can_bound(searching(pool), Product(product.left.double(), product.right.double()))
    assert not bound.can_bound(searching(pool), Product(product.left.bfloat16(), product.right.bfloat16()))
    assert not bound.can_bound(searching(pool), product.dense())
    assert not bound.can_bound(searching(pool), Product(torch.randn(4, 200), torch.randn(4, 300)))
