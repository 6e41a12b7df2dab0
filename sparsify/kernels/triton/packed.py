"""Both factors of a product, transposed into one buffer, where a dot product over the tokens reads consecutive numbers.

A *place* is a row of the buffer: those of the left factor's columns come first, then, from the next whole tile on,
those of the right one's, each in the factor's own order or in a given one. Rows and columns that fill up the last tile
and the last block of tokens are zero, so that loops over tiles need no masks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128  # places to a multiple of which each factor is filled up
TOKENS = 64  # the same for tokens
BLOCK = 64  # tokens and places that a program transposes
ENTRIES = 16  # of a program


class Packed(NamedTuple):
    """Two factors in one buffer."""

    values: Tensor  # (left_places + right places, tokens, filled up)
    places: Tensor  # (rows + cols,) int32, of each column of the left factor, then of the right one's
    rows: int
    cols: int
    left_places: int

    @property
    def tokens(self) -> int:
        """Number of tokens, filled up."""
        return self.values.shape[1]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes as kernels take them."""
        return self.rows, self.cols, self.left_places, self.tokens


def pack(left: Tensor, right: Tensor, order: Tensor | None = None) -> Packed:
    """Packs left (n, rows) and right (n, cols), of at least one token.

    ``order`` (rows + cols,) int64 has the columns of the left factor, then, from ``rows`` on, those of the right one.
    """
    (tokens, rows), cols = left.shape, right.shape[1]
    left_places, right_places = (triton.cdiv(number, TILE) * TILE for number in (rows, cols))
    blocks = triton.cdiv(tokens, TOKENS)
    values = left.new_empty(left_places + right_places, blocks * TOKENS)
    places = torch.empty(rows + cols, dtype=torch.int32, device=left.device)
    packed = Packed(values, places, rows, cols, left_places)
    with torch.cuda.device_of(left):
        _pack[(values.shape[0] // BLOCK, blocks)](
            *(left, right, places if order is None else order, values, places),
            *(tokens, *packed.sizes, *left.stride(), *right.stride()),
            **{"has_order": order is not None, "block": BLOCK},
        )
    return packed


def packed_sddmm(packed: Packed, indices: Tensor) -> Tensor:
    """Computes entries (k,) of the product; see :func:`sparsify.kernels.sddmm.sddmm`. Takes at least one entry."""
    number = indices.numel()
    out = torch.empty(number, dtype=torch.float32, device=indices.device)
    with torch.cuda.device_of(indices):
        _packed_sddmm[(triton.cdiv(number, ENTRIES),)](
            *(packed.values, packed.places, indices.contiguous(), out, number, *packed.sizes),
            **{"entries": ENTRIES, "at_once": TOKENS},
        )
    return out


@triton.jit
def _pack(
    left, right, order, values, places, tokens, rows, cols, left_places, pitch,
    left_token, left_column, right_token, right_column, has_order: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * block  # places first: programs that run together read the same tokens
    if first < left_places:
        _pack_block(
            left, order, 0, values, places, first, tokens, rows, pitch, left_token, left_column, has_order, block
        )
    else:
        values += left_places.to(tl.int64) * pitch
        first -= left_places
        _pack_block(
            right, order + rows, rows, values, places + rows, first, tokens, cols, pitch, right_token, right_column,
            has_order, block,
        )  # fmt: skip


@triton.jit
def _pack_block(
    factor, order, before, values, places, first, tokens, number, pitch, token_stride, column_stride,
    has_order: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    place = first.to(tl.int64) + tl.arange(0, block)
    token = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)
    there = place < number
    column = place
    if has_order:
        column = tl.load(order + place, mask=there, other=before) - before
    inside = (token < tokens)[:, None] & there[None, :]
    read = tl.load(factor + token[:, None] * token_stride + column[None, :] * column_stride, mask=inside, other=0.0)
    tl.store(values + place[:, None] * pitch + token[None, :], tl.trans(read))
    if tl.program_id(1) == 0:
        tl.store(places + column, place.to(tl.int32), mask=there)


@triton.jit
def _packed_sddmm(
    values, places, indices, out, number, rows, cols, left_places, pitch, entries: tl.constexpr, at_once: tl.constexpr
):
    entry = tl.program_id(0).to(tl.int64) * entries + tl.arange(0, entries)
    inside = entry < number
    index = tl.load(indices + entry, mask=inside, other=0)
    tl.store(out + entry, dots(values, places, index, rows, cols, left_places, pitch, entries, at_once), mask=inside)


@triton.jit
def dots(values, places, index, rows, cols, left_places, pitch, entries: tl.constexpr, at_once: tl.constexpr):
    """The product's entries at flat indices (entries,), summed in float32."""
    left = tl.load(places + index // cols).to(tl.int64)
    right = tl.load(places + rows + index % cols).to(tl.int64) + left_places
    total = tl.zeros((entries,), dtype=tl.float32)
    for first in range(0, pitch, at_once):
        token = (first + tl.arange(0, at_once))[None, :]
        factor = tl.load(values + left[:, None] * pitch + token).to(tl.float32)
        other = tl.load(values + right[:, None] * pitch + token).to(tl.float32)
        total += tl.sum(factor * other, axis=1)
    return total
