"""The steps that are found hold every entry that reaches the threshold, whatever the factors are made of."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import KINDS, SIZES, exact, factors

from sparsify.selection.screening import screening_limit, size_of, staircase

ALL = 1 << 40  # entries that may be multiplied
DTYPES = [torch.float32, torch.bfloat16]


def found_in(left, right, least, most=ALL):
    return staircase(left, right, torch.as_tensor(least, dtype=torch.float32).expand(left.shape[1]), most)


def entries_of(steps, cols):
    nothing = torch.empty(0, dtype=torch.int64)
    return torch.cat([nothing, *((rows[:, None] * cols + columns).view(-1) for rows, columns in steps)])


@settings(max_examples=100)
@given(
    kind=st.sampled_from(sorted(KINDS)), tokens=st.one_of(SIZES, st.integers(129, 700)), rows=SIZES, cols=SIZES,
    seed=st.integers(0, 999), dtype=st.sampled_from(DTYPES), weighted=st.booleans(),
    share=st.sampled_from([0.0, 0.5, 0.9, 0.999, 1.0]),
)  # fmt: skip
def test_no_entry_is_missed(kind, tokens, rows, cols, seed, dtype, weighted, share):
    """Even where some tokens weigh more than others: then the product may overflow, and nothing is found."""
    left, right = factors(kind, tokens, rows, cols, dtype, seed)
    if weighted:
        weights = 10 ** torch.randn(tokens // 32 + 1, generator=torch.Generator().manual_seed(seed))
        left = left * weights.repeat_interleave(32)[:tokens, None].to(dtype)
    size = exact(left, right).abs()
    least = size.quantile(share, dim=1).float()  # which all but a share of each row's entries reach
    found = found_in(left, right, least)
    if weighted and found is None:
        return
    reached = (size >= least[:, None].double() * (1 + 1e-6)).view(-1).nonzero().squeeze(1)
    entries = entries_of(found, cols)
    assert torch.isin(reached, entries).all()
    assert entries.unique().numel() == entries.numel() == size_of(found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_norms_rule_out_is_not_found_and_factors_may_be_strided(dtype):
    left, right = factors("random", 64, 200, 150, dtype)
    left, right = left.t().contiguous().t(), right.repeat_interleave(2, 1)[:, ::2]
    left[:, 3:] *= 1e-3
    right[:, :140] *= 1e-3
    least = torch.full((200,), 1.0).index_fill(0, torch.tensor([1]), torch.inf)
    ((rows, columns),) = found_in(left, right, least)
    assert sorted(rows.tolist()) == [0, 2]
    assert sorted(columns.tolist()) == list(range(140, 150))


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan, 3e38])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_none(number, dtype, side):
    parts = factors("random", 33, 20, 50, dtype)
    parts[side][32, 19] = number
    assert found_in(*parts, torch.inf) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_that_overflows_is_none(dtype):
    """Every factor is finite, the product is not, and partial sums of both signs would make a NaN."""
    left, right = torch.full((64, 20), 1e18, dtype=dtype), torch.full((64, 20), 1e21, dtype=dtype)
    right[32:] *= -1
    assert found_in(left, right, 1.0) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_layers_are_screened_and_small_ones_and_other_types_are_not(dtype):
    def limit(rows, cols, sampled=0, dtype=dtype):
        return screening_limit(torch.empty(8, rows, dtype=dtype), torch.empty(8, cols, dtype=dtype), sampled)

    assert 0.2 * 3072 * 768 < limit(3072, 768, 200) < limit(3072, 768) < 3072 * 768
    assert limit(16, 16) == limit(3072, 768, 3072 * 768 // 60) == limit(3072, 768, dtype=torch.float64) == 0
