"""Training on CUDA devices without a GPU: the CPU's results, streams that wait for each other, a host that does not.

The devices are those of ``fake_cuda.py``, in the folder that SPARSIFY_FAKE_CUDA names or in ``../shared/fake_cuda``. It
counts a race where a stream reads what another wrote and was not waited for; full fine-tuning is the control.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("SPARSIFY_FAKE_CUDA") or ROOT.parent / "shared" / "fake_cuda")
TORCH = "2.13"  # that its C++ was written for
PLACES = ["default", "side", "two streams", "two devices", "side on two devices"]


def missing():
    """Names the first missing requirement of the fake devices; empty if there is none."""
    if not (FOLDER / "fake_cuda.py").is_file():
        return f"no fake_cuda.py in {FOLDER}; set SPARSIFY_FAKE_CUDA to its folder"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "no C++ compiler for the fake CUDA devices"
    if torch.version.cuda is not None or not torch.__version__.startswith(TORCH):
        return f"the fake CUDA devices need the CPU build of torch {TORCH}, and this is torch {torch.__version__}"
    return ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def run(*arguments):
    """What a Python process with fake devices prints."""
    paths = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def results():
    """Results by strategy, place, and whether everything is done at once."""
    lines = run(ROOT / "tests/helpers/train_on_fake_cuda.py").splitlines()
    return {tuple(result["run"]): result for result in map(json.loads, lines)}


def check(results, strategy, place, everything=False):
    """As on the CPU, in order, and nothing left behind."""
    ours, reference = results[strategy, place, everything], results[strategy, "cpu", everything]
    assert ours["sets"] == reference["sets"]
    assert ours["losses"] == pytest.approx(reference["losses"], rel=1e-6)
    # no race that full fine-tuning does not have
    assert not Counter(ours["races"]) - Counter(results["full", place, False]["races"])
    assert ours["left"] == 0, "bytes on the devices once the model is gone"


@pytest.mark.parametrize("strategy", ["id3", "pafi"])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_is_as_on_the_cpu_and_its_streams_wait_for_each_other_and_the_host_for_none(results, strategy, place):
    check(results, strategy, place)
    run = results[strategy, place, False]
    assert sum(map(len, run["sets"].values())) == 60
    assert run["waits"] == results[strategy, "default", False]["waits"]


@pytest.mark.parametrize("place", ["default", "side", "two streams", "two devices"])
def test_the_control_has_no_race(results, place):
    assert not results["full", place, False]["races"]


@pytest.mark.parametrize("place", ["side", "two devices"])
def test_a_run_with_everything_is_as_on_the_cpu(results, place):
    check(results, "id3", place, everything=True)


COUNT = """import os, launches, sparsify.selection.small_tensors as small
small.LARGEST = 40  # so that the narrow models' matrices are looked at one by one, as wide ones are
launches.main(), os._exit(0)"""


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "layers"), [("bert", 12), ("llama", 32)])
def test_a_step_launches_fewer_kernels_than_lora_and_waits_once(arch, layers, tmp_path):
    run("-c", COUNT, "--arch", arch, "--layers", layers, "--json", tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows["id3"]["launches"] < 0.9 * rows["lora"]["launches"]
    assert rows["id3"]["waits"] == rows["floor"]["waits"] + 1
