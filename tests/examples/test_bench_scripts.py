"""The scripts in examples/benchmarks measure what they say."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from rank_processes import run as on_forks

from sparsify.delta.checkpoint.reader import Checkpoint

script = importlib.import_module  # of conftest.py's folder, by name
SCRIPTS = Path(__file__).parents[2] / "examples" / "benchmarks"


def results_of(name, folder, **options):
    """What a script writes as JSON."""
    with patch.dict(os.environ, COLUMNS="200"):  # of the table
        script(name).main(**options, json=folder / "raw.json")
    raw = json.loads((folder / "raw.json").read_text())
    assert raw["conditions"].items() >= options.items()
    return raw["results"]


def run(name, folder, *options):
    """The output of a script in a process of its own, and what it writes as JSON."""
    command = [sys.executable, SCRIPTS / f"{name}.py", *map(str, options), "--json", folder / "raw.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "raw.json").read_text())["results"]


def test_formats_take_the_bytes_that_they_should(tmp_path, capsys):
    file = script("file")
    found = results_of("file", tmp_path, shape="minilm", entries=20_000, dtype="bfloat16")
    sizes = {size["format"]: size for size in found}
    assert "flat int64 positions" in capsys.readouterr().out
    per_entry = {name: size["bytes"] / size["entries"] for name, size in sizes.items()}
    assert per_entry["flat int64 positions"] == 8 + 2
    assert per_entry["the paper's toolkit"] == pytest.approx(16 + 2, rel=0.1)
    assert per_entry["PEFT shira"] == pytest.approx(8 + 4, rel=0.05)
    assert per_entry["PEFT supertuning"] == pytest.approx(4 + 4, rel=0.1)
    assert per_entry["entropy bound"] < per_entry["sparsify"] < per_entry["entropy bound"] + 2
    weights = file.linear_weights(file.bert("minilm"))
    counts = file.uneven_counts(weights, 20_000)
    bits = sum(math.log2(math.comb(weights[name].numel(), count)) for name, count in counts.items())
    assert sizes["entropy bound"]["bytes"] == pytest.approx(bits / 8 + 2 * 20_000)


def test_a_merge_takes_the_memory_of_one_tensor(monkeypatch, tmp_path, capsys):
    """Of a checkpoint of 100 MB in tensors of 6 MB, much less than half is in memory at a time."""
    measure = script("merge").measure
    monkeypatch.setattr(script("merge"), "measure", lambda _, *settings: measure(tmp_path, *settings))  # to be kept
    result = results_of("merge", tmp_path, gigabytes=0.1, shards=2, density=0.001)
    assert "largest shard (MB)" in capsys.readouterr().out
    assert 0 < result["peak_bytes"] - result["library_bytes"] < 40 * 2**20
    assert result["shard_bytes"] > 40 * 2**20
    merged, base = Checkpoint(tmp_path / "merged"), Checkpoint(tmp_path / "base")
    for name, weight in base.items():
        assert int((merged[name] != weight).sum()) == math.ceil(weight.numel() / 1000)


def test_streams_are_measured_in_every_round(tmp_path):
    _, results = run("stream", tmp_path, "--shape", "tiny", "--density", 0.2, "--followers", "1,2", "--rounds", 2)
    assert [(row["followers"], row["method"]) for row in results] == [
        (number, method) for number in (1, 2) for method in ("updates", "diffs", "all")
    ]
    for row in results:
        assert all(len(row[part]) == 2 and min(row[part]) > 0 for part in ("extract", "apply", "total", "cpu"))
    updates, diffs, everything = (row["bytes"] / row["entries"] for row in results[:3])
    assert 2 < updates < 2.1
    assert 5.5 < diffs < 6.1  # some values are drawn again as they were
    assert everything == pytest.approx(2 / 0.2, rel=1e-3)


@pytest.mark.slow
def test_swaps_are_measured_in_every_round(tmp_path):
    options = ("--shape", "tiny", "--density", 0.01, "--rounds", 2, "--threads", 1)
    printed, results = run("swap", tmp_path, *options)
    assert "LoRA merge" in printed
    assert list(results)[:3] == ["apply", "swap", "revert"]
    for result in results.values():
        assert len(result["bytes"]) == len(result["seconds"]) == 2
        assert min(result["seconds"]) > 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("file", {"shape": "bert-bse"}, "unknown shape 'bert-bse'; expected one of minilm, bert-base"),
        ("file", {"shape": "minilm", "entries": 3}, r"3 entries; expected 37, one a layer, to 215,285, 2 % of"),
        ("merge", {"density": 0.0}, r"expected .* --density in \(0, 1\]"),
        ("ranks", {"methods": "id4"}, "unknown method 'id4'; expected one of full, lora, id3"),
        ("step", {"methods": "full,di3"}, "unknown method 'di3'; expected one of floor, .*Did you mean 'id3'"),
        ("step", {"shape": "tiny,deberta"}, "unknown shape 'deberta'; .*Did you mean 'deberta-v3-base'"),
        ("step", {"device": "cuda:1"}, "--device cuda:1: torch finds no GPU here"),
        ("step", {"budget": "0.1"}, "--budget '0.1'; expected whole numbers of at least 1"),
        ("step", {"shape": "tiny,minilm", "layers": "3"}, "--layers: 'minilm' has pretrained weights"),
    ],
)
def test_bad_options_are_named_before_anything_starts(name, options, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(script(name), "measure", pytest.fail)
    with pytest.raises(script("common").SparsifyError, match=message):
        script(name).main(**options)


@pytest.mark.slow
def test_ranks_are_measured_in_every_round(monkeypatch):
    spawn = lambda function, args, nprocs: on_forks(nprocs, function, *args)  # noqa: E731 - which import nothing
    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    settings = script("ranks").Settings
    tiny = {"shape": "minilm", "budget": 2_000, "batch": 1, "length": 8}
    methods = [settings(name, **tiny) for name in script("ranks").METHODS]
    results = script("ranks").measure(methods, ranks=2, rounds=2, steps=1, threads=1)
    for name, result in results.items():
        assert len(result["seconds"]) == 2
        assert result["averaging_bytes"] == 4 * result["trained"]  # on two ranks an all-reduce sends each byte once
        assert bool(result["choosing_bytes"]) == (name == "id3")


def test_a_step_on_a_cpu_is_broken_down(tmp_path):
    tiny = script("step_bench.settings").Settings(
        "id3", "tiny", 1_000, fill=0.0, batch=2, length=8, folder=str(tmp_path)
    )
    found = script("step_bench.profiling").profile_step(script("step_bench.worker").Worker(tiny))
    assert found["ranges"].keys() == {"sparsify::collect", "sparsify::commit"}
    assert found["kernels"]


def test_a_step_calls_no_more_functions_of_python_than_it_did():
    calls = {}
    for method in script("overhead").METHODS:
        model, optimizer = script("overhead").make(method, layers=4, width=32, steps=10)
        for _ in range(2):
            script("overhead").step(model, optimizer)
        calls[method] = script("overhead").calls_of_a_step(model, optimizer)
    added = {method: (number - calls["frozen"]) // 4 for method, number in calls.items()}  # a layer
    assert added["static"] <= 650, added  # 61 of 73 tensors have entries
    assert added["id3"] <= 620, added


@pytest.mark.slow
def test_the_hosts_part_of_a_gpus_step_calls_no_more_functions_of_python_than_loras():
    options = ["--as-on-a-gpu", "--steps", "1", "--rounds", "1"]
    command = [sys.executable, SCRIPTS / "overhead.py", *options]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()
    calls = {line.split()[0]: int(line.split()[-2].replace(",", "")) for line in lines}
    assert calls["static"] <= 4_575, calls
    assert calls["id3"] <= 5_075 < calls["lora"], calls


def test_the_roofline_counts_the_products_of_a_layer():
    phases = script("roofline").phases
    work = [sum(phase[0] for phase in phases(method, 10, 20, 30, 0, "float32")) for method in ("floor", "id3")]
    assert work == [24_000, 38_400]


def test_the_roofline_counts_attention_and_the_dtype_of_lora_adapters(monkeypatch):
    roofline, tables = script("roofline"), []
    monkeypatch.setattr(roofline, "report", lambda title, columns, rows: tables.append({row[0]: row for row in rows}))
    roofline.main()
    for table, model in zip(tables, roofline.MODELS.values(), strict=True):
        tokens, weights = model.batch * model.length, sum(rows * cols * count for rows, cols, count in model.layers)
        attention = 14 * tokens * model.length * model.hidden * model.blocks / (1 + model.causal)
        assert float(table["floor"][1]) == pytest.approx((4 * tokens * weights + attention) / 1e12, abs=0.01)
        gigabytes = {method: float(row[2].replace(",", "")) for method, row in table.items()}
        assert gigabytes["lora"] > 1.5 * gigabytes["lora-short"]
    rates = [{phase[2] for phase in roofline.phases(one, 10, 20, 30, 0, "bfloat16")} for one in ("lora", "lora-short")]
    assert rates == [set(roofline.RATES.values()), {roofline.RATES["bfloat16"]}]


def test_scale_counts_what_ranks_exchange_to_select():
    scale = script("scale")
    model = scale.LLAMA_8B._replace(layers=[(600, 400, 3), (8_000, 4_000, 2)])
    for ranks, digits in ((4, 2), (12, 4)):
        for sharded, headers in ((False, 3 + 1), (True, 5 + 1)):
            counted = scale.count_selection(model, ranks, 10, sharded=sharded)
            means = 4 * (3 * 600 * 400 + 2 * 8_000 * 4_000) * (ranks - 1) / ranks
            gathered = 10 * (8 + 3 * 4) * (ranks - 1)
            messages = headers * digits
            assert counted.calls["host"] == messages
            assert counted.bytes_sent == pytest.approx(means + gathered + messages * 2 * 24 * 8, abs=200)  # padding


SEVERAL = """
import collections, json, os, sys, time
os.makedirs(os.environ["TRITON_CACHE_DIR"], exist_ok=True)
profile = {"profile": {"launches": 1_267, "waits": 1}} if sys.argv[3] == "1" else {}
turns = collections.Counter()
for method in [settings["method"] for settings in json.loads(sys.argv[1])]:
    print(method, file=sys.stderr, flush=True)
    turns[method] += 1
    if method == "lora":
        time.sleep(600)
    if method == "full" and turns[method] == 3:
        os._exit(3)
    print("a library's own line")
    measured = {"initialisations": [0.1], "forward_backward": [1.0], "updates": [0.5]}
    print(json.dumps({"warm_up": 0.2} if turns[method] == 1 else measured | profile), flush=True)
"""


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """``gpu.py``, whose workers are stand-ins."""
    (tmp_path / "step_bench").mkdir()
    (tmp_path / "step_bench" / "several.py").write_text(SEVERAL)
    environment = (found := script("gpu")).environment
    monkeypatch.setattr(found, "environment", lambda out: environment(out) | {"PYTHONPATH": str(tmp_path)})
    monkeypatch.setattr(found, "IMPORTS", 20)
    monkeypatch.setattr(found.importlib.metadata, "packages_distributions", lambda: {"xdist": ["pytest-xdist"]})
    return found


def test_methods_that_fail_or_take_too_long_on_a_gpu_are_named_and_the_others_run(gpu, tmp_path, monkeypatch, capsys):
    model, results, measured, warm_ups = gpu.TINY._replace(seconds=2), [], gpu.measured, []

    def watched(*arguments):
        for turn in measured(*arguments):
            yield turn
            written = json.loads((tmp_path / "results.json").read_text())["results"]
            warm_ups.append([one["warm_up"] for one in written])

    monkeypatch.setattr(gpu, "measured", watched)
    failed = gpu.measure(model, gpu.METHODS, "cpu", gpu.Clock(600), tmp_path, results)
    assert failed == ["lora of tiny: a turn took longer than 2 s", "full of tiny: ended with exit code 3"]
    assert {one.settings.method: len(one.updates) for one in results} == {
        "id3": 2, "lora": 0, "lora-short": 2, "static": 2, "full": 1, "shira": 2
    }  # fmt: skip
    written = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [one["failed"] for one in written if one["failed"]] == [line.partition(": ")[2] for line in failed]
    assert warm_ups[0] == [0.2, 0, 0, 0, 0, 0], "what the first turn took is not written after it"
    assert capsys.readouterr().out.count("1500.00 ms a step") == 5
    assert (tmp_path / "tiny.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "triton").is_dir()


@pytest.mark.parametrize(("rounds", "turns"), [(1, "id3 id3 static static shira shira"), (2, 3 * "id3 static shira ")])
def test_methods_on_a_gpu_take_turns_unless_they_do_not_fit_together(gpu, tmp_path, rounds, turns):
    model, methods = gpu.TINY._replace(rounds=rounds), ("id3", "static", "shira")
    assert not gpu.measure(model, methods, "cpu", gpu.Clock(600), tmp_path, [])
    assert (tmp_path / "tiny.log").read_text().split() == turns.split()


def test_what_a_gpus_machine_lacks_is_named_before_anything_is_measured(gpu, monkeypatch, capsys):
    lacking = ("matplotlib", "triton")
    find = gpu.importlib.util.find_spec
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name in lacking else find(name))
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    monkeypatch.setattr(gpu.sysconfig, "get_paths", lambda: {"include": "nowhere"})
    assert list(gpu.missing("cpu")) == ["triton", "matplotlib", "a C compiler", "Python.h"]
    assert "MISSING: Python.h: its kernels are not measured: slower forms" in capsys.readouterr().out
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match=r"finds no GPU: it takes a build for CUDA"):
            gpu.missing("cuda")
    lacking = ("pytest", "xdist", "hypothesis")
    assert {"pytest", "xdist", "hypothesis"} <= gpu.missing("cpu").keys()
    lacking = ("peft",)
    with pytest.raises(SystemExit, match=r"install it \(pip install peft\)"):
        gpu.missing("cpu")


@pytest.mark.parametrize(("version", "old"), [("2.7.1+cu128", ["torch 2.8", "triton 3.4"]), ("3.3.9", ["triton 3.4"])])
def test_torch_and_triton_that_are_too_old_for_a_gpu_are_named(gpu, monkeypatch, capsys, version, old):
    monkeypatch.setattr(gpu.importlib.metadata, "version", lambda name: version)
    assert [name for name in gpu.missing("cpu") if name.startswith("t")] == old
    assert f"MISSING: triton 3.4: {version} is too old" in capsys.readouterr().out
    monkeypatch.setattr(gpu.importlib.metadata, "version", lambda name: "3.10.0a0+git1")
    assert not [name for name in gpu.missing("cpu") if name.startswith("t")]


def test_a_run_on_a_gpu_profiles_each_shape_and_ends_with_the_tests(gpu, tmp_path, monkeypatch, capsys):
    (tmp_path / "pytest.py").write_text("print('the tests ran')")
    find, lacking, second = gpu.importlib.util.find_spec, [], tmp_path / "second"
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name in lacking else find(name))
    monkeypatch.setattr(gpu, "METHODS", ("id3", "shira"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(tmp_path), "--device", "cpu"])
    assert gpu.main() == 0
    measured, _, tests = capsys.readouterr().out.partition("=== tests")
    assert measured.count("=== ") == 1 + len(gpu.MODELS)
    assert "the tests ran" in tests
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [one["settings"]["method"] for one in results] == ["id3", "shira", "id3", "id3"]  # no Llama with SHiRA
    assert [one["profile"]["launches"] for one in results] == [1_267] * 4
    lacking += ["xdist", "matplotlib"]
    options = ["--device", "cpu", "--shapes", "llama-1b", "--methods", "shira"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(second), *options])
    assert gpu.main() == 0
    assert "the tests ran" not in capsys.readouterr().out
    assert {path.name for path in second.iterdir()} == {"results.json", "llama-1b.log", "tiny.log", "triton"}
    assert (second / "llama-1b.log").read_text().split() == 4 * ["shira"]


def test_a_gpu_without_room_for_a_model_leaves_it_out(gpu, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(50e9), int(80e9)))
    assert [model.shape for model in gpu.fitting(gpu.MODELS, "cuda")] == ["bert-base", "llama-1b"]
    assert "LEFT OUT: llama-8b needs 60 GB, 50 are free" in capsys.readouterr().out


@pytest.mark.slow
def test_the_script_for_a_gpu_measures_all_methods(tmp_path):
    command = ["bash", str(SCRIPTS / "gpu.sh"), str(tmp_path), "--device", "cpu", "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
    rows = json.loads((tmp_path / "results.json").read_text())["results"]
    assert all(len(row["updates"]) == 2 for row in rows)
    assert {row["settings"]["method"]: row["unmasked"] for row in rows} == {
        "id3": 500, "lora": 0, "lora-short": 0, "static": 1000, "full": 0, "shira": 0
    }  # fmt: skip
