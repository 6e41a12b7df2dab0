"""The benchmark measures every method in a process of its own and reports ratios to the first."""

import json

import pytest

from sparsify.bench.command import make_table
from sparsify.bench.run import Measurement, measure, to_json
from sparsify.bench.worker import METHODS, SHAPES, Settings


@pytest.fixture
def tiny(monkeypatch):
    """Settings of a measurement that takes seconds."""
    return {"shape": "minilm", "budget": 2_000, "batch": 1, "length": 8, "threads": 1}


def test_each_method_is_measured_in_every_round(tiny):
    seen = []
    results = measure([Settings("full", **tiny), Settings("id3", **tiny)], rounds=2, steps=2, progress=seen.append)
    assert [len(result.seconds) for result in results] == [4, 4]
    assert seen[2:] == ["round 1 of 2: full", "round 1 of 2: id3", "round 2 of 2: full", "round 2 of 2: id3"]
    assert all(result.step_seconds > 0 for result in results)
    assert all(min(result.peak_bytes, result.library_bytes) > 2**20 for result in results)
    assert results[1].unmasked == pytest.approx(1_000, rel=0.02), "filled to half the budget"
    assert {row["settings"]["method"] for row in json.loads(to_json(results))["results"]} == {"full", "id3"}


@pytest.mark.slow
def test_the_other_methods_run(tiny):
    others = [method for method in METHODS if method not in ("full", "id3")]
    results = measure([Settings(method, **tiny) for method in others], rounds=1, steps=1)
    assert [result.settings.method for result in results] == others


def test_the_table_has_the_ratios_to_the_first_row():
    rows = [
        Measurement(Settings("full"), seconds=[2.0], peak_bytes=2**30),
        Measurement(Settings("id3"), seconds=[1.0], peak_bytes=2**28),
    ]
    table = make_table(rows)
    assert [list(column.cells) for column in table.columns if column.header.strip() == "ratio"] == [
        ["1.00", "0.50"], ["1.00", "0.25"],
    ]  # fmt: skip


def test_the_shapes_are_those_of_the_published_models():
    assert SHAPES["bert-base"]["hidden_size"] == 768
    assert SHAPES["minilm"]["num_hidden_layers"] == 6
