"""Raw bits of tensors: hash and compare them, for any dtype and strides."""

import hashlib
import sys

import torch
from torch import Tensor


def as_bits(values: Tensor) -> Tensor:
    """Views a tensor as integers, which are equal where the bits are, NaN and -0.0 included."""
    if values.element_size() == 16:  # complex128
        values = torch.view_as_real(values)
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def digest(values: Tensor) -> str:
    """SHA-256, in hex, of a tensor's values as little-endian bytes of its dtype."""
    values = values.detach().cpu().reshape(-1)
    as_bytes = values.contiguous().view(torch.uint8)
    if sys.byteorder == "big":
        as_bytes = as_bytes.view(-1, values.element_size()).flip(1).contiguous()
    sha256 = hashlib.sha256()
    for part in as_bytes.split(1 << 24):
        sha256.update(part.clone().numpy().data)  # numpy() would keep the tensor's own storage from being resized
    return sha256.hexdigest()


def same_values(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit, NaN and -0.0 included."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(as_bits(left.detach()), as_bits(right.detach().to(left.device)))
