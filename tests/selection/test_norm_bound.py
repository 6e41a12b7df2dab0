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


@settings(max_examples=100)
@given(
    kind=st.sampled_from(sorted(KINDS)), tokens=st.one_of(SIZES, st.integers(129, 700)), rows=SIZES, cols=SIZES,
    seed=st.integers(0, 999), dtype=st.sampled_from(DTYPES), share=st.sampled_from([0.0, 0.5, 0.9, 0.999, 1.0]),
)  # fmt: skip
def test_no_entry_is_missed(kind, tokens, rows, cols, seed, dtype, share):
    left, right = factors(kind, tokens, rows, cols, dtype, seed)
    size = exact(left, right).abs()
    least = size.quantile(share, dim=1).float()  # which all but a share of each row's entries reach
    found = found_in(left, right, least)
    reached = (size >= least[:, None].double() * (1 + 1e-6)).view(-1).nonzero().squeeze(1)
    entries = torch.cat([(rows[:, None] * cols + columns).view(-1) for rows, columns in found] or [reached[:0]])
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
    assert (set(rows.tolist()), set(columns.tolist())) == ({0, 2}, {*range(140, 150)})


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
