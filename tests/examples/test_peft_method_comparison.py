"""PEFT's method comparison: its runner finds configs that PEFT reads, settings that it knows, and sparsify imported."""

import json
import subprocess
import sys

import pytest

peft = pytest.importorskip("peft", minversion="0.21", reason="earlier versions of PEFT have no place for a method")

from examples.peft_method_comparison.run import HERE  # noqa: E402
from sparsify.peft import SparseConfig  # noqa: E402

EXPERIMENTS = sorted((HERE / "experiments" / "sparsify").iterdir())


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=lambda folder: folder.name)
def test_an_experiment_is_a_config_and_settings_of_the_runner(folder):
    config = peft.PeftConfig.from_pretrained(folder)
    assert isinstance(config, SparseConfig)
    assert (config.steps, config.budget) == (5_000, 28 * 32 * ((3072 + 3072) + (3072 + 1024)))  # a LoRA's of rank 32
    settings = json.loads((folder / "training_params.json").read_text())  # that the runner puts over its own
    assert (settings.keys(), settings["optimizer_kwargs"].keys()) == ({"optimizer_kwargs"}, {"lr", "weight_decay"})


def test_the_runner_is_run_where_it_is_with_a_path_that_it_takes(tmp_path):
    (tmp_path / "utils.py").write_text("from peft import PeftConfig\n")
    shown = "print(sys.argv[1:], PeftConfig.from_pretrained(sys.argv[2]).strategy)"
    (tmp_path / "run.py").write_text(f"import sys; from utils import PeftConfig; {shown}")
    command = [sys.executable, "-m", "examples.peft_method_comparison.run", str(tmp_path), "llama-3.2-3B-random"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.stdout == "['--verbose', 'experiments/sparsify/llama-3.2-3B-random'] random\n", run.stderr
