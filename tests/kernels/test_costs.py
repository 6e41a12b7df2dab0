"""The rule that chooses the way to a product's entries: by shapes and dtype alone."""

import pytest
import torch

from sparsify.kernels.costs import Costs, costs_of

SOME = Costs(dense=1.0, entry=0.001, base=0.2, norms=0.5, tile=0.002)


def of(rows, cols, tokens=1024, dtype=torch.float32):
    return costs_of(torch.empty(tokens, rows, dtype=dtype), torch.empty(tokens, cols, dtype=dtype))


def test_sampling_and_screening_may_cost_what_the_dense_product_costs():
    assert SOME.prefers_sampling(800)
    assert not SOME.prefers_sampling(801)
    assert (SOME.screening_limit(), SOME.screening_limit(200), SOME.screening_limit(500)) == (250, 150, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_layers_are_screened_and_sampled_and_never_for_all_entries(dtype):
    found = of(3072, 768, dtype=dtype)
    assert found.prefers_sampling(3072 * 768 // 200)
    assert not found.prefers_sampling(3072 * 768 // 20)
    assert 0.2 * 3072 * 768 < found.screening_limit() < 3072 * 768


def test_small_layers_are_dense_and_other_types_are_not_screened():
    assert of(16, 16).screening_limit() == 0
    assert not of(8, 8).prefers_sampling(1)
    assert of(8, 8, tokens=0).dense == 64, "an empty product has costs too"
    assert of(3072, 768, dtype=torch.float64).screening_limit() == 0
    assert of(3072, 768, dtype=torch.float64).prefers_sampling(1000)
