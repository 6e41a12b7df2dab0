"""Screening a product finds every entry that could reach the threshold, whatever the factors are made of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import FORMS, KINDS, SIZES, exact, factors, screen_in_form

from sparsify.kernels import norm_bound
from sparsify.kernels.norm_bound import Limits

NOTHING = torch.empty(0, dtype=torch.int64)
ALL = 1 << 40  # entries that may be multiplied


@pytest.fixture(params=FORMS, scope="module")
def form(request):
    """All forms; the compiled ones where the machine has them."""
    with pytest.MonkeyPatch.context() as patch:
        yield screen_in_form(request.param, patch)


def all_of(left, right, form, least=0.0, wanted=NOTHING, excluded=NOTHING):
    rows, cols = left.shape[1], right.shape[1]
    least = torch.as_tensor(least, dtype=torch.float32).expand(rows)
    return form(left, right, wanted, excluded, least, Limits(rows * cols, ALL))


@settings(max_examples=100)
@given(
    kind=st.sampled_from(sorted(KINDS)), tokens=st.one_of(SIZES, st.integers(129, 700)), rows=SIZES, cols=SIZES,
    seed=st.integers(0, 999), dtype=st.sampled_from([torch.float32, torch.bfloat16]), weighted=st.booleans(),
    share=st.sampled_from([0.0, 0.5, 0.9, 0.999, 1.0]),
)  # fmt: skip
def test_the_bound_is_above_every_entry_and_no_entry_is_missed(
    form, kind, tokens, rows, cols, seed, dtype, weighted, share
):
    """Even where some tokens weigh more than others: then the product may overflow, and nothing is found."""
    left, right = factors(kind, tokens, rows, cols, dtype, seed)
    if weighted:
        weights = 10 ** torch.randn(tokens // 32 + 1, generator=torch.Generator().manual_seed(seed))
        left = left * weights.repeat_interleave(32)[:tokens, None].to(dtype)
    size = exact(left, right).abs()
    least = size.quantile(share, dim=1).float()  # which all but a share of each row's entries reach
    found = all_of(left, right, form, least)
    if weighted and found is None:
        return
    reached = (size >= least[:, None].double() * (1 + 1e-6)).view(-1).nonzero().squeeze(1)
    assert set(reached.tolist()) <= set(found.indices.tolist())
    assert found.indices.unique().numel() == found.indices.numel()
    assert (found.most.double() >= size.view(-1)[found.indices] * (1 - 1e-6)).all()
    assert (found.most >= found.values.abs()).all()


def test_an_entry_of_few_weak_tokens_alone_is_found(form):
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 200, generator=generator).sign() for _ in range(2))
    for factor in (left, right):
        factor[384:] *= 0.1
        factor[:384, 7] = 0
        factor[384:, 7] = 0.95
    size = exact(left, right).abs()
    assert size[7, 7] > 115 > size.view(-1).sort().values[-2]
    assert all_of(left, right, form, least=115.0).indices.tolist() == [7 * 200 + 7]


@settings(max_examples=40)
@given(tokens=SIZES, rows=SIZES, cols=SIZES, seed=st.integers(0, 999), wide=st.booleans())
def test_few_are_found_in_vain(form, tokens, rows, cols, seed, wide):
    left, right = factors("random", tokens, rows, cols, torch.float32 if wide else torch.bfloat16, seed)
    size = exact(left, right).abs()
    off = left.double().norm(dim=0)[:, None] * right.double().norm(dim=0)  # rounding two or three times
    found = all_of(left, right, form, least=float(size.median()))
    assert (found.most.double() <= (size + 7 * 2**-8 * off).view(-1)[found.indices]).all()


@settings(max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)), tokens=st.integers(1, 1000), rows=SIZES, cols=SIZES, seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_a_value_that_is_not_rounded_is_as_good_as_a_dot_product(form, kind, tokens, rows, cols, seed, dtype):
    left, right = factors(kind, tokens, rows, cols, dtype, seed)
    found, products = all_of(left, right, form), exact(left, right).view(-1)
    if not found.rounded:
        terms = exact(left.abs(), right.abs()).view(-1)[found.indices]
        # tokens are summed in blocks first
        chain = tokens if form is norm_bound.plain_screen else 128 + tokens / 128
        allowed = 2.0**-24 * (chain + 2) * terms + 1e-37
        assert ((found.values.double() - products[found.indices]).abs() <= allowed).all()
    rounds = norm_bound.has_matrix_units() if form is not norm_bound.plain_screen else dtype == torch.bfloat16
    assert found.rounded == rounds


def test_the_plain_form_expects_rounding_where_torch_was_told_that_it_may_round(monkeypatch):
    left, right = factors("random", 45, 40, 35)
    exactly = all_of(left, right, norm_bound.plain_screen)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    roughly = all_of(left, right, norm_bound.plain_screen)
    assert (exactly.rounded, roughly.rounded) == (False, True)
    off = left.norm(dim=0)[:, None] * right.norm(dim=0)
    assert (roughly.most - exactly.most >= (2**-8 * off).view(-1)[exactly.indices]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 32, 77])
def test_the_wanted_entries_come_in_the_order_they_were_asked_for_and_the_left_factor_is_summed(form, dtype, tokens):
    left, right = factors("random", tokens, 40, 35, dtype)
    wanted = torch.tensor([1399, 3, 3, 700, 0, 1399, *range(100, 130)])
    found = all_of(left, right, form, wanted=wanted)
    torch.testing.assert_close(found.taken.double(), exact(left, right).view(-1)[wanted], rtol=1e-5, atol=1e-5)
    assert torch.equal(found.taken[0], found.taken[5])
    torch.testing.assert_close(found.left_sum.double(), left.double().sum(0), rtol=1e-5, atol=1e-5)


def test_what_is_excluded_is_never_found_and_factors_may_be_strided(form):
    left, right = factors("random", 33, 20, 50)
    excluded = torch.tensor([999, 0, 5, 5, 500])
    strided = left.t().contiguous().t(), right.repeat_interleave(2, 1)[:, ::2]
    found = all_of(*strided, form, excluded=excluded)
    size = exact(left, right).abs().view(-1)[found.indices]
    assert (found.most.double() >= size * (1 - 1e-6)).all()
    assert set(found.indices.tolist()) == set(range(1000)) - set(excluded.tolist())


def test_each_row_has_its_own_threshold_and_more_entries_than_the_limit_are_none(form):
    left, right = factors("random", 8, 20, 50)
    least = torch.full((20,), torch.inf)
    least[3] = 0
    assert form(left, right, NOTHING, NOTHING, least, Limits(49, ALL)) is None
    assert sorted(form(left, right, NOTHING, NOTHING, least, Limits(50, ALL)).indices.tolist()) == list(range(150, 200))
    assert form(left, right, NOTHING, NOTHING, torch.full((20,), torch.inf), Limits(0, ALL)).indices.numel() == 0


def outliers(tokens=64, size=200):
    """Factors with a few columns of large norms, in no order, and the sizes of their product's entries."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.ones(size).index_fill_(0, torch.randperm(size, generator=generator)[:30], 100.0)
    left, right = (torch.randn(tokens, size, generator=generator) * scales for _ in range(2))
    return left, right, exact(left, right).abs()


@pytest.mark.parametrize(("tokens", "size"), [(64, 200), (50, 1000)])  # of 1000 columns a few are read by themselves
def test_what_the_norms_rule_out_is_not_multiplied(form, threads, tokens, size):
    threads(1)  # which has the short block after a whole one
    left, right, size = outliers(tokens, size)
    norms = left.norm(dim=0)[:, None] * right.norm(dim=0)
    for least in (1e3, 1e4, 1e5, 1e9):
        found = all_of(left, right, form, least=least)
        assert set((size >= least).view(-1).nonzero().view(-1).tolist()) <= set(found.indices.tolist())
        rows, columns = ((norms >= 0.9 * least).any(dim).sum().item() for dim in (1, 0))
        assert found.multiplied <= (rows + 32) * (columns + 32) * (rows > 0)
        error = (found.values.abs() - size.view(-1)[found.indices]).abs()
        assert (error <= found.most - found.values.abs() + 1e-6 * found.most).all()


def test_a_few_tokens_with_large_gradients_do_not_count_for_all(form):
    left, right = (torch.randn(64, 200, generator=torch.Generator().manual_seed(seed)).sign() for seed in (0, 1))
    left[1:] *= 1e-3
    assert (left.norm(dim=0)[:, None] * right.norm(dim=0)).min() > 7.9
    assert exact(left, right).abs().max() < 1.1
    assert all_of(left, right, form, least=1.1).multiplied == 0


def test_more_multiplications_than_there_is_room_for_are_not_begun(form):
    left, right, size = outliers()
    least = torch.full((200,), float(size.quantile(0.99)))
    whole = form(left, right, NOTHING, NOTHING, least, Limits(40_000, ALL))
    assert form(left, right, NOTHING, NOTHING, least, Limits(40_000, whole.multiplied - 1)) is None
    again = form(left, right, NOTHING, NOTHING, least, Limits(40_000, whole.multiplied))
    assert again.indices.sort().values.equal(whole.indices.sort().values)


def test_a_factor_that_is_too_large_to_pack_at_once_is_packed_in_parts(form):
    left, right = factors("random", 1, 40_000, 33)
    size = (1000 * left.view(-1, 1) * right).abs().view(-1)
    found = all_of(left.repeat(1000, 1), right.repeat(1000, 1), form)  # 160 MB
    assert found.indices.sort().values.equal(torch.arange(40_000 * 33))
    torch.testing.assert_close(found.most, size[found.indices], rtol=0.02, atol=1e-5)


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_none(form, number, dtype, side):
    parts = factors("random", 33, 20, 50, dtype)
    parts[side][32, 19] = number
    assert all_of(*parts, form, least=torch.inf) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_that_overflows_is_none(form, dtype):
    """Every factor is finite, the product is not, and partial sums of both signs would make a NaN."""
    left, right = torch.full((64, 20), 1e18, dtype=dtype), torch.full((64, 20), 1e21, dtype=dtype)
    right[32:] *= -1
    assert all_of(left, right, form, least=1.0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_threads_finds_the_same_and_the_same_bits_twice(form, threads, dtype):
    left, right = factors("random", 300, 130, 600, dtype)
    wanted, sets = torch.arange(0, 78_000, 47), []
    for number in (1, 2, 3, 5):
        threads(number)
        runs = [all_of(left, right, form, least=55.0, wanted=wanted) for _ in range(2)]
        orders = [found.indices.argsort() for found in runs]
        assert torch.equal(*(found.taken for found in runs))
        for part in ("indices", "most", "values"):
            assert torch.equal(*(getattr(found, part)[order] for found, order in zip(runs, orders, strict=True)))
        sets.append(runs[0].indices[orders[0]].tolist())
    assert sets[0]
    assert sets == sets[:1] * 4


def test_torchs_default_dtype_does_not_matter(form):
    left, right = factors("random", 33, 200, 50)
    wanted, least = torch.arange(0, 10_000, 3), torch.full((200,), 12.0)
    expected = all_of(left, right, form, least, wanted)
    torch.set_default_dtype(torch.float64)
    try:
        found = all_of(left, right, form, least.double(), wanted)
    finally:
        torch.set_default_dtype(torch.float32)
    assert expected.indices.numel()
    assert found.indices.sort().values.equal(expected.indices.sort().values)
    assert found.taken.equal(expected.taken)
    assert found.left_sum.equal(expected.left_sum)
