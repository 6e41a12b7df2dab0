"""Shared by all tests: no network, the cores shared out among pytest's processes, decisions that no clock takes."""

import os
import sys
from pathlib import Path

PROCESSES = os.environ.get("PYTEST_XDIST_WORKER_COUNT")
if PROCESSES is not None:  # in one of them, and not where they are started
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(PROCESSES))))

import torch  # noqa: E402 - which reads the number of threads when it is imported

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # where Triton is installed, its kernels run on the CPU
sys.path.insert(0, str(Path(__file__).parent / "helpers"))
