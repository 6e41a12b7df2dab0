"""``sparsify bench``: options are checked first, methods take turns, and the report has ratios."""

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sparsify.bench import run, worker
from sparsify.bench.command import TABLE_WIDTH
from sparsify.bench.methods import METHODS
from sparsify.bench.report import headline, make_table, plot
from sparsify.bench.run import GIVE_BACK, Measurement, Process, measure
from sparsify.bench.settings import Settings
from sparsify.cli import make_app
from sparsify.errors import SparsifyError

TINY = {"shape": "tiny", "budget": 400, "batch": 1, "length": 8, "threads": 1}
PNG = b"\x89PNG"


def measured(method, seconds=1.0, peak=2**30, **settings):
    times = [0.5], [0.75 * seconds] * 3, [0.25 * seconds] * 3
    return Measurement(Settings(method, **settings), 10**6, 10, 5, *times, 2**28, peak, peak)


def invoke(*arguments):
    return CliRunner().invoke(make_app(), ["bench", *arguments], catch_exceptions=False)


@pytest.fixture
def points(monkeypatch):
    """Makes the command measure nothing; gives the settings of each point."""
    seen = []

    def fake(points, rounds, steps, progress, one_at_a_time):
        seen.extend(points)
        return [replace(measured("id3"), settings=one) for point in points for one in point]

    monkeypatch.setattr("sparsify.bench.command.measure", fake)
    return seen


@pytest.fixture
def processes(monkeypatch):
    """Replaces worker processes; gives the environment of each as it starts."""
    started = []

    class Fake(Process):
        def __init__(self, module_or_file, environment):
            started.append(environment)
            self.number = len(started)

        def __exit__(self, *_):
            pass

        def ask(self, line):
            ready = {"initialisation": 1.0, "library_bytes": 2**29}
            answer = {"seconds": [(1.0, 1.0)], "peak_bytes": 2**29 + self.number, "sparse": [0.5]}
            return ready if line.startswith("{") else answer

    monkeypatch.setattr(run, "Process", Fake)
    return started


@pytest.mark.parametrize(("heap", "limits"), [("keep", ["33554432", "1099511627776"]), ("system", [])])
def test_times_are_taken_where_the_heap_is_as_told_and_memory_where_it_is_given_back(processes, heap, limits):
    (result,) = measure([[Settings("full", heap=heap, **TINY)]], rounds=1, steps=1)
    assert processes[0] == GIVE_BACK
    assert list(processes[1].values()) == limits
    assert (result.held_bytes, result.peak_bytes, result.initialisations) == (2**29 + 1, 2**29 + 2, [1.0])


IN_TURN = ["static: preparing", "static", "lora: preparing", "lora"] * 2
START, ROUNDS, PROFILED = ["static: preparing", "lora: preparing"], ["static", "lora"] * 2, ["profiled"] * 4


@pytest.mark.parametrize(
    ("gigabytes", "alone", "order"),
    [  # of two points of two methods, each of which takes one gigabyte
        (16, False, START * 2 + ["static", "lora"] * 4 + PROFILED * 2),
        (6, False, (START + ROUNDS + PROFILED) * 2),
        (2, False, IN_TURN * 2),
        (6, True, IN_TURN * 2),
    ],
)
def test_methods_take_turns_and_live_together_where_memory_holds_them(processes, monkeypatch, gigabytes, alone, order):
    monkeypatch.setattr(run, "available_bytes", lambda settings: gigabytes * 2**30)
    seen = []
    points = [[Settings(name, **TINY | {"budget": budget}) for name in ("static", "lora")] for budget in (1, 2)]
    results = measure(points, rounds=2, steps=1, progress=seen.append, one_at_a_time=alone)
    assert seen[:4] == ["static: memory", "lora: memory"] * 2
    assert [text.rpartition(" of 2: ")[2] for text in seen[4:]] == order
    assert [len(one.sparse) for one in results] == [2, 0, 2, 0]
    assert all(len(one.updates) == 2 for one in results)


@pytest.mark.slow
def test_the_command_measures_every_method_in_every_round(tmp_path):
    out, picture = tmp_path / "raw.json", tmp_path / "bars.png"
    result = invoke(
        "--shape", "tiny", "--methods", ",".join(METHODS), "--budget", "400", "--batch", "1", "--seq", "8",
        "--rounds", "2", "--steps", "1", "--threads", "1", "--json", str(out), "--plot", str(picture),
    )  # fmt: skip
    assert all(method in result.output for method in METHODS)
    assert picture.read_bytes()[:4] == PNG
    rows = {row["settings"]["method"]: row for row in json.loads(out.read_text())["results"]}
    assert list(rows) == list(METHODS)
    for row in rows.values():
        assert len(row["forward_backward"]) == len(row["updates"]) == 2
        assert min(row["forward_backward"]) > 0
        assert min(row["library_bytes"], row["held_bytes"]) > 2**20
    assert (rows["full"]["trained"], rows["full"]["unmasked"]) == (rows["full"]["parameters"], 0)
    assert (rows["id3"]["trained"], rows["id3"]["unmasked"], len(rows["id3"]["sparse"])) == (400, 200, 2)


def test_every_budget_of_every_shape_is_measured(points, tmp_path):
    out = tmp_path / "raw.json"
    arguments = ["--shapes", "tiny,bert-base", "--layers", "1,2", "--budgets", "10,1_000", "--methods", "id3,full"]
    said = invoke(*arguments, "--json", str(out)).output
    assert [[one.method for one in point] for point in points] == [["id3", "full"]] * 8
    expected = [
        (shape, layers, budget) for shape in ("tiny", "bert-base") for layers in (1, 2) for budget in (10, 1000)
    ]
    assert [(point[0].shape, point[0].layers, point[0].budget) for point in points] == expected
    assert {one.ahead for point in points for one in point} == {22}
    assert len(json.loads(out.read_text())["results"]) == 16
    assert said.count("interleaved rounds") == 8


def test_a_shape_has_a_budget_of_its_own_where_none_is_given(points):
    invoke("--shapes", "tiny,bert-base", "--methods", "id3")
    assert [point[0].budget for point in points] == [1_000, 320_000]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "full,di3"), "unknown method 'di3'; expected one of floor, .*Did you mean 'id3'"),
        (("--shapes", "tiny,deberta"), "unknown shape 'deberta'; .*Did you mean 'deberta-v3-base'"),
        (("--device", "tpu"), "unknown device 'tpu'; expected one of cpu, cuda"),
        (("--device", "cuda:1"), "--device cuda:1: torch finds no GPU here"),
        (("--budget", "0.1"), "--budget '0.1'; expected whole numbers of at least 1"),
        (("--budget", "0"), "--budget '0'; expected whole numbers of at least 1"),
        (("--layers", "3,-1"), "--layers '3,-1'; expected whole numbers of at least 0"),
        (("--shapes", "tiny,minilm", "--layers", "3"), "--layers: 'minilm' has pretrained weights"),
        (("--rounds", "999"), "3998 steps to measure; a run has 1000: take fewer rounds"),
        (("--shape", "minilm", "--data", "nowhere"), "`nowhere` has no mrpc/train.jsonl"),
    ],
)
def test_bad_options_are_named_before_anything_starts(arguments, message, monkeypatch):
    monkeypatch.setattr("sparsify.bench.command.measure", lambda *_, **__: pytest.fail("it started"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SparsifyError, match=message):
        invoke(*arguments)
    assert invoke("--rounds", "0").exit_code == invoke("--dtype", "float31").exit_code == 2, "typer's own checks"


@pytest.mark.parametrize("mode", ["measure", worker.FILL])
def test_a_workers_error_is_raised_by_the_parent(mode, monkeypatch, capsys):
    settings = Settings("id3", "tiny", budget=60_000, fill=0.5 if mode == worker.FILL else 0.0, length=8)
    monkeypatch.setattr("sys.stdin", io.StringIO(settings.to_json() + "\n"))
    monkeypatch.setattr("sys.argv", ["worker", mode])
    with pytest.raises(SystemExit, match="1"):
        worker.main()
    parent = object.__new__(Process)
    parent._process = type("Popen", (), {"stdout": io.StringIO(capsys.readouterr().out)})
    with pytest.raises(SparsifyError, match=r"budget=60,000 entries; expected 1 to 50,690, the number of candidates"):
        parent.answer()


def test_ratios_are_to_full_and_floor_by_name_and_not_to_the_first():
    results = [measured("id3", 1.0, 2**28), measured("full", 2.0, 2**30), measured("floor", 0.5, 2**27)]
    results[0].sparse += [0.5, 0.25, 0.125]
    rows = list(zip(*(column.cells for column in make_table(results).columns), strict=True))
    assert rows[0] == (
        "id3",
        "10",
        "5",
        "256",
        "0.25",
        "2.00",
        "256",
        "0.50",
        "0.250",
        "0.250",
        "1.000",
        "0.50",
        "2.00",
    )
    assert rows[1][4:6] == ("1.00", "8.00")
    assert rows[1][8] == "-"
    assert not any("floor" in column.header for column in make_table(results[:2]).columns)


def test_no_figure_of_the_table_is_cut_off():
    results = [measured(method, 13.125, 2**32) for method in ("floor", "full", "id3-every-10", "dense-id3")]
    for one in results:
        one.trained, one.unmasked, one.sparse = 123_456_789, 1_000_000, [0.125]
    console = Console(width=TABLE_WIDTH)
    with console.capture() as capture:
        console.print(make_table(results))
    assert "…" not in capture.get()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"shape": "llama-7b"}, "1 of 32 layers, on a CPU a vocabulary of 256, random tokens"),
        ({"checkpointing": True, "tokens": "mrpc"}, "mrpc, float32, cpu, batch 8 x 128, activation checkpointing"),
        ({}, "medians of 10 steps in 5 interleaved rounds; memory beyond the 256 MB of libraries"),
        ({"method": "id3-every-10", "device": "cuda"}, "by means of 10 steps; memory of tensors on the GPU"),
    ],
)
def test_the_headline_says_what_is_not_as_published(settings, said):
    assert said in headline([measured(**{"method": "id3", **settings})], 5, 2)


def test_one_point_is_drawn_as_bars_and_several_as_curves(tmp_path):
    pictures = {
        "bars": [measured("full"), measured("id3")],
        "budgets": [measured("id3", budget=budget) for budget in (10, 100)],
        "sizes": [replace(measured("id3"), parameters=size) for size in (10**6, 10**8)],
    }
    for name, results in pictures.items():
        plot(results, tmp_path / name)
        assert (tmp_path / name).read_bytes()[:4] == PNG
    assert len({(tmp_path / name).read_bytes() for name in pictures}) == 3
