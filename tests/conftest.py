"""Shared by all tests: no network, the cores shared out among pytest's processes, kernels on a CPU and on a GPU."""

import os
import sys
from pathlib import Path

PROCESSES = os.environ.get("PYTEST_XDIST_WORKER_COUNT")
if PROCESSES is not None:  # in one of them, and not where they are started
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(PROCESSES))))

import pytest  # noqa: E402
import torch  # noqa: E402 - which reads the number of threads when it is imported
from hypothesis import settings  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # where Triton is installed, its kernels run on the CPU
settings.load_profile("ci")  # of hypothesis: the same examples each time, however long they take,
providers._get_local_constants = providers.Constants  # and whichever modules a process has imported by then
sys.path[:0] = [str(Path(__file__).parent / "helpers"), str(Path(__file__).parents[1])]  # which has `examples`


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random numbers."""
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where tensors are made: on the CPU, where Triton interprets its kernels, or on a GPU, which runs them."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")
    device = torch.device(request.param)
    with device:
        yield device
