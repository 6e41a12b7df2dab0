"""Writes values into many weights in one launch, each at its weight's address. Torch casts, this moves bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsify.common.raw_bits import as_bits
from sparsify.core.devices import upload

BLOCK = 1024  # entries of a program


def scatter(
    weights: Sequence[Tensor], counts: Sequence[int], indices: Tensor, values: Tensor, seen: bool = True
) -> None:
    """Writes values (k,) into weights, ``counts`` for each, at flat indices (k,); ``seen``: by version counters."""
    number = indices.numel()
    written = [weight for weight, count in zip(weights, counts, strict=True) if count]
    repeats = [count for count in counts if count]
    for device, dtype in dict.fromkeys((weight.device, weight.dtype) for weight in written):
        there = [(weight.device, weight.dtype) == (device, dtype) for weight in written]
        table = [weight.data_ptr() if own else 0 for weight, own in zip(written, there, strict=True)]
        addresses = upload(table, device).repeat_interleave(upload(repeats, device), output_size=number)
        bits, places = (part.to(device, non_blocking=True) for part in (as_bits(values.to(dtype)), indices))
        with torch.cuda.device_of(bits):
            _scatter[(triton.cdiv(number, BLOCK),)](addresses, places, bits, number, block=BLOCK)
    for weight in written if seen else ():
        torch.autograd.graph.increment_version(weight)


@triton.jit(do_not_specialize=["number"])
def _scatter(addresses, indices, values, number, block: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    address = tl.load(addresses + entry, mask=entry < number, other=0)
    mine = address != 0  # those of another dtype, or on another device, have their own launch
    index = tl.load(indices + entry, mask=mine, other=0)
    value = tl.load(values + entry, mask=mine, other=0)
    tl.store(address.to(tl.pointer_type(values.dtype.element_ty)) + index, value, mask=mine)
