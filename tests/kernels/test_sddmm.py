"""Single entries of a product: all forms give the dot products."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import KINDS, SIZES, exact, factors, seeded, triton_kernels

from sparsify.core import gradients
from sparsify.kernels.sddmm import plain_sddmm, sampling_pays


@pytest.fixture(params=["plain", "triton"], scope="module")
def form(request, device):
    return plain_sddmm if request.param == "plain" else triton_kernels(device).sddmm


@settings(max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)), tokens=SIZES | st.sampled_from([255, 257]), rows=SIZES, cols=SIZES,
    number=st.sampled_from([1, 15, 16, 17, 63, 64, 65, 100]), strided=st.booleans(), seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_the_entries_are_those_of_the_product(form, kind, tokens, rows, cols, number, strided, seed, dtype):
    if dtype == torch.float16 or form is not plain_sddmm:  # which has no large numbers, and may round denormals
        kind = "random"
    left, right = factors(kind, tokens, rows, cols, dtype, seed)
    indices = torch.randint(rows * cols, (number,), generator=seeded(seed))  # some of which may repeat
    expected = exact(left, right).take(indices)
    # the rounding of sums in float32, and of terms that are too small for it
    off = (left.double().abs().t() @ right.double().abs()) * tokens * 2**-23 + tokens * 2**-126
    if strided:
        left, right = left.t().contiguous().t(), right.repeat_interleave(2, 1)[:, ::2]
        indices = indices.repeat_interleave(2)[::2]
    taken = form(left, right, indices)
    assert taken.dtype == torch.float32
    assert ((taken.double() - expected).abs() <= off.take(indices)).all()


@pytest.mark.parametrize(("tokens", "number"), [(0, 3), (3, 0)])
def test_without_tokens_all_entries_are_zero_and_there_may_be_none(tokens, number):
    left, right = factors("random", tokens, 4, 5)
    assert plain_sddmm(left, right, torch.arange(number)).tolist() == [0] * number


@pytest.mark.parametrize("tokens", [700, 1024])
def test_factors_too_large_for_a_gpus_cache_are_gone_through_in_slices_with_the_same_sums(form, tokens, monkeypatch):
    left, right = factors("random", tokens, 5, 40, torch.bfloat16)
    whole = form(left, right, indices := torch.arange(0, 200, 6))
    monkeypatch.setattr("sparsify.kernels.triton.AT_ONCE", 512 * 90)  # bytes, of 512 tokens
    # a GPU adds the numbers of a slice of another length in another order
    torch.testing.assert_close(form(left, right, indices), whole, rtol=1e-6, atol=1e-5 if left.is_cuda else 0)


class Launches:
    """A kernel that notes the bytes of the factors in each of its launches."""

    def __init__(self, kernel):
        self.kernel, self.sizes = kernel, []

    def __getitem__(self, grid):
        def launch(left, right, *rest):
            self.sizes.append(left.nbytes + right.nbytes)
            return self.kernel[grid](left, right, *rest)

        return launch


def test_no_launch_takes_more_of_the_factors_than_the_limit(device, monkeypatch):
    triton, (left, right) = triton_kernels(device), factors("random", 700, 5, 40, torch.bfloat16)
    launches = Launches(triton._sddmm)
    monkeypatch.setattr(triton, "_sddmm", launches)
    monkeypatch.setattr(triton, "AT_ONCE", limit := 90 * 300)  # bytes, of 300 tokens: one share of 256
    sums = triton.sddmm(left, right, indices := torch.arange(0, 200, 6))
    assert sum(launches.sizes) == left.nbytes + right.nbytes
    assert max(launches.sizes) <= limit
    torch.testing.assert_close(sums.double(), exact(left, right).take(indices), rtol=1e-5, atol=1e-4)


def test_a_warning_that_was_shown_once_is_not_shown_again(recwarn):
    warnings.simplefilter("default")
    for _ in range(2):
        warnings.warn("of a user's loop", stacklevel=1)
        plain_sddmm(*factors("random", 4, 3, 2), torch.arange(3))
    assert [str(each.message) for each in recwarn] == ["of a user's loop"]


@pytest.mark.parametrize("number", [1, 40])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_own_entries(form, number, bad):
    left, right = factors("random", 40, 3, 3)
    left[39, 2] = bad
    taken = form(left, right, torch.tensor([6] * number + [0] * number))
    assert not taken[:number].isfinite().any()
    assert taken[number:].isfinite().all()


@pytest.mark.parametrize("number", [0, 2, 40])
def test_a_weights_gradient_on_a_gpu_is_read_entry_by_entry_where_few_are_wanted(number, monkeypatch):
    monkeypatch.setattr("sparsify.core.devices.AHEAD", ("cpu",))
    monkeypatch.setattr("sparsify.kernels.sddmm.MOVED", {True: (1, 1)})  # so that 40 dot products take longer than 200
    left, right = factors("random", 30, 10, 20, torch.bfloat16)
    indices = torch.arange(number) * 5
    entries = gradients.Product(left, right).take(indices)
    assert entries.dtype == (torch.float32 if number < 40 else torch.bfloat16)  # else the whole product's
    torch.testing.assert_close(entries.double(), exact(left, right).take(indices), rtol=1e-2, atol=0.1)


def test_torchs_newer_switch_for_tf32_is_read_which_the_older_getters_refuse(monkeypatch):
    monkeypatch.setattr("sparsify.core.devices.AHEAD", ("cpu",))
    monkeypatch.setattr("sparsify.kernels.sddmm.MOVED", {True: (0, 0), False: (1_000, 1_000)})
    left, right = factors("random", 30, 10, 20)
    assert not sampling_pays(left, right, 1)
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    assert sampling_pays(left, right, 1)
