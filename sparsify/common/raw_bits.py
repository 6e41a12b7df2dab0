"""Tensors as the bits that they are stored in: hash, compare and write them, whatever their dtype and strides."""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import Tensor


def put(tensor: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Writes values (n,) into a tensor at distinct flat, row-major indices (n,), whatever its strides.

    ``Tensor.put_`` does so too, but ``torch.use_deterministic_algorithms(True)`` forbids it.

    Example:
        >>> put(torch.zeros(2, 2), torch.tensor([3, 0]), torch.tensor([1.0, 2.0]))
        tensor([[2., 0.],
                [0., 1.]])
    """
    if tensor.is_contiguous():
        tensor.view(-1).index_put_((indices,), values)
    else:
        tensor.index_put_(torch.unravel_index(indices, tensor.shape), values)
    return tensor


def as_bits(values: Tensor) -> Tensor:
    """The same memory as integers: tensors are equal in every bit where these are, NaN and -0.0 included."""
    if values.element_size() == 16:  # complex128
        values = torch.view_as_real(values)
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def digest(values: Tensor) -> str:
    """SHA-256, in hex, of a tensor's values as little-endian bytes in its own dtype.

    Example:
        >>> digest(torch.tensor([1.0])) == hashlib.sha256(bytes.fromhex("0000803f")).hexdigest()
        True
    """
    values = values.detach().cpu().reshape(-1)
    as_bytes = values.contiguous().view(torch.uint8)
    if sys.byteorder == "big":
        as_bytes = as_bytes.view(-1, values.element_size()).flip(1).contiguous()
    return hashlib.sha256(as_bytes.numpy().data).hexdigest()


def same_values(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit, NaN and -0.0 included.

    Example:
        >>> same_values(torch.tensor([0.0]), torch.tensor([-0.0]))
        False
    """
    return left.dtype == right.dtype and left.shape == right.shape and digest(left) == digest(right)
