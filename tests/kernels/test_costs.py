"""Which way to a product's entries is taken, and what is measured for that, when, and how often."""

import json
import math

import pytest
import torch

from sparsify import SparsifyError
from sparsify.kernels import costs
from sparsify.kernels.costs import Costs, costs_of, fixed
from sparsify.kernels.norm_bound import Room, survey
from sparsify.masked import gradients as products
from sparsify.masked.gradients import DenseGradient, Product

SOME = Costs(product=1.0, whole=1.1, norms=0.5, tile=0.002, base=0.2, entry=0.001)
KIND = "float32 8x256x256"
TOKENS, SIZE = 5, 256  # the smallest product that is measured
WRONG = ["1", math.nan, 0.0, -1.0, 5e-324, math.inf]  # as the last number of a kind's costs
DAMAGES = ["", "{", "[]", "null", "\udc80", '{"KIND": 1.0}', '{"KIND": [1.0]}']
DAMAGES += [json.dumps({"KIND": [*SOME[:-1], number]}) for number in WRONG]


@pytest.fixture(autouse=True)
def measured(monkeypatch, tmp_path):
    """A machine that nothing is known about yet, and the products that are measured on it: ``(n, rows, cols)``."""
    monkeypatch.setattr(costs, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.delenv("SPARSIFY_COSTS")
    met = []

    def measure(dtype, n, rows, cols):
        met.append((n, rows, cols))
        return SOME

    monkeypatch.setattr(costs, "_measure", measure)
    forget()
    yield met
    forget()


def forget():
    """As a new process begins."""
    costs._measured.cache_clear()


def factors(tokens=TOKENS, size=SIZE, dtype=torch.float32):
    return torch.ones(tokens, size, dtype=dtype), torch.ones(tokens, size, dtype=dtype)


def the_file(tmp_path):
    (path,) = tmp_path.rglob("costs-*.json")
    return path


def test_entries_are_sampled_as_long_as_that_is_faster():
    assert SOME.samples(800)
    assert not SOME.samples(801)


def test_a_survey_leaves_room_for_what_the_product_would_cost_beyond_it():
    assert SOME.room() == Room(candidates=300, multiplied=300)  # (1.1 - 0.5) / (2 x 0.001), / 0.002
    assert SOME.room(200) == Room(200, 200)
    assert SOME.room(1000) is None
    assert SOME._replace(norms=1.1).room() is None
    assert SOME._replace(norms=math.inf, tile=math.inf).room() is None


@pytest.mark.parametrize("sampled", [True, False])
def test_a_product_is_sampled_or_multiplied_out_by_its_costs(monkeypatch, sampled):
    monkeypatch.setattr(products, "costs_of", lambda *_: SOME._replace(base=0.0 if sampled else 2.0))
    whole = []
    monkeypatch.setattr(Product, "dense", lambda self: whole.append(True) or DenseGradient(torch.ones(SIZE, SIZE)))
    Product(*factors()).take(torch.tensor([3]))
    assert bool(whole) is not sampled


def test_a_kind_is_measured_once(measured):
    assert costs_of(*factors()) == SOME
    costs_of(*factors())
    costs_of(*factors(tokens=8))  # 5 and 8 tokens are one kind
    assert measured == [(8, SIZE, SIZE)]
    costs_of(*factors(tokens=9))
    costs_of(*factors(dtype=torch.bfloat16))
    assert measured[1:] == [(16, SIZE, SIZE), (8, SIZE, SIZE)]


def test_the_next_process_decides_by_what_the_first_measured(measured):
    first = costs_of(*factors())
    costs_of(*factors(tokens=9))
    forget()
    assert costs_of(*factors()) == first
    assert len(measured) == 2


def test_costs_that_another_process_wrote_meanwhile_hold(monkeypatch, tmp_path):
    costs_of(*factors())
    threads = torch.get_num_threads()
    others = SOME._replace(base=0.3)
    forget()
    path = the_file(tmp_path)
    path.unlink()

    def measure(*_):
        path.write_text(json.dumps({f"{KIND} {threads} threads": others}))
        return SOME

    monkeypatch.setattr(costs, "_measure", measure)
    assert costs_of(*factors()) == others


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_measured_anew(measured, tmp_path, damage):
    costs_of(*factors())
    path, kind = the_file(tmp_path), f"{KIND} {torch.get_num_threads()} threads"
    assert kind in path.read_text()
    path.write_bytes(damage.replace("KIND", kind).encode(errors="surrogateescape"))
    forget()
    assert costs_of(*factors()) == SOME
    assert len(measured) == 2
    forget()
    costs_of(*factors())
    assert len(measured) == 2, "it was written anew"


def test_where_nothing_can_be_written_costs_stay_in_memory(monkeypatch, measured, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    monkeypatch.setattr(costs, "cache_folder", lambda: blocked / "cache")
    assert costs_of(*factors()) == costs_of(*factors()) == SOME
    assert len(measured) == 1
    assert list(tmp_path.iterdir()) == [blocked]


def test_small_and_empty_products_are_never_measured(measured):
    assert costs_of(*factors(size=SIZE - 1)) == fixed(torch.float32, (SIZE - 1) ** 2)
    costs_of(*factors(tokens=0))
    assert not measured


def test_where_results_are_to_be_reproducible_nothing_is_measured(measured):
    torch.use_deterministic_algorithms(True)
    try:
        assert costs_of(*factors()) == fixed(torch.float32, SIZE**2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not measured


def test_several_ranks_decide_by_constants(monkeypatch, measured):
    monkeypatch.setattr(costs, "num_ranks", lambda: 2)
    assert costs_of(*factors()) == fixed(torch.float32, SIZE**2)
    assert not measured


def test_the_environment_overrides(monkeypatch, measured):
    monkeypatch.setenv("SPARSIFY_COSTS", "fixed")
    assert costs_of(*factors()) == fixed(torch.float32, SIZE**2)
    monkeypatch.setenv("SPARSIFY_COSTS", "measured")
    monkeypatch.setattr(costs, "num_ranks", lambda: 2)
    assert costs_of(*factors()) == SOME
    monkeypatch.setenv("SPARSIFY_COSTS", "fast")
    with pytest.raises(SparsifyError, match="SPARSIFY_COSTS='fast'; expected 'fixed' or 'measured'"):
        costs_of(*factors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_measured_is_of_the_right_size(monkeypatch, dtype):
    monkeypatch.undo()
    monkeypatch.setattr(costs, "WORK_MEASURED", 1 << 20)
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        found = costs._measure(dtype, 2048, 512, 256)
    assert torch.equal(torch.get_rng_state(), state), "a user's random numbers stay what they were"
    assert found.samples(0)
    assert not found.samples(512 * 256), "never all entries one by one"
    assert all(number > 0 for number in found)
    assert (found.norms == found.tile == math.inf) is (dtype == torch.float64)
    assert (found.room() is None) or found.room().candidates < 512 * 256


@pytest.mark.parametrize("tokens", [32, 64, 250])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_is_multiplied_and_nothing_found_where_the_tiles_are_timed(dtype, tokens):
    torch.manual_seed(0)
    left, right = costs._cancelling(torch.randn(tokens, 96).to(dtype), torch.randn(tokens, 64).to(dtype))
    nothing = torch.empty(0, dtype=torch.int64)
    found = survey(left, right, nothing, nothing, torch.full((96,), tokens / 4), Room(96 * 64, 1 << 20))
    assert found.multiplied == 96 * 64
    assert found.indices.numel() == 0
