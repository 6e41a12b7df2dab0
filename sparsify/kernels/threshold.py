"""The entries of a matrix that reach a threshold, or could, given how far each may be off."""

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
    finite: Tensor  # bool scalar on the values' device: whether all values are finite, with their errors too


class Errors(NamedTuple):
    """How far a matrix's entries may be off: entry (i, j) by no more than row[i] * column[j]."""

    row: Tensor  # (rows,) float32
    column: Tensor  # (cols,) float32


def find_reaching(values: Tensor, least: Tensor, errors: Errors | None = None) -> Reaching:
    """Finds the entries with abs(value) + error >= least of their row; a NaN reaches nothing.

    Args:
        values: (rows, cols).
        least: (rows,).
        errors: of the values; ``None`` where these are exact.

    Example:
        >>> find_reaching(torch.tensor([[1.0, -3.0], [2.0, 0.0]]), torch.tensor([2.0, 2.0])).indices
        tensor([1, 2])
    """
    native = library() if values.device.type == "cpu" and values.dtype in LOOPS else None
    if native is None:
        return plain_find_reaching(values, least, errors)
    values = values.contiguous()
    row_error, column_error = (None, None) if errors is None else errors
    found, finite = torch.empty(values.numel(), dtype=torch.int64, device="cpu"), ctypes.c_bool()
    number = getattr(native, LOOPS[values.dtype])(
        *(Address(values), Size(values.shape[0]), Size(values.shape[1]), Address(least.float().contiguous())),
        *(Address(row_error), Address(column_error), Address(found), ctypes.byref(finite)),
    )
    return Reaching(found[:number], torch.tensor(finite.value))


def plain_find_reaching(values: Tensor, least: Tensor, errors: Errors | None = None) -> Reaching:
    """The plain torch form of :func:`find_reaching`."""
    most = values.to(torch.promote_types(values.dtype, least.dtype), copy=True).abs_()
    if errors is not None:
        most.addcmul_(errors.row[:, None], errors.column)
    found = (most >= least[:, None].to(most)).reshape(-1).nonzero().squeeze(1)
    return Reaching(found, most.isfinite().all())
