"""Copies and writes that wait for no device: reading a number from a GPU waits for all its work."""

from collections.abc import Sequence

import torch
from torch import Tensor

AHEAD = ("cuda",)  # types of devices that the host runs ahead of


def runs_ahead(device: torch.device) -> bool:
    """Whether the host runs ahead of a device, so that reading a number from it waits for all its work."""
    return device.type in AHEAD


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copies numbers to a device (n,) int64, without waiting for the device's earlier work."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device, non_blocking=device.type in AHEAD)


def put(tensor: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Writes values (n,) into a tensor, at distinct flat indices (n,); unlike ``put_``, deterministic."""
    if tensor.is_contiguous():
        tensor.view(-1).index_copy_(0, indices, values)  # faster than index_put_
    else:
        tensor.index_put_(torch.unravel_index(indices, tensor.shape), values)
    return tensor
