"""Devices that the host runs ahead of: a number that is read from one waits for all its work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

AHEAD = ("cuda",)  # types of devices that the host runs ahead of


def runs_ahead(device: torch.device) -> bool:
    """Whether the host runs ahead of a device, so that reading a number from it waits for all its work."""
    return device.type in AHEAD


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor from the host, from memory that is not pinned, to a device, without waiting for a GPU's work.

    CUDA has read such memory when the call returns.
    """
    return tensor.to(device, non_blocking=runs_ahead(device))


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copies numbers to a device (n,) int64, without waiting for the device's earlier work."""
    return send(torch.tensor(numbers, dtype=torch.int64), device)
