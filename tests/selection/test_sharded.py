"""Several ranks on devices: a step's host waits and races, on simulated CUDA devices and with a mocked second rank.

What they select is tested with real ranks, by ``behaviour/test_distributed.py``.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("SPARSIFY_FAKE_CUDA") or ROOT.parent / "shared" / "fake_cuda")
IS_THERE = (FOLDER / "fake_cuda.py").is_file() and shutil.which(os.environ.get("CXX", "g++")) is not None
IS_THERE &= torch.version.cuda is None and torch.__version__.startswith("2.13")


@pytest.mark.skipif(not IS_THERE, reason="needs ../shared/fake_cuda, a C++ compiler and the CPU build of torch 2.13")
def test_with_ranks_too_a_step_waits_for_its_device_once_however_many_tensors():
    paths = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(ROOT / "tests/helpers/ranks_on_fake_cuda.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    flat, deep, on_two_devices = map(json.loads, done.stdout.splitlines())
    assert deep["exchanges"] - flat["exchanges"] == 2 * 3, "three more matrices: a header and an average for each"
    for found in (flat, deep, on_two_devices):
        assert found["waits"] == 1
        assert not found["races"]
        assert found["unmasked"] == 12
