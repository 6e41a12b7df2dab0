"""Training on CUDA devices: the CPU's results, streams that wait for each other, a host that does not.

Simulated devices are those of ``fake_cuda.py``, in the folder that SPARSIFY_FAKE_CUDA names or in
``../shared/fake_cuda``. It counts a race where a stream reads what another wrote and was not waited for; full
fine-tuning is the control. Its numbers are the CPU's.

``pytest -m gpu`` runs the same on a real device, which sums in another order, as do two runs there: scores and losses
differ in their last bits, and near a cut that may decide for another entry.
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
STREAMS = ["default", "side", "two streams", "two devices"]
PLACES = [*STREAMS, "side on two devices"]
AUTOCAST = ["float16", "bfloat16"]
# of a step, beyond full fine-tuning's
MOST_WAITS = {"everything": 10, "float16": 2, "magnitude": 3, "d3-repeat": 6, "snip repeat": 6}


def missing():
    if not (FOLDER / "fake_cuda.py").is_file():
        return f"no fake_cuda.py in {FOLDER}; set SPARSIFY_FAKE_CUDA to its folder"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "no C++ compiler for the fake CUDA devices"
    if torch.version.cuda is not None or not torch.__version__.startswith(TORCH):
        return f"the fake CUDA devices need the CPU build of torch {TORCH}, and this is torch {torch.__version__}"
    return ""


def run(*arguments, simulated=True):
    paths = [*([str(FOLDER)] if simulated else []), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": str(int(simulated))}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


class Results:
    def __init__(self, device):
        self.simulated = device == "simulated"
        lines = run(ROOT / "tests/helpers/train_on_cuda.py", device, simulated=self.simulated).splitlines()
        self.runs = {tuple(result["run"]): result for result in map(json.loads, lines)}

    def cases(self, place):
        names = [case for case, where in self.runs if where == place and not case.endswith("oracle")]
        return names or pytest.skip("needs two GPUs")

    def problems(self, case, place):
        """What is not as on the CPU, not in order, or left behind; in autocast dense masks on the device stand for the
        CPU, which casts other operators."""
        ours = self.runs[case, place]
        reference = self.runs[(f"{case} oracle", "default") if case in AUTOCAST else (case, "cpu")]
        if errors := [run["error"] for run in (ours, reference) if "error" in run]:
            return errors
        others, rel = (0, 1e-6) if self.simulated else (0.2, 2e-2) if case in AUTOCAST else (0.05, 1e-3)
        found, expected = (entries(run["sets"]) for run in (ours, reference))
        races = Counter(ours["races"]) - Counter(self.runs["full", place].get("races"))
        checks = {
            f"{len(found ^ expected)} entries differ": len(found ^ expected) <= others * len(expected),
            f"losses {ours['losses']}": ours["losses"] == pytest.approx(reference["losses"], rel=rel),
            "the delta's file does not give the trained weights": ours["restored"],
            f"{ours['left']} bytes on the devices once the model is gone": not ours["left"],
            f"races that full fine-tuning does not have: {races}": not races,
        }
        return [problem for problem, passed in checks.items() if not passed]


def entries(sets):
    return {(name, index) for name, indices in sets.items() for index in indices}


@pytest.fixture(scope="module", params=["simulated", pytest.param("real", marks=pytest.mark.gpu)])
def results(request):
    if request.param == "real" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")
    if request.param == "simulated" and missing():
        pytest.skip(missing())
    return Results(request.param)


@pytest.mark.parametrize("place", PLACES)
def test_runs_are_as_on_the_cpu_and_their_streams_wait_for_each_other(results, place):
    problems = {case: results.problems(case, place) for case in results.cases(place)}
    assert not {case: found for case, found in problems.items() if found}
    assert len(entries(results.runs["id3", place]["sets"])) == 60


@pytest.mark.parametrize("place", PLACES)
def test_the_host_waits_once_in_a_step(results, place):
    if not results.simulated:
        pytest.skip("real devices do not count")
    floor = results.runs["full", place]["waits"]
    assert not results.runs["full", place]["races"] or place not in STREAMS, "the control has a race"
    for case in results.cases(place):
        assert results.runs[case, place]["waits"] - floor <= MOST_WAITS.get(case, 1), case
    assert results.runs["pafi", place]["waits"] == floor


@pytest.mark.parametrize("strategy", ["id3", "pafi"])
def test_a_follower_on_a_device_has_every_version_and_is_waited_for_once(results, strategy):
    found = results.runs[strategy, "stream"]
    assert all(found["equal"])
    assert not found["races"]
    if results.simulated:
        # the flat delta's free part is zero; the values of entries; those of the head's weight and bias; the sample
        assert found["waits"] == {"update": 1 + 1 + 2, "bytes": 0, "apply": 1}


COUNT = """import os, sys, launches, sparsify.selection.joined as joined
joined.LARGEST = 40  # the narrow models' matrices are looked at as wide ones are: a layer's at once, or one by one
joined.AT_ONCE, joined.LARGEST_AHEAD = 2400, 512 if "bert" in sys.argv else 0
launches.main(), os._exit(0)"""


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(("arch", "layers", "share"), [("bert", 12, 0.75), ("llama", 32, 0.85)])
def test_a_step_launches_fewer_kernels_than_lora_and_waits_once(arch, layers, share, tmp_path):
    run("-c", COUNT, "--arch", arch, "--layers", layers, "--json", tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows["id3"]["launches"] < share * rows["lora"]["launches"]
    assert rows["id3"]["waits"] == rows["floor"]["waits"] + 1
