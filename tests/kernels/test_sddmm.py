"""Single entries of a product: the Triton form sums what the plain one sums, and both are the product's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsify.kernels.sddmm import plain_sddmm, sddmm
from sparsify.masked import gradients

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", params=["plain", "triton"])
def form(request):
    if request.param == "plain":
        return plain_sddmm
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    from sparsify.kernels.triton import sddmm as triton_sddmm

    return triton_sddmm.sddmm


def factors(tokens, rows, cols, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, size, generator=generator).to(dtype) for size in (rows, cols))


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([1, 15, 16, 17, 255, 257, 600]), st.integers(1, 5), st.integers(1, 40),
    st.sampled_from([1, 63, 64, 65]), st.sampled_from(DTYPES), st.integers(0, 99),
)  # fmt: skip
def test_entries_are_those_of_the_product_summed_in_float32(form, tokens, rows, cols, number, dtype, seed):
    left, right = factors(tokens, rows, cols, dtype, seed)
    indices = torch.randint(rows * cols, (number,), generator=torch.Generator().manual_seed(seed))
    entries = form(left, right, indices)
    assert entries.dtype == torch.float32
    product = left.double().t() @ right.double()
    torch.testing.assert_close(entries.double(), product.take(indices), rtol=0, atol=1e-4)


def test_factors_that_are_transposed_are_read_as_they_are(form):
    left, right = factors(30, 4, 6, torch.float32)
    indices = torch.arange(24)
    turned = left.t().contiguous().t(), right.t().contiguous().t()
    assert torch.equal(form(*turned, indices), form(left, right, indices))


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_factor_that_is_not_finite_is_seen_where_it_counts(form, bad):
    left, right = factors(20, 3, 4, torch.float32)
    left[19, 1] = bad
    assert form(left, right, torch.arange(12)).isfinite().tolist() == [True] * 4 + [False] * 4 + [True] * 4


def test_no_entry_or_no_token_is_an_empty_sum():
    left, right = factors(5, 3, 4, torch.float32)
    assert sddmm(left, right, torch.empty(0, dtype=torch.int64)).shape == (0,)
    assert sddmm(left[:0], right[:0], torch.tensor([1, 5])).tolist() == [0.0, 0.0]


def test_float64_stays_in_float64():
    left, right = factors(50, 3, 4, torch.float64)
    torch.testing.assert_close(sddmm(left, right, torch.arange(12)), (left.t() @ right).flatten(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("number", [0, 2, 40])
def test_a_weights_gradient_on_a_gpu_is_read_entry_by_entry_where_few_are_wanted(number, monkeypatch):
    monkeypatch.setattr("sparsify.common.devices.AHEAD", ("cpu",))
    monkeypatch.setattr(gradients, "GPU_DOT_COST", 10)
    left, right = factors(30, 10, 20, torch.bfloat16)
    indices = torch.arange(number) * 5
    entries = gradients.Product(left, right).take(indices)
    assert entries.dtype == (torch.float32 if number * 10 < 200 else torch.bfloat16)  # else the whole product's
    torch.testing.assert_close(
        entries.double(), (left.double().t() @ right.double()).take(indices), rtol=1e-2, atol=0.1
    )
