"""The benchmark measures every method in a process of its own, in interleaved rounds, and reports ratios."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from sparsify.api import get_unmasker, sparsify
from sparsify.bench import filling, worker
from sparsify.bench.command import TABLE_WIDTH
from sparsify.bench.methods import METHODS, Trainee, is_profiled
from sparsify.bench.plots import plot
from sparsify.bench.room import estimate
from sparsify.bench.run import GIVE_BACK, Measurement, answer, measure, to_json
from sparsify.bench.settings import Settings
from sparsify.bench.shapes import SHAPES, build, note
from sparsify.bench.table import headline, make_table
from sparsify.bench.worker import Worker
from sparsify.cli import make_app
from sparsify.errors import SparsifyError
from sparsify.training.backward import COLLECT, COMMIT

TINY = {"shape": "tiny", "budget": 400, "batch": 1, "length": 8, "threads": 1}
SECOND = [1.0, 1.0, 1.0]
PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def measured(method, seconds=1.0, peak=2**30, **settings):
    return Measurement(
        Settings(method, **settings), 10**6, 10, 5, [0.5], [0.75 * seconds] * 3, [0.25 * seconds] * 3, 2**28, peak, peak
    )


def invoke(*arguments):
    return CliRunner().invoke(make_app(), ["bench", *arguments], catch_exceptions=False)


@pytest.mark.slow
def test_each_method_is_measured_in_every_round():
    seen = []
    results = measure([Settings("full", **TINY), Settings("id3", **TINY)], rounds=2, steps=2, progress=seen.append)
    assert seen == [
        "ID3 fills the index buffers to 50 % of 400",
        "full: memory", "id3: memory", "full: preparing", "id3: preparing",
        "round 1 of 2: full", "round 1 of 2: id3", "round 2 of 2: full", "round 2 of 2: id3",
        "round 1 of 2: profiled", "round 2 of 2: profiled",
    ]  # fmt: skip
    full, id3 = results
    assert [len(one.forward_backward) for one in results] == [len(one.updates) for one in results] == [4, 4]
    assert all(one.step_seconds > one.update_seconds > 0 for one in results)
    assert all(one.library_bytes > 2**20 for one in results)
    assert all(one.held_bytes > 0 for one in results)
    assert (full.trained, full.unmasked) == (full.parameters, 0)
    assert (id3.trained, id3.unmasked) == (400, 200)
    assert (full.work, full.sparse, full.sparse_seconds) == ("", [], None)
    assert len(id3.sparse) == 4
    assert all(0 < sparse < id3.step_seconds * 10 for sparse in id3.sparse)
    assert id3.work.endswith(("multiplied out", "nothing was looked at")), "few of 400 entries are chosen in a step"
    assert [row["settings"]["method"] for row in json.loads(to_json(results))["results"]] == ["full", "id3"]


@pytest.mark.parametrize(
    ("heap", "kept"),
    [("keep", {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "1099511627776"}), ("system", {})],
)
def test_times_are_taken_where_the_heap_is_as_told_and_memory_where_it_is_given_back(monkeypatch, heap, kept):
    class Ready:
        def __init__(self, module, **environment):
            environments.append(environment)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.kill()

        def kill(self):
            pass

    said = {"initialisation": 1.0, "seconds": [(1.0, 1.0)], "work": "", "sparse": [0.5]}
    environments = []
    monkeypatch.setattr("sparsify.bench.run._start", Ready)
    monkeypatch.setattr("sparsify.bench.run._ask", lambda worker, line: dict(said, peak_bytes=5 + len(environments)))
    (result,) = measure([Settings("full", heap=heap, **TINY)], rounds=1, steps=1)
    assert environments == [GIVE_BACK, kept]
    assert (result.held_bytes, result.peak_bytes, result.initialisations) == (6, 7, [1.0])


@pytest.mark.slow
def test_a_method_may_start_anew_at_each_turn():
    seen = []
    (result,) = measure([Settings("static", **TINY)], rounds=2, steps=1, progress=seen.append, together=False)
    assert seen == [
        "static: memory",
        "static: preparing",
        "round 1 of 2: static",
        "static: preparing",
        "round 2 of 2: static",
    ]
    assert len(result.initialisations) == len(result.updates) == len(result.sparse) == 2


@pytest.mark.parametrize(("steps", "means"), [(2, 1), (10, 1), (11, 2)])
def test_a_method_that_chooses_at_each_tenth_step_is_measured_by_means_of_ten(steps, means):
    worker = object.__new__(Worker)
    worker.settings = Settings("id3-every-10", **TINY)
    count = iter(range(100))
    worker.step = lambda: (19.0 if next(count) % 10 == 0 else 1.0, 0.5)
    assert worker.turn(steps) == [pytest.approx((2.8, 0.5))] * means, "wherever in the cycle a turn begins"
    next(count)
    assert worker.turn(1) == [pytest.approx((2.8, 0.5))]


def test_on_a_gpu_times_wait_for_it_and_memory_is_that_of_its_tensors(monkeypatch):
    worker, waited = object.__new__(Worker), []
    worker.settings = Settings("full", device="cuda:1")
    worker.batches = type("Batches", (), {"next": lambda self: {}})()
    worker.trainee = Trainee(lambda: type("Output", (), {"loss": torch.ones((), requires_grad=True)}), trained=1)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7 if device == "cuda:1" else 0)
    worker.step()
    assert waited == ["cuda:1"] * 3, "before forward, between backward and the update, and after it"
    assert worker.peak_bytes() == 7


def test_the_others_are_measured_step_by_step():
    worker = object.__new__(Worker)
    worker.settings = Settings("id3", **TINY)
    count = iter(range(100))
    worker.step = lambda: (float(next(count)), 0.5)
    assert worker.turn(3) == [(0.0, 0.5), (1.0, 0.5), (2.0, 0.5)]


@pytest.mark.parametrize("method", ["static", "bitfit"])
def test_the_sparse_part_is_timed_in_some_more_steps(method):
    worker = Worker(Settings(method, **TINY))
    before = get_unmasker(worker.trainee.model).step
    seconds = worker.sparse_seconds(2)
    assert len(seconds) == 2
    assert all(0 < one < 60 for one in seconds)
    assert get_unmasker(worker.trainee.model).step == before + 2


def test_the_sparse_part_of_a_backward_is_ranges_of_torchs_profiler():
    worker = Worker(Settings("static", **TINY))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        worker.step()
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert counts[COLLECT] >= sum(bool(tensor.count) for tensor in get_unmasker(worker.trainee.model).tensors)
    assert counts[COMMIT] == 1


def test_only_where_masked_weights_do_the_same_in_every_step_is_a_sparse_part_timed():
    profiled = [method for method in METHODS if is_profiled(Settings(method))]
    assert sorted(profiled) == ["bitfit", "id3", "static"]
    assert not is_profiled(Settings("id3", device="cuda"))


def cells(results):
    return {column.header.replace("\n", " "): list(column.cells) for column in make_table(results).columns}


def test_ratios_are_to_full_and_floor_by_name_and_not_to_the_first():
    results = [measured("id3", 1.0, 2**28), measured("full", 2.0, 2**30), measured("floor", 0.5, 2**27)]
    table = make_table(results)
    assert [column.header for column in table.columns].count("/ full") == 2
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows[0] == ("id3", "10", "5", "256", "0.25", "2.00", "256", "0.50", "-", "0.250", "1.000", "0.50", "2.00")
    assert rows[1][4:6] == ("1.00", "8.00")


def test_the_table_has_the_sparse_part_of_a_step_where_there_is_one():
    id3 = measured("id3")
    id3.sparse += [0.5, 0.25, 0.125]
    assert cells([id3, measured("full")])["sparse (s)"] == ["0.250", "-"]


def test_no_figure_of_the_table_is_cut_off():
    methods = ["floor", "full", "lora", "static", "id3-every-10", "dense-id3"]
    results = [measured(method, 13.125, 2**32) for method in methods]
    for one in results:
        one.trained, one.unmasked = 123_456_789, 1_000_000
        one.sparse.append(0.125)
    console = Console(width=TABLE_WIDTH)
    with console.capture() as capture:
        console.print(make_table(results))
    assert "…" not in capture.get()


def test_without_a_floor_there_is_no_column_for_it():
    assert not any("floor" in header for header in cells([measured("id3"), measured("full")]))


def test_the_headline_says_what_is_not_as_published():
    said = headline([measured("id3", shape="llama-7b", checkpointing=True)], 5, 2, "random tokens")
    assert "1 of 32 layers, on a CPU a vocabulary of 256" in said
    assert "activation checkpointing" in said
    assert "medians of 10 steps in 5 interleaved rounds; memory beyond the 256 MB of libraries" in said
    assert "heap as it comes" not in said
    assert "heap as it comes" in headline([measured("id3", heap="system")], 5, 2, "random tokens")
    assert "means of 10 steps" in headline([measured("id3-every-10")], 5, 2, "random tokens")
    assert "tensors on the GPU" in headline([measured("id3", device="cuda", shape="llama-7b")], 5, 2, "random tokens")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "full,di3"), "unknown method 'di3'; expected one of floor, .*Did you mean 'id3'"),
        (("--methods", "pafi"), "unknown method 'pafi'; expected one of floor, full, static"),
        (("--shapes", "tiny,deberta"), "unknown shape 'deberta'; .*Did you mean 'deberta-v3-base'"),
        (("--dtype", "float31"), "unknown dtype 'float31'; expected one of float32, bfloat16"),
        (("--heap", "drop"), "unknown heap 'drop'; expected one of keep, system"),
        (("--device", "tpu"), "unknown device 'tpu'; expected one of cpu, cuda"),
        (("--budget", "0.1"), "--budget '0.1'; expected whole numbers, such as 10_000"),
        (("--layers", "3,six"), "--layers '3,six'; expected whole numbers, such as 3,6,12"),
        (("--layers", "-1"), "layers=-1; expected an int of at least 1, or 0 for the shape's own"),
        (("--shapes", "tiny,minilm", "--layers", "3"), "--layers: 'minilm' has pretrained weights"),
        (("--budget", "0"), "budget=0; expected an int of at least 1"),
        (("--fill", "1.5"), "fill=1.5; expected a share of the budget"),
        (("--rounds", "0"), "--rounds 0; expected at least 1"),
        (("--rounds", "999"), "4000 steps to measure; a run has 1000: take fewer rounds"),
        (("--shape", "minilm", "--data", "nowhere"), "`nowhere` has no mrpc/train.jsonl"),
    ],
)
def test_bad_options_are_named_before_anything_starts(arguments, message, monkeypatch):
    monkeypatch.setattr("sparsify.bench.command.measure", lambda *_, **__: pytest.fail("it started"))
    with pytest.raises(SparsifyError, match=message):
        invoke(*arguments)


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SparsifyError, match="--device cuda:1: torch finds no GPU here"):
        invoke("--device", "cuda:1")


def test_one_combination_is_drawn_as_bars_and_several_as_curves(tmp_path):
    bars, curves = tmp_path / "bars.png", tmp_path / "curves.png"
    plot([measured("full"), measured("id3")], bars)
    plot([measured("id3", shape=shape, budget=budget) for shape in ("minilm", "tiny") for budget in (10, 100)], curves)
    assert bars.read_bytes()[:4] == curves.read_bytes()[:4] == PNG
    assert curves.stat().st_size != bars.stat().st_size
    by_layers = tmp_path / "layers.png"
    plot([measured("id3", layers=layers) for layers in (1, 2)], by_layers)
    assert by_layers.read_bytes() != bars.read_bytes()


@pytest.mark.parametrize("shape", ["tiny", "t5-small", "llama-7b"])
def test_a_model_has_as_many_layers_as_it_is_told(shape, monkeypatch):
    small = {**SHAPES[shape].config, "vocab_size": 100, "d_model": 32, "d_ff": 64, "hidden_size": 32}
    small |= {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    monkeypatch.setitem(SHAPES, shape, replace(SHAPES[shape], config=small))
    blocks = {}
    for layers in (1, 5):
        settings = Settings("full", shape, layers=layers)
        model = build(settings)
        blocks[layers] = sum(isinstance(module, nn.ModuleList) and len(module) == 5 for module in model.modules())
        assert f"{layers} of {small[SHAPES[shape].depth[0]]} layers" in note(settings)
        assert estimate(settings) < estimate(replace(settings, layers=2 * layers))
    assert (blocks[1], blocks[5]) == (0, len(SHAPES[shape].depth))


def test_every_budget_of_every_shape_is_measured(monkeypatch, tmp_path):
    seen = []

    def fake(settings, rounds, steps, progress, together):
        seen.extend((one.method, one.shape, one.budget, one.ahead) for one in settings)
        return [Measurement(one, 1, 1, 1, [1.0], SECOND, SECOND, 1, 1, 1) for one in settings]

    monkeypatch.setattr("sparsify.bench.command.measure", fake)
    invoke("--shapes", "tiny,bert-base", "--budgets", "10,1_000", "--methods", "id3", "--json", str(tmp_path / "raw"))
    expected = [("id3", shape, budget, 50) for shape in ("tiny", "bert-base") for budget in (10, 1000)]
    assert seen == expected
    assert len(json.loads((tmp_path / "raw").read_text())["results"]) == 4


def test_a_shape_has_a_budget_of_its_own_where_none_is_given(monkeypatch):
    seen = {}

    def fake(settings, rounds, steps, progress, together):
        seen.update({one.shape: one for one in settings})
        return [replace(measured("id3"), settings=one) for one in settings]

    monkeypatch.setattr("sparsify.bench.command.measure", fake)
    invoke("--shapes", "tiny,bert-base", "--methods", "id3")
    assert {shape: one.budget for shape, one in seen.items()} == {"tiny": 1000, "bert-base": 320_000}
    assert sparsify(build(seen["tiny"]), seen["tiny"].budget, steps=1) is not None


@pytest.mark.parametrize("process", [worker, filling])
def test_a_worker_answers_with_its_error_which_is_then_ours(process, monkeypatch, capsys):
    settings = Settings("id3", "tiny", budget=60_000, fill=0.0 if process is worker else 0.5, length=8)
    monkeypatch.setattr("sys.stdin", io.StringIO(settings.to_json() + "\n"))
    with pytest.raises(SystemExit, match="1"):
        process.main()
    said = io.StringIO(capsys.readouterr().out)
    with pytest.raises(SparsifyError, match=r"budget=60,000 entries; expected 1 to 50,690, the number of candidates"):
        answer(SimpleNamespace(stdout=said))


@pytest.mark.parametrize(("memory", "shared"), [(16, [[10, 1000]]), (1, [[10], [1000]])])
def test_budgets_share_their_rounds_where_memory_holds_them_all(monkeypatch, memory, shared):
    seen = []

    def fake(settings, rounds, steps, progress, together):
        seen.append([one.budget for one in settings])
        return [replace(measured("id3"), settings=one) for one in settings]

    monkeypatch.setattr("sparsify.bench.command.measure", fake)
    monkeypatch.setattr("sparsify.bench.room.memory_of", lambda settings: memory * 2**30)
    said = invoke("--shape", "tiny", "--budgets", "10,1_000", "--methods", "id3").output
    assert seen == shared
    assert said.index("budget 10,") < said.index("budget 1,000,")


def test_a_large_model_gets_one_process_at_a_time(monkeypatch):
    seen = []

    def fake(settings, rounds, steps, progress, together):
        seen.append(together)
        return [Measurement(one, 1, 1, 1, [1.0], SECOND, SECOND, 1, 1, 1) for one in settings]

    monkeypatch.setattr("sparsify.bench.command.measure", fake)
    monkeypatch.setattr("sparsify.bench.room.memory_of", lambda settings: 16 * 2**30)
    for shape in ("tiny", "llama-1b"):
        invoke("--shape", shape)
    invoke("--shape", "tiny", "--one-at-a-time")
    assert seen == [True, False, False]


@pytest.mark.slow
def test_the_command_measures_every_method(tmp_path):
    out, picture = tmp_path / "raw.json", tmp_path / "bars.png"
    result = invoke(
        "--shape", "tiny", "--methods", ",".join(METHODS), "--budget", "400", "--batch", "1", "--seq", "8",
        "--rounds", "1", "--steps", "1", "--threads", "1", "--json", str(out), "--plot", str(picture),
    )  # fmt: skip
    assert all(method in result.output for method in METHODS)
    assert "id3, to choose in its last step: " in result.output
    assert picture.read_bytes()[:4] == PNG
    rows = json.loads(out.read_text())["results"]
    assert [row["settings"]["method"] for row in rows] == list(METHODS)


def test_the_shapes_are_those_of_the_published_models():
    assert list(SHAPES) == ["minilm", "bert-base", "deberta-v3-base", "t5-small", "llama-1b", "llama-7b", "tiny"]
