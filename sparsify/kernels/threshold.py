"""The entries of a matrix that reach a threshold."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.kernels.cpu.library import Address, Size, library

BLOCK_ENTRIES = 1 << 18  # compared together: small enough for a cache, large enough for a kernel launch
LOOPS = {torch.float32: "find_reaching_float32", torch.bfloat16: "find_reaching_bfloat16"}


class Reaching(NamedTuple):
    """The entries that were found."""

    indices: Tensor  # (n,) int64, flat, in no order
    finite: Tensor  # bool scalar on the values' device: whether all values are finite


def find_reaching(values: Tensor, least: Tensor) -> Reaching:
    """Finds the entries of (rows, cols) with abs(value) >= least (rows,) of their row; a NaN reaches nothing."""
    native = library() if values.device.type == "cpu" and values.dtype in LOOPS else None
    if native is None:
        return plain_find_reaching(values, least)
    values = values.contiguous()
    found, finite = torch.empty(values.numel(), dtype=torch.int64, device="cpu"), ctypes.c_bool()
    number = getattr(native, LOOPS[values.dtype])(
        *(Address(values), Size(values.shape[0]), Size(values.shape[1]), Address(least.float().contiguous())),
        *(Address(found), ctypes.byref(finite)),
    )
    return Reaching(found[:number], torch.tensor(finite.value))


def plain_find_reaching(values: Tensor, least: Tensor) -> Reaching:
    """The plain torch form of :func:`find_reaching`."""
    sizes = values.to(torch.promote_types(values.dtype, least.dtype), copy=True).abs_()
    found = (sizes >= least[:, None].to(sizes)).reshape(-1).nonzero().squeeze(1)
    return Reaching(found, sizes.isfinite().all())
