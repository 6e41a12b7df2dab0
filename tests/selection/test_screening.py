"""The screen shows the topk exactly what the full float32 product would have."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DenseOracle, unmasked_sets
from products import FORMS, FREE, screen_in_form
from recorder import mask
from torch import nn

from sparsify import D3, SNIP, Increment, Repeat, Strategy, get_unmasker, sparsify
from sparsify.masked.product import Product
from sparsify.masked.tensor import Gradient
from sparsify.masked.tied import TiedGradient
from sparsify.selection import screening as screen
from sparsify.selection.context import SelectionContext, Work
from sparsify.selection.screening import scan
from sparsify.selection.topk import TopK, offer_gradient

ROWS, COLS, TOKENS = 48, 40, 24


def a_tensor(weight, unmasked=()):
    """A masked weight (ROWS, COLS) at offset 100 with some unmasked entries, flat indices."""
    layer = nn.Linear(COLS, ROWS, bias=False)
    layer.weight.data = weight
    _, tensors = mask(layer)
    tensor = tensors["weight"]
    tensor.offset = 100
    indices = torch.as_tensor(unmasked, dtype=torch.int64)
    tensor.collector.buffers.append(
        [indices.numel()], indices, torch.arange(indices.numel()), torch.zeros(len(indices))
    )
    return tensor


def searching(topk, importance=D3()):  # noqa: B008 - frozen
    return SelectionContext(topk, importance, Work())


def winners(offer, size, seed_scores):
    """The winners in a topk that already holds other tensors' entries, so that it has a threshold."""
    topk = TopK(size, torch.float32, "cpu")
    ids = torch.arange(size)
    topk.add(ids, seed_scores, seed_scores)
    offer(topk)
    return topk.winners()


@pytest.fixture(params=FORMS, autouse=True)
def form(request, monkeypatch):
    """All forms of screening; the compiled ones where the machine has them."""
    monkeypatch.setattr("sparsify.selection.screening.screen", screen_in_form(request.param, monkeypatch))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    importance=st.one_of(
        st.builds(D3, exp=st.sampled_from([0.0, 1.0, 2.0, -1.0]), eps=st.sampled_from([1.0, 1e-3])), st.just(SNIP())
    ),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    shape=st.sampled_from(["normal", "one huge row", "low rank", "equal"]),
)
def test_the_screen_finds_the_winners_of_the_full_product(seed, importance, scale, shape):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(TOKENS, ROWS, generator=generator) * scale
    right = torch.randn(TOKENS, COLS, generator=generator)
    if shape == "one huge row":
        left[:, 3] *= 1e3
    if shape == "low rank":
        left = left[:, :1].expand(-1, ROWS).contiguous()
    if shape == "equal":
        left, right = torch.full_like(left, scale), torch.ones_like(right)
    weight = torch.randn(ROWS, COLS, generator=generator)
    unmasked = torch.randperm(ROWS * COLS, generator=generator)[:15]
    tensor = a_tensor(weight, unmasked)
    product = Product(left, right)
    gradient = product.dense()
    scores = importance.score(weight, gradient.values).flatten()
    # the other tensors' entries beat most of this one's: only a few are left to find
    others = torch.full((20,), scores.kthvalue(scores.numel() - 12).values.item())

    def screened(topk):
        taken = screen.scan_screened(searching(topk, importance), tensor, product, unmasked)
        torch.testing.assert_close(
            taken.unmasked, gradient.take(unmasked), rtol=1e-4, atol=1e-5 * gradient.values.abs().max()
        )
        torch.testing.assert_close(product.left_sum, left.sum(0), rtol=1e-4, atol=1e-5 * left.abs().max())

    def dense(topk):
        rest = Gradient(gradient.values.clone())
        rest.clear(unmasked)
        offer_gradient(topk, importance, weight, rest.values, None, 100)

    found, expected = winners(screened, 20, others), winners(dense, 20, others)

    def score_of(index):
        return scores[index - 100].item() if index >= 100 else others[0].item()

    cut = min(score_of(index) for index in expected.ids.tolist())
    for index in set(found.ids.tolist()) ^ set(expected.ids.tolist()):
        # a dot product and a matrix product round differently: at the cut either entry is right
        assert score_of(index) == pytest.approx(cut, rel=1e-5)
    assert not set(found.ids.tolist()) & set((unmasked + 100).tolist())


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch):
    monkeypatch.setattr(screen, "costs_of", lambda *_: FREE)


def test_an_overflow_is_left_to_the_full_product():
    left, right = torch.ones(2, ROWS), torch.ones(2, COLS)
    left[0, 0] = torch.inf
    topk = TopK(1, torch.float32, "cpu", threshold=1e-3)
    nothing = torch.empty(0, dtype=torch.int64)
    tensor = a_tensor(torch.zeros(ROWS, COLS))
    assert screen.scan_screened(searching(topk), tensor, Product(left, right), nothing) is None
    assert topk.winners().ids.numel() == 0


def test_too_many_candidates_are_left_to_the_full_product(monkeypatch):
    monkeypatch.setattr(screen, "costs_of", lambda *_: FREE._replace(entry=0.1))
    left, right = torch.ones(2, ROWS), torch.ones(2, COLS)
    topk = TopK(1, torch.float32, "cpu", threshold=1e-3)
    nothing = torch.empty(0, dtype=torch.int64)
    tensor = a_tensor(torch.zeros(ROWS, COLS))
    assert screen.scan_screened(searching(topk), tensor, Product(left, right), nothing) is None


def test_what_is_screened():
    topk = TopK(1, torch.float32, "cpu")
    topk.add(torch.tensor([0]), torch.tensor([1.0]), torch.tensor([1.0]))
    product = Product(torch.randn(4, 300), torch.randn(4, 300))
    assert screen.can_screen(searching(topk), product)
    assert not screen.can_screen(searching(topk), Product(product.left.double(), product.right.double()))
    assert not screen.can_screen(searching(TopK(1, torch.float32, "cpu")), product), "an empty topk has no threshold"


def test_nothing_is_screened_where_that_costs_more_than_the_full_product(monkeypatch):
    topk, nothing = TopK(1, torch.float32, "cpu", threshold=1e3), torch.empty(0, dtype=torch.int64)
    tensor = a_tensor(torch.zeros(ROWS, COLS))
    product = Product(torch.randn(TOKENS, ROWS), torch.randn(TOKENS, COLS))
    assert screen.scan_screened(searching(topk), tensor, product, nothing) is not None
    monkeypatch.setattr(screen, "costs_of", lambda *_: FREE._replace(norms=1.1))
    assert screen.scan_screened(searching(topk), tensor, product, nothing) is None


def test_no_screen_where_sampling_the_unmasked_entries_makes_it_too_slow(monkeypatch):
    topk = TopK(1, torch.float32, "cpu")
    topk.add(torch.tensor([0]), torch.tensor([1e3]), torch.tensor([1e3]))
    unmasked = torch.arange(15)
    tensor = a_tensor(torch.zeros(ROWS, COLS), unmasked)
    product = Product(torch.randn(TOKENS, ROWS), torch.randn(TOKENS, COLS))
    monkeypatch.setattr(screen, "costs_of", lambda *_: FREE._replace(entry=1 / 20))
    assert screen.scan_screened(searching(topk), tensor, product, unmasked) is not None
    monkeypatch.setattr(screen, "costs_of", lambda *_: FREE._replace(entry=1 / 14))
    assert screen.scan_screened(searching(topk), tensor, product, unmasked) is None


def test_the_engine_unmasks_the_same_with_and_without_the_screen(monkeypatch):
    monkeypatch.setattr(screen, "SMALLEST_SCREENED", 1)
    monkeypatch.setattr("sparsify.selection.small_tensors.LARGEST", 64)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
    screened_products = []
    original = screen.scan_screened

    def counting(*args):
        screened_products.append(original(*args))
        return screened_products[-1]

    monkeypatch.setattr("sparsify.selection.screening.scan_screened", counting)
    sets = []
    for smallest in (1, 1 << 30):
        monkeypatch.setattr(screen, "SMALLEST_SCREENED", smallest)
        model = sparsify(copy.deepcopy(plain), 60, steps=6)
        optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
        generator = torch.Generator().manual_seed(1)
        for _ in range(6):
            model(torch.randn(16, 32, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sets.append(unmasked_sets(model))
    assert sets[0] == sets[1]
    assert sum(taken is not None for taken in screened_products) >= 6


HARD = {
    "ties": lambda model, x: (model, x),
    "equal scores": lambda model, x: (fill(model, 0.5), torch.ones_like(x)),
    "zeros": lambda model, x: (fill(model, 0.0), x),
    "one huge row": lambda model, x: (times_column(model[2].weight, 1024.0), x),
    "one huge column": lambda model, x: (model, times_column(x, 2.0**40)),
    "huge numbers": lambda model, x: (model, x * 2.0**50),
    "tiny numbers": lambda model, x: (model, x * 2.0**-90),
    "denormals": lambda model, x: (model, x * 2.0**-130),
}


def fill(model, number):
    for parameter in model.parameters():
        parameter.data.fill_(number)
    return model


def times_column(tensor, number):
    tensor.data[:, 3] *= number
    return tensor


@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("exp", [0, 1, 2, -1])
def test_hard_cases_are_the_oracles_to_the_last_entry(monkeypatch, case, exp):
    """All numbers are multiples of powers of two, and few, so that no sum is rounded in any order."""
    monkeypatch.setattr(screen, "SMALLEST_SCREENED", 1)
    monkeypatch.setattr("sparsify.selection.small_tensors.LARGEST", 0)
    torch.manual_seed(exp)
    dense = nn.Sequential(nn.Linear(20, 17), nn.ReLU(), nn.Linear(17, 33), nn.ReLU(), nn.Linear(33, 5))
    for parameter in dense.parameters():
        parameter.data = torch.randint(-4, 5, parameter.shape) / 4
    batches = [torch.randint(-1, 2, (12, 20)).float() for _ in range(4)]
    HARD[case](dense, batches[0])
    sparse = sparsify(copy.deepcopy(dense), 60, Strategy(D3(exp=exp), Increment()), steps=4)
    oracle = DenseOracle(dense, torch.optim.SGD(dense.parameters(), lr=0.0), 60, 4, exp=exp)
    optimizer = torch.optim.SGD([sparse.sparse_values], lr=0.0)
    ways = torch.randint(-1, 2, (12, 5)).float()
    for x in batches:
        _, x = HARD[case](copy.deepcopy(dense), x.clone())
        oracle.step((dense(x) * ways).sum())
        (sparse(x) * ways).sum().backward()
        optimizer.step()
        assert unmasked_sets(sparse) == oracle.unmasked_sets()


def test_dot_products_are_the_entries_of_the_product():
    product = Product(torch.randn(70, ROWS), torch.randn(70, COLS))
    indices = torch.randperm(ROWS * COLS)[:20]
    assert indices.numel() * 70 < ROWS * COLS, "few enough for dot products"
    torch.testing.assert_close(product.take(indices), product.dense().take(indices), rtol=1e-5, atol=1e-5)
    many = torch.arange(ROWS * COLS)
    assert torch.equal(product.take(many), product.dense().values.flatten())
    assert isinstance(product.dense(), Gradient)


class Tied(nn.Module):
    """A table that is looked up in, twice, and multiplied by."""

    def __init__(self, vocabulary, width):
        super().__init__()
        self.table, self.between = nn.Embedding(vocabulary, width, padding_idx=3), nn.Linear(width, width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.table.weight

    def forward(self, ids):
        return self.output(self.between(self.table(ids)).tanh() + self.table(ids.flip(0)))


@pytest.mark.parametrize("masked_only", [True, False])
def test_a_tied_table_is_chosen_from_as_by_its_whole_gradient(masked_only, monkeypatch):
    torch.manual_seed(0)
    model, budget = Tied(600, 160), 3_000
    capacity = None if masked_only else 30_000
    selection = Increment() if masked_only else Repeat(capacity=capacity)
    sparsify(model, budget, strategy=Strategy(D3(), selection), steps=5)
    unmasker = get_unmasker(model)
    unmasker.check = True  # raises where the dense form chooses others
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(5):
        ids = torch.randint(600, (48,), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(ids), ids.roll(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    work = unmasker.work
    assert work.screened + work.skipped > 600 * 100, "the table, but for the rows that were looked up"
    assert work.screened + work.skipped + work.dense == (600 * 160 + 160 * 160 + 160)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_looked_up_row_that_is_not_finite_is_noticed(number):
    left, right = torch.randn(TOKENS, ROWS), torch.randn(TOKENS, COLS)
    rows = torch.zeros(2, COLS)
    rows[1, 5] = number
    gradient = TiedGradient(Product(left, right), Gradient(rows, torch.tensor([4, 7])))
    topk, nothing = TopK(1, torch.float32, "cpu", threshold=1e-3), torch.empty(0, dtype=torch.int64)
    tensor = a_tensor(torch.zeros(ROWS, COLS))
    assert not screen.scan_screened(searching(topk), tensor, gradient, nothing).finite


def test_what_was_screened_in_vain_is_multiplied_out(monkeypatch):
    monkeypatch.setattr(screen, "SMALLEST_SCREENED", 1)
    monkeypatch.setattr(screen, "costs_of", lambda *_: FREE._replace(entry=0.1))
    tensor, nothing = a_tensor(torch.zeros(ROWS, COLS)), torch.empty(0, dtype=torch.int64)
    context = searching(TopK(1, torch.float32, "cpu", threshold=1e-3))
    scan(context, tensor, Product(torch.ones(2, ROWS), torch.ones(2, COLS)), nothing)
    assert context.work == Work(wasted=ROWS * COLS, dense=ROWS * COLS)
