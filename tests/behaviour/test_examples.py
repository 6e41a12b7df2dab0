"""The examples run as their README says: on JSON Lines files, and on a GLUE task in a local folder."""

import gzip
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from peft import PeftModel
from torch import nn

from sparsify import SparseDelta, load_model
from sparsify.adapters import load_adapters

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS = [
    {"text": text, "label": label}
    for text, label in [("a fine film", 1), ("dull and far too long", 0), ("warm and funny", 1), ("a waste of time", 0)]
] * 4


def test_the_method_in_80_lines_unmasks_what_the_library_does(capsys):
    script = EXAMPLES / "id3_in_80_lines.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 80
    runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split() for line in lines[1:21]]
    assert [(int(step[3]), step[4]) for step in steps] == [(10 * (t + 1), "yes") for t in range(20)]
    assert float(steps[-1][1]) < float(steps[0][1]), "it learns"
    assert float(lines[21].rpartition(" ")[2]) < 1e-6


@pytest.fixture
def files(tmp_path):
    train, validation = tmp_path / "train.jsonl.gz", tmp_path / "validation.jsonl"
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    with gzip.open(train, "wt") as file:
        file.write(lines)
    validation.write_text(lines)
    return ["--train-file", str(train), "--validation-file", str(validation), "--batch-size", "4"]


@pytest.fixture
def main(example):
    return example("text_classification").main


def check_delta(folder):
    delta = SparseDelta.load(folder)
    assert delta.num_entries == 200
    assert sorted(delta.whole) == ["classifier.bias", "classifier.weight"]


def test_it_trains_on_json_lines_and_saves_the_delta_and_steps_stop_it_early(main, files, tmp_path, capsys):
    result = main([*files, "--epochs", "2", "--budget", "200", "--out", str(tmp_path / "delta")])
    assert result == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["strategy"], result["entries"], len(result["epochs"])) == ("default", 200, 2)
    assert 0 <= result["accuracy"] <= 1
    check_delta(tmp_path / "delta")
    options = ["--steps", "1", "--rows", "8", "--strategy", "id3", "--modules-to-save", "--budget", "0.0001"]
    result = main([*files, *options, "--out", str(tmp_path / "delta")])
    assert result["entries"] == 2_256  # of 22,565,762
    assert len(result["epochs"]) == 1
    # the head is stored whole all the same: the base does not have it
    assert set(SparseDelta.load(tmp_path / "delta").whole) == {"classifier.weight", "classifier.bias"}


def test_a_task_without_data_is_an_error_that_says_where_it_could_be(main, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"no train\.jsonl and validation\.jsonl"):
        main(["--task", "mrpc", "--data", str(tmp_path)])
    monkeypatch.delenv("SPARSIFY_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit, match=r"set SPARSIFY_DATA or --data .* or `pip install datasets`"):
        main(["--task", "mrpc"])


@pytest.mark.parametrize(("options", "rate"), [([], 5e-3), (["--head-lr", "0.1"], 0.1)])
def test_the_new_head_has_a_rate_of_its_own(example, files, options, rate):
    script = example("text_classification")
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2, bias=False), "classifier": nn.Linear(2, 2, bias=False)})
    groups = script.parameter_groups(model, script.parse_arguments([*files, *options]))
    assert [group["lr"] for group in groups] == [1e-3, rate]


def test_the_other_strategies_train(main, files):
    fish, full = (main([*files, "--steps", "2", "--strategy", name, "--budget", "200"]) for name in ("fish", "full"))
    assert (fish["entries"], fish["updates"]) == (200, 400)
    assert full["lr"] == 5e-5  # a rate of its own
    assert "entries" not in full


def test_a_sparse_lora_is_a_plain_adapter_and_a_delta(example, files, tmp_path):
    """Each of the two, put on a fresh base, gives the result that was printed; PEFT alone loads the adapter."""
    sparse_lora = example("sparse_lora")
    result = sparse_lora.main([*files, "--steps", "6", "--lr", "0.01", "--budget", "200", "--out", str(tmp_path)])
    base = check_saved(example("text_classification"), sparse_lora, files, tmp_path, result)[0]
    adapter = PeftModel.from_pretrained(base.model, tmp_path / "adapter")
    found = example("text_classification").evaluate(adapter, base.validation_loader, ("accuracy",))
    assert found == {"accuracy": result["accuracy"], "loss": result["loss"]}


def test_sparse_adapters_are_saved_as_adapters_and_as_a_delta(example, files, tmp_path):
    sparse_adapters = example("sparse_adapters")
    result = sparse_adapters.main([*files, "--steps", "2", "--budget", "200", "--out", str(tmp_path)])
    base, rebuilt = check_saved(example("text_classification"), sparse_adapters, files, tmp_path, result)
    adapted = dict(load_adapters(base.model, tmp_path / "adapter").named_parameters())
    assert all(p.equal(adapted[name]) for name, p in rebuilt.named_parameters() if ".adapters." in name)


def check_saved(text_classification, script, files, folder, result):
    assert result["entries"] == 200
    task = text_classification.load_task(script.parse_arguments(files))
    path = text_classification.model_path("MiniLM")
    rebuilt = load_model(path, folder / "delta", model_class=text_classification.classifier_class(path))
    found = text_classification.evaluate(rebuilt, task.validation_loader, ("accuracy",))
    assert found == {"accuracy": result["accuracy"], "loss": result["loss"]}
    return task, rebuilt


@pytest.mark.parametrize(
    ("script", "options", "entries"),
    [
        ("sparse_lora", ["--strategy", "dense"], 331_776),  # 6 layers of 8 (4 (384 + 384) + 2 (384 + 1536))
        ("sparse_adapters", ["--strategy", "dense", "--kind", "pfeiffer", "--reduction-factor", "16"], 113_040),
        ("sparse_adapters", ["--strategy", "dense", "--kind", "houlsby", "--reduction-factor", "16"], 226_080),
        ("sparse_adapters", ["--strategy", "sparseadapter"], 35_527),  # pruned by gradients beforehand
    ],
)
def test_adapters_train_dense_and_pruned(example, files, tmp_path, script, options, entries):
    result = example(script).main([*files, "--steps", "1", *options, "--out", str(tmp_path)])
    assert result["entries"] == result["updates"] == entries
    assert (tmp_path / "adapter").is_dir()
    assert (tmp_path / "delta").is_dir() == ("dense" not in options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "copies", "steps"), [("ddp", 2, 0, 4), ("fsdp", 4, 2, 2), ("tensor_parallel", 4, 2, 4)]
)
def test_several_ranks_train_one_delta(name, ranks, copies, steps, files, tmp_path):
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    accelerate = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", str(ranks)]
    command = [sys.executable, "-m", *(accelerate if name == "ddp" else torchrun)]
    options = ["--epochs", "2", "--budget", "200", "--out", str(tmp_path / "delta")]
    options += ["--copies", str(copies)] if copies else []
    command += [str(EXAMPLES / f"{name}.py"), *files, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environment)
    result = json.loads(run.stdout.splitlines()[-1])
    assert (result["ranks"], result["entries"], result["steps"]) == (ranks, 200, steps)
    assert f"bytes by this one of {ranks} ranks" in run.stdout
    check_delta(tmp_path / "delta")
