"""The hot loops: the plain torch form of each is its specification; ``triton.py`` has forms for GPUs.

Nothing waits for a GPU: the number of entries found is known on the device only. Triton is imported when a loop first
runs on a GPU, and tried there once; without it, where it cannot build a kernel, and in float64, the plain form runs.
"""

import logging
import os
from functools import cache
from importlib.util import find_spec

import torch

OLDEST = (8, 0)  # compute capability of a GPU that the kernels are compiled for
_LOG = logging.getLogger("sparsify")
_found = cache(find_spec)


def has_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on the device; those of its interpreter (``TRITON_INTERPRET=1``) run on any."""
    if _found("triton") is None:
        return False
    return os.environ.get("TRITON_INTERPRET") == "1" or (device.type == "cuda" and _builds(device))


@cache
def _builds(device: torch.device) -> bool:
    """Whether a kernel could be built and run on a GPU: it takes a C compiler and Python's headers."""
    try:
        if torch.version.hip is not None or torch.cuda.get_device_capability(device) < OLDEST:
            raise RuntimeError("expected an NVIDIA GPU of compute capability 8.0 or above")
        from sparsify.kernels.triton import scatter

        written = torch.zeros(1, device=device)
        scatter([written], [0], [1], torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, device=device))
        if written.item() != 1:
            raise RuntimeError("a kernel wrote nothing")
        _LOG.info("Triton builds up to seven kernels for %s, in half a second each, and keeps them on disk.", device)
    except Exception as error:  # a compiler's own kinds of errors are among them
        problem = "Triton does not work on %s (%s: %s): slower forms in plain torch are used there."
        _LOG.warning(problem, device, type(error).__name__, str(error).strip().partition("\n")[0])
        return False
    return True
