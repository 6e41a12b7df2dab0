"""The rule that chooses the way to a product's entries: by shapes and dtype alone."""

import pytest
import torch

from sparsify.kernels.costs import costs_of


def of(rows, cols, tokens=1024, dtype=torch.float32):
    return costs_of(torch.empty(tokens, rows, dtype=dtype), torch.empty(tokens, cols, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_layers_are_screened_and_sampled_and_never_for_all_entries(dtype):
    found = of(3072, 768, dtype=dtype)
    assert found.prefers_sampling(3072 * 768 // 200)
    assert not found.prefers_sampling(3072 * 768 // 20)
    assert 0.2 * 3072 * 768 < found.screening_limit() < 3072 * 768
