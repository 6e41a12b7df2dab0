"""The rule that chooses the path to a product's entries: by shapes, dtype, threads and matrix units alone."""

import pytest
import torch

from sparsify.kernels import costs
from sparsify.kernels.costs import Costs, costs_of
from sparsify.kernels.norm_bound import Limits

SOME = Costs(dense=1.0, norms=0.5, tile=0.002, base=0.2, entry=0.001)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Makes a machine of so many threads, with compiled loops and matrix units or without."""

    def make(threads=2, compiled=True, units=False):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr(costs, "library", lambda: True if compiled else None)
        monkeypatch.setattr(costs, "has_matrix_units", lambda: units)

    make()
    return make


def of(rows, cols, tokens=1024, dtype=torch.float32):
    return costs_of(torch.empty(tokens, rows, dtype=dtype), torch.empty(tokens, cols, dtype=dtype))


def test_sampling_and_screening_may_cost_what_the_dense_product_costs():
    assert SOME.samples(800)
    assert not SOME.samples(801)
    assert SOME.limits() == Limits(candidates=250, multiplied=250)  # (1 - 0.5) / (2 x 0.001), / 0.002
    assert SOME.limits(200) == Limits(150, 150)
    assert SOME.limits(500) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("compiled", "units"), [(True, False), (True, True), (False, False)])
def test_large_layers_are_screened_and_sampled_and_never_for_all_entries(machine, dtype, compiled, units):
    machine(compiled=compiled, units=units)
    found = of(3072, 768, dtype=dtype)
    assert found.samples(3072 * 768 // 100)
    assert not found.samples(3072 * 768 // 5)
    assert 0.3 * 3072 * 768 < found.limits().multiplied < 2 * 3072 * 768
    assert found.limits().candidates < 3072 * 768


def test_small_layers_are_dense_and_what_has_no_loops_is_not_screened():
    assert of(16, 16).limits() is None
    assert of(64, 64, dtype=torch.bfloat16).limits() is None
    assert not of(16, 16).samples(1)
    assert of(8, 8, tokens=0).dense == 64, "an empty product has costs too"
    assert of(3072, 768, dtype=torch.float64).limits() is None
    assert of(3072, 768, dtype=torch.float64).samples(1000)


def test_threads_that_have_no_tokens_to_read_make_the_passes_over_the_factors_dearer(machine):
    few, many = of(768, 768, tokens=128), of(768, 768)
    assert few == many
    machine(threads=16)
    assert of(768, 768) == many
    assert of(768, 768, tokens=128) == few._replace(norms=4 * few.norms, base=4 * few.base, entry=4 * few.entry)
