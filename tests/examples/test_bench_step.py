"""``examples/benchmarks/step.py``: turns and ratios to other methods; its options are in test_bench_scripts.py."""

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import step
import typer
from step_bench import run
from step_bench.report import make_table
from step_bench.run import Measurement, measure, run_worker
from step_bench.settings import Settings
from step_bench.worker import FILL
from typer.testing import CliRunner

from sparsify import SparsifyError

PNG = b"\x89PNG"
FAILURES = {"id3": "its process ended", "full": "out of memory"}


def measured(method, seconds=1.0, peak=2**30, **settings):
    times = [0.5], [0.75 * seconds] * 3, [0.25 * seconds] * 3
    return Measurement(Settings(method, **settings), 10**6, 10, 5, *times, 2**28, peak, peak)


def invoke(*arguments):
    app = typer.Typer()
    app.command()(step.main)
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_method_that_fails_has_a_row_that_says_so_and_no_further_turn(monkeypatch):
    turns = []

    def fake(settings, task, limits):
        turns.append((settings.method, task))
        if settings.method in FAILURES:
            raise SparsifyError(FAILURES[settings.method])
        return json.dumps({"peak_bytes": 3, "initialisations": [1], "updates": [1], "forward_backward": [1]})

    monkeypatch.setattr(run, "run_worker", fake)
    methods = [Settings(name, device="cuda") for name in ("id3", "dense-id3", "full", "floor")]
    results = measure(methods, rounds=2, steps=1, progress=lambda text: None)
    assert turns == [("id3", FILL), ("full", "1"), ("floor", "1"), ("floor", "1")]
    assert results[-1].held_bytes == 3, "a GPU's memory takes no turn of its own"
    assert results[-1].updates == [1, 1], "of both rounds"
    assert [one.failed for one in results] == [FAILURES[name] for name in ("id3", "id3", "full")] + [""]
    first, second = (list(column.cells) for column in make_table(results).columns[:2])
    assert first == [one.method for one in methods]
    assert second == ["failed", "failed", "out of memory", "-"]


@pytest.mark.parametrize(("why", "is_error"), [("out of memory", False), ("any other", True)])
def test_what_is_not_measured_is_an_error_at_the_end_unless_memory_ran_out(why, is_error, monkeypatch, tmp_path):
    def fake(methods, *_):
        return [measured("id3"), replace(measured("full"), updates=[], failed=why)]

    monkeypatch.setattr(step, "measure", fake)
    arguments = ["--shapes", "tiny", "--plot", str(tmp_path / "picture"), "--json", str(tmp_path / "raw.json")]
    with pytest.raises(SparsifyError, match=f"full: {why}") if is_error else nullcontext():
        invoke(*arguments)
    assert [row["failed"] for row in json.loads((tmp_path / "raw.json").read_text())["results"]] == ["", why]
    assert (tmp_path / "picture").read_bytes()[:4] == PNG


@pytest.mark.slow
def test_the_command_measures_each_step_of_each_method(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out, picture = tmp_path / "raw.json", tmp_path / "bars.png"
    invoke(
        "--shape", "tiny", "--methods", "full,id3", "--budget", "400", "--batch", "1", "--seq", "8", "--rounds", "1",
        "--steps", "2", "--json", str(out), "--plot", str(picture),
    )  # fmt: skip
    assert picture.read_bytes()[:4] == PNG
    rows = {row["settings"]["method"]: row for row in json.loads(out.read_text())["results"]}
    for row in rows.values():
        assert len(row["forward_backward"]) == len(row["updates"]) == 2
        assert min(row["forward_backward"]) > 0
        assert min(row["library_bytes"], row["held_bytes"]) > 2**20
    assert (rows["full"]["trained"], rows["full"]["unmasked"]) == (rows["full"]["parameters"], 0)
    assert (rows["id3"]["trained"], rows["id3"]["unmasked"], len(rows["id3"]["sparse"])) == (400, 200, 2)


def test_every_budget_of_every_shape_is_measured(monkeypatch):
    def fake(methods, *_):
        asked.extend((one.shape, one.layers, one.budget, one.method) for one in methods)
        return [replace(measured("id3"), settings=one) for one in methods]

    asked = []
    monkeypatch.setattr(step, "measure", fake)
    invoke("--shapes", "tiny,bert-base", "--layers", "1,2", "--budgets", "10,1_000", "--methods", "id3,full")
    assert asked == [*product(("tiny", "bert-base"), (1, 2), (10, 1_000), ("id3", "full"))]


def test_a_workers_error_is_raised_by_the_parent():
    with pytest.raises(SparsifyError, match=r"'id3' ended with exit code 1: .* expected 1 to 50,690, .*--methods"):
        run_worker(Settings("id3", "tiny", budget=60_000), FILL, {})


def test_ratios_are_to_full_and_floor_by_name_and_not_to_the_first():
    results = [measured("id3", 1.0, 2**28), measured("full", 2.0, 2**30), measured("floor", 0.5, 2**27)]
    results[0].sparse += [0.5, 0.25, 0.125]
    rows = list(zip(*(column.cells for column in make_table(results).columns), strict=True))
    expected = "id3 10 5 256 0.25 2.00 256 0.50 0.250 0.250 1.000 0.50 2.00"
    assert " ".join(rows[0]) == expected
    assert rows[1][4:6] == ("1.00", "8.00")
    assert rows[1][8] == "-"
    assert not any("floor" in column.header for column in make_table(results[:2]).columns)
