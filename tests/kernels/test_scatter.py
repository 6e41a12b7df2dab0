"""Values into many weights at once: bit for bit what writing to one after the other gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import seeded, triton_kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(scope="module")
def form(device):
    return triton_kernels(device).scatter


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 9)), min_size=1, max_size=5), st.integers(0, 99))
def test_every_weight_holds_its_own_values_and_nothing_else_moved(form, kinds, seed):
    generator = seeded(seed)
    weights = [torch.randn(3, 4, generator=generator).to(dtype) for dtype, _ in kinds]
    counts = [count for _, count in kinds]
    indices = torch.cat([torch.randperm(12, generator=generator)[:count] for count in counts])
    values = torch.randn(sum(counts), generator=generator, dtype=torch.float64)
    expected = [weight.clone() for weight in weights]
    for weight, own, new in zip(expected, indices.split(counts), values.split(counts), strict=True):
        for index, value in zip(own.tolist(), new, strict=True):
            weight.view(-1)[index] = value.to(weight.dtype)
    offsets = [*range(0, 12 * len(counts), 12)]
    form(weights, offsets, counts, indices + torch.tensor(offsets).repeat_interleave(torch.tensor(counts)), values)
    assert all(torch.equal(weight, other) for weight, other in zip(weights, expected, strict=True))


def test_more_values_than_a_block_has_and_numbers_that_are_not_finite(form):
    weight, values = torch.zeros(50, 60), torch.randn(2500)
    values[[0, 2499]] = torch.tensor([torch.nan, -torch.inf])
    indices = torch.randperm(3000)[:2500]
    form([weight], [10**12], [2500], indices + 10**12, values)
    assert torch.equal(weight.view(-1)[indices].view(torch.int32), values.view(torch.int32))
    assert weight.count_nonzero() == 2500


def test_autograd_notices_that_a_weight_was_written_to(form):
    weights = [torch.ones(2, 2, requires_grad=True), torch.ones(3, requires_grad=True)]
    written, other = (weight.square().sum() for weight in weights)
    form(weights, [0, 4], [1, 0], torch.tensor([3]), torch.tensor([5.0]))
    other.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        written.backward()
