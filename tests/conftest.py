"""Shared by all tests: no network, two threads, decisions that no clock takes, warnings of third parties kept quiet."""

import os
import sys
from pathlib import Path

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # where Triton is installed, its kernels run on the CPU
os.environ.setdefault("SPARSIFY_COSTS", "fixed")  # whatever else the machine does meanwhile
sys.path.insert(0, str(Path(__file__).parent))
