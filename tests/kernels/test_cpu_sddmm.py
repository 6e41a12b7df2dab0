"""Single entries of a product: both forms, and both ways of the compiled one, are the dot products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import KINDS, SIZES, exact, factors

from sparsify.kernels.cpu.library import library
from sparsify.kernels.sddmm import plain_sddmm, sddmm


@pytest.fixture(params=["compiled", "plain"], scope="module")
def form(request):
    """Both forms; the compiled one where the machine has it."""
    if request.param == "compiled" and library() is None:
        pytest.skip("needs a compiler")
    return sddmm if request.param == "compiled" else plain_sddmm


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)), tokens=SIZES, rows=SIZES, cols=SIZES, seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), number=st.sampled_from([0, 1, 15, 16, 17, 100]),
)  # fmt: skip
def test_the_entries_are_those_of_the_product(form, kind, tokens, rows, cols, seed, dtype, number):
    left, right = factors(kind, tokens, rows, cols, dtype, seed)
    indices = torch.randint(rows * cols, (number,), generator=torch.Generator().manual_seed(seed))
    taken = form(left, right, indices)
    assert taken.dtype == torch.float32
    # the rounding of sums in float32, and of terms that are too small for it
    off = (left.double().abs().t() @ right.double().abs()) * tokens * 2**-23 + tokens * 2**-126
    error = (taken.double() - exact(left, right).view(-1)[indices]).abs()
    assert (error <= off.view(-1)[indices]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_entries_are_the_same_as_many(form, dtype):
    left, right = factors("random", 77, 30, 40, dtype)
    indices = torch.randperm(1200, generator=torch.Generator().manual_seed(0))
    many = form(left, right, indices)
    few = torch.cat([form(left, right, some) for some in indices.split(16)])
    torch.testing.assert_close(few, many, rtol=1e-5, atol=1e-5)


def test_entries_may_repeat_in_any_order_and_factors_be_strided(form):
    left, right = factors("random", 40, 30, 20)
    indices = torch.tensor([599, 0, 0, 7, 599] * 5)
    expected = exact(left, right).view(-1)[indices].float()
    taken = form(left.t().contiguous().t(), right.repeat_interleave(2, 1)[:, ::2], indices.repeat_interleave(2)[::2])
    torch.testing.assert_close(taken, expected, rtol=1e-5, atol=1e-5)


def test_no_tokens_make_zeros(form):
    for number in (3, 30):
        indices = torch.zeros(number, dtype=torch.int64)
        assert form(torch.empty(0, 2), torch.empty(0, 3), indices).tolist() == [0] * number


@pytest.mark.parametrize("number", [1, 40])
def test_what_is_not_finite_stays_in_its_own_entries(form, number):
    left, right = factors("random", 40, 3, 3)
    left[39, 2] = torch.inf
    taken = form(left, right, torch.tensor([6] * number + [0] * number))
    assert not taken[:number].isfinite().any()
    assert taken[number:].isfinite().all()


@pytest.mark.parametrize("number", [5, 200])
def test_the_same_bits_come_twice_from_any_number_of_threads(form, number):
    left, right = factors("random", 300, 40, 30)
    indices = torch.randint(1200, (number,), generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(form(left, right, indices), form(left, right, indices))
    finally:
        torch.set_num_threads(before)


def test_float64_keeps_its_precision():
    left, right = (factor.double() for factor in factors("random", 50, 4, 4))
    taken = sddmm(left, right, torch.arange(16))
    torch.testing.assert_close(taken, exact(left, right).view(-1), rtol=1e-14, atol=1e-14)
