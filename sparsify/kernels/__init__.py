"""The hot loops. Each file has a loop in plain torch, its specification; its faster forms are beside it.

    select   score, compare and keep the entries that reach a threshold, in one pass     triton_select.py
    sddmm    single entries of a matrix product                                      triton_sddmm.py, native_sddmm.py
    sync     base + delta into all weights at once                                   triton_sync.py
    survey   the entries of a product that could reach a threshold                   C++, called from its own file
    reach    the entries of a matrix that reach a threshold                          likewise

Nothing waits for a GPU: how many entries there are is known on the device only. Triton is imported, and
``native.py`` compiles the C++, where a loop first runs; where that cannot be, or in float64, the plain form runs.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch


def has_triton(device: torch.device) -> bool:
    """Whether Triton is installed and can run kernels there; its interpreter (``TRITON_INTERPRET=1``) runs anywhere."""
    return _is_installed() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None
