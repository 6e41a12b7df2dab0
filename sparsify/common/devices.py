"""Devices that the host runs ahead of, and how to reach them without a wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

AHEAD = ("cuda",)  # types of devices that the host runs ahead of


def runs_ahead(device: torch.device) -> bool:
    """Whether the host runs ahead of a device, so that reading a number from it means waiting for all its work."""
    return device.type in AHEAD


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copies numbers of the host to a device (n,) int64, without waiting for what the device has to do before."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
