"""Whether the processes of all methods fit into memory beside each other: an estimate, on the safe side."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from sparsify.bench.settings import DTYPES, Settings
from sparsify.bench.shapes import SHAPES, depth_ratio

# numbers of the weights' dtype that a method keeps for each parameter, at its peak
PER_PARAMETER = {"full": 4.0, "dense-id3": 10.0}
FROZEN = 1.5
PER_ACTIVATION = 30  # numbers that a layer keeps for each token and hidden unit; a BERT's floor has 28
LIBRARIES = 2**29
SHARE = 0.7  # of the memory
_MEMINFO = Path("/proc/meminfo")


def share_rounds(points: Sequence[Sequence[Settings]]) -> list[list[Settings]]:
    """Methods that are measured in the same rounds: those of all points where memory holds them, else of one each."""
    everything = [one for point in points for one in point]
    return [everything] if fit_together(everything) else [list(point) for point in points]


def fit_together(settings: Sequence[Settings]) -> bool:
    """Whether all of them can be alive at once."""
    return sum(estimate(one) for one in settings) < SHARE * memory_of(settings[0])


def estimate(settings: Settings) -> float:
    """Bytes that one method takes, about."""
    shape = SHAPES[settings.shape]
    deeper = depth_ratio(settings)
    numbers = PER_PARAMETER.get(settings.method, FROZEN) * 1e6 * shape.millions * max(1.0, deeper)
    numbers += PER_ACTIVATION * settings.batch * settings.length * shape.width * deeper
    return numbers * DTYPES[settings.dtype].itemsize + LIBRARIES


def memory_of(settings: Settings) -> int:
    """Bytes of the GPU, or bytes that the system could still give."""
    if settings.is_cuda:
        return torch.cuda.get_device_properties(settings.device).total_memory
    if _MEMINFO.exists():
        (kilobytes,) = re.findall(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text())
        return int(kilobytes) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
