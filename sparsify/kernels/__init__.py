"""The hot loops: the plain torch form of each is its specification; ``triton/`` has forms for GPUs.

Nothing waits for a GPU: the number of entries found is known on the device only. Triton is imported when a loop first
runs on a GPU; without it, and in float64, the plain form runs.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch


def has_triton(device: torch.device) -> bool:
    """Whether Triton is installed and runs on the device; its interpreter (``TRITON_INTERPRET=1``) runs on any."""
    return _is_installed() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None
