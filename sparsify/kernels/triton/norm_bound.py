"""The Triton form of ``kernels/norm_bound.py``: screens a product on a GPU, and adds what it finds to the candidates.

Both factors are packed (``packed.py``) in the order of their norms (``norms.py``).

``_mark``          sets a bit for each entry that is excluded
``_screen``        a program multiplies one tile, unless the norms rule it out, and notes the entries that could reach
                   the threshold; the tile is never written
``_verify``        computes the noted entries as dot products, scores them, and keeps candidates as ``_select`` does
``_raise``         a single program: where more entries were noted than find room, those that did give a higher
                   threshold for a second round of both
``_screen_again``  a single program, which cuts. Where the second round was too much as well, which takes many equal
                   scores, it takes tile by tile of what the norms leave in full, and cuts whenever places run out
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsify.core.importance import D3, ROUNDING_SLACK
from sparsify.kernels.candidates import Candidates, Factors
from sparsify.kernels.norm_bound import SMALLEST_THRESHOLD, norms_slack, rounding_of, underflow
from sparsify.kernels.triton.norms import norms_of
from sparsify.kernels.triton.packed import TILE, TOKENS, dots, pack, packed_sddmm
from sparsify.kernels.triton.select import (
    AGAIN_WARPS,
    CUT_BLOCK,
    CUT_WARPS,
    append,
    arrays,
    exact_exponent,
    keep_best,
    may_be_selected,
    score_of,
    sizes,
    store,
    worst_of_best,
)

TF32_ROUNDING = 1.02 * 2.0**-10  # of one number, which the units may cut off, with the terms of higher order
SMALLEST = tl.constexpr(SMALLEST_THRESHOLD)
SCREEN_WARPS = 8
GROUP = 8  # rows of tiles that are multiplied together, so that they share what is in the cache
NOTED_WIDTH = tl.constexpr(16)  # columns of a tile whose entries a program notes at once
SMALL_TILE, SMALL_DEPTH = 32, 16  # of the single program, which sees all of a tile's entries at once
VERIFIED, VERIFIERS = 16, 1024  # entries that a program verifies at once, and programs


def screen_d3(candidates: Candidates, importance: D3, factors: Factors) -> Tensor:
    """See :func:`sparsify.kernels.select.select_product`."""
    left, right, weight, offset, unmasked, excluded = factors
    (tokens, rows), cols, device = left.shape, right.shape[1], left.device
    weight, finite = weight.contiguous(), candidates.finite.view(torch.int8)
    noted = torch.empty(candidates.capacity - candidates.limit, dtype=torch.int64, device=device)
    marks = torch.zeros(triton.cdiv(rows * cols, 32), dtype=torch.int32, device=device)
    with torch.cuda.device_of(left):
        norms, order = norms_of(left, right, finite)
        packed = pack(left, right, order)
        if excluded.numel():
            _mark[(triton.cdiv(excluded.numel(), 1024),)](marks, excluded, excluded.numel(), block=1024)
        # what is verified is summed once more
        rounding = rounding_of(2 * tokens, 2 * TF32_ROUNDING if left.dtype == torch.float32 else 0)
        lowest, slack = importance.eps**importance.exp / ROUNDING_SLACK, norms_slack(tokens)
        state = noted.numel(), candidates.count, candidates.threshold, finite
        scoring = weight, offset, importance.eps, float(importance.exp)
        # the interpreter multiplies the bits of bfloat16
        widens = left.dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1"
        form: dict[str, Any] = {"exact_exp": exact_exponent(importance)}
        for second in (0, 1):
            _screen[(triton.cdiv(rows, TILE) * triton.cdiv(cols, TILE),)](
                *(packed.values, order, norms, marks, noted, *state, lowest, slack, rounding, underflow(tokens)),
                *(*packed.sizes, second, widens, TILE, depth_of(left.itemsize), GROUP),
                num_warps=SCREEN_WARPS,
            )
            _verify[(min(VERIFIERS, triton.cdiv(noted.numel(), VERIFIED)),)](
                *(packed.values, packed.places, noted, noted.numel(), *packed.sizes, *scoring, finite),
                *(*arrays(candidates), candidates.capacity, second),
                **(form | {"block": VERIFIED, "at_once": TOKENS}),
            )
            if not second:
                _raise[(1,)](
                    *(*arrays(candidates), noted.numel(), candidates.size, candidates.total.bit_length(), CUT_BLOCK),
                    num_warps=CUT_WARPS,
                )
        _screen_again[(1,)](
            *(packed.values, order, norms, marks, *state, lowest, slack, *packed.sizes, *scoring),
            *(*arrays(candidates)[:4], *sizes(candidates, candidates.limit)),
            **(form | {"widens": widens, "tile": SMALL_TILE, "depth": SMALL_DEPTH, "num_warps": AGAIN_WARPS}),
        )
        return packed_sddmm(packed, unmasked) if unmasked.numel() else norms[:0]


def depth_of(itemsize: int) -> int:
    """Tokens that are multiplied at once: as many bytes for all numbers."""
    return TOKENS * 2 // itemsize


@triton.jit
def _mark(marks, indices, number, block: tl.constexpr):
    entry = tl.program_id(0) * block + tl.arange(0, block)
    inside = entry < number
    index = tl.load(indices + entry, mask=inside, other=0)
    bit = tl.full((block,), 1, tl.int32) << (index % 32).to(tl.int32)
    tl.atomic_or(marks + index // 32, bit, mask=inside)


@triton.jit
def _screen(
    values, order, norms, marks, noted, room, count, threshold, finite, lowest, slack, rounding,
    underflow, rows, cols, left_places, pitch,
    second: tl.constexpr, widens: tl.constexpr, tile: tl.constexpr, depth: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows, tile)
    in_group = group * tl.cdiv(cols, tile)
    start = tl.program_id(0) // in_group * group
    height = tl.minimum(group, tiles - start)
    i = (start + tl.program_id(0) % in_group % height) * tile
    j = tl.program_id(0) % in_group // height * tile
    # once a gradient is not finite, no entry matters any more; a second round is for what the first had no room for
    if (tl.load(finite) != 0) & (tl.load(count + 4) == second):
        least = least_gradient(tl.load(threshold), lowest)
        if may_reach(least, order, norms, rows, i, j, slack):
            total = _multiplied(values, left_places, pitch, i, j, tile, depth, "tf32", widens)
            _note(
                total, order, norms, marks, noted, room, count, least, rounding, underflow,
                rows, cols, i, j, tile, tile,
            )  # fmt: skip


@triton.jit
def _note(
    g, order, norms, marks, noted, room, count, least, rounding, underflow, rows, cols, i, j,
    height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    if width > NOTED_WIDTH:  # few entries at once, or registers are spilled
        left, right = tl.split(tl.permute(tl.reshape(g, (height, 2, width // 2)), (0, 2, 1)))
        _note(
            left, order, norms, marks, noted, room, count, least, rounding, underflow, rows, cols,
            i, j, height, width // 2,
        )  # fmt: skip
        _note(
            right, order, norms, marks, noted, room, count, least, rounding, underflow, rows, cols,
            i, j + width // 2, height, width // 2,
        )  # fmt: skip
        return
    row, column, inside = _columns_of(order, rows, cols, i, j, height, width)
    error = tl.load(norms + row) * rounding + underflow
    most = tl.abs(g) + error[:, None] * tl.load(norms + rows + column)[None, :]
    near = inside & ((most < least) == 0)
    if tl.sum(near.to(tl.int32)) > 0:
        index = row[:, None] * cols + column[None, :]
        kept = tl.ravel(near & (is_marked(marks, index, near) == 0))
        first = tl.atomic_add(count + 3, tl.sum(kept.to(tl.int32)).to(tl.int64), sem="relaxed")
        target = first + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(noted + target, tl.ravel(index), mask=kept & (target < room))


@triton.jit
def _verify(
    values, places, noted, room, rows, cols, left_places, pitch, weight, offset, eps, exp, finite,
    ids, scores, grads, weights, count, threshold, capacity,
    second: tl.constexpr, exact_exp: tl.constexpr, block: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    number = tl.where(tl.load(count + 4) == second, tl.minimum(tl.load(count + 3), room), 0)
    first = tl.program_id(0).to(tl.int64) * block
    while first < number:
        entry = first + tl.arange(0, block)
        inside = entry < number
        index = tl.load(noted + entry, mask=inside, other=0)
        g = dots(values, places, index, rows, cols, left_places, pitch, block, at_once)
        w, score, keep = _scored(weight, index, inside, g, tl.load(threshold), eps, exp, finite, exact_exp)
        append(ids, scores, grads, weights, count, capacity, index + offset, score, g, w, keep)
        first += tl.num_programs(0).to(tl.int64) * block


@triton.jit
def _scored(weight, index, inside, g, threshold, eps, exp, finite, exact_exp: tl.constexpr):
    """Weights and scores of entries, and which reach the threshold; a gradient that is not finite is noted."""
    w = tl.load(weight + index, mask=inside, other=0.0).to(tl.float32)
    score = score_of(g, w, eps, exp, exact_exp)
    if tl.sum((inside & ((tl.abs(g) < float("inf")) == 0)).to(tl.int32)) > 0:
        tl.store(finite, 0)
    return w, score, inside & may_be_selected(g, score) & (score >= threshold)


@triton.jit
def _raise(ids, scores, grads, weights, count, threshold, room, size, id_bits, block: tl.constexpr):
    if tl.load(count + 3) > room:
        number, worst = _as_before(ids, scores, grads, weights, count, threshold, size, id_bits, block)
        tl.store(threshold, worst)
        tl.store(count, number)
        tl.store(count + 2, number)
        tl.store(count + 3, tl.full((), 0, tl.int64))
        tl.store(count + 4, tl.full((), 1, tl.int64))


@triton.jit
def _as_before(ids, scores, grads, weights, count, threshold, size, id_bits, block: tl.constexpr):
    """Drops the candidates since the last cut; before that, all of them raise the threshold.

    Returns how many candidates are left, and the threshold.
    """
    number = tl.load(count)
    before = tl.load(count + 2)
    worst = tl.load(threshold)
    if number >= size:
        worst, last = worst_of_best(ids, scores, number, size, id_bits, block)
        before = keep_best(ids, scores, grads, weights, before, worst, last, block)
    return before, worst


@triton.jit
def _screen_again(
    values, order, norms, marks, room, count, threshold, finite, lowest, slack, rows, cols, left_places, pitch,
    weight, offset, eps, exp, ids, scores, grads, weights, size, limit, capacity, id_bits,
    exact_exp: tl.constexpr, widens: tl.constexpr, tile: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    number = tl.load(count)
    worst = tl.load(threshold)
    if (tl.load(count + 3) > room) & (tl.load(finite) != 0):
        number, worst = _as_before(ids, scores, grads, weights, count, threshold, size, id_bits, tile * tile)
        for i in range(0, rows, tile):
            for j in range(0, cols, tile):
                if may_reach(least_gradient(worst, lowest), order, norms, rows, i, j, slack):
                    g = tl.ravel(_multiplied(values, left_places, pitch, i, j, tile, depth, "ieee", widens))
                    row, column, inside = _columns_of(order, rows, cols, i, j, tile, tile)
                    index, inside = tl.ravel(row[:, None] * cols + column[None, :]), tl.ravel(inside)
                    inside = inside & (is_marked(marks, index, inside) == 0)
                    w, score, keep = _scored(weight, index, inside, g, worst, eps, exp, finite, exact_exp)
                    target = number + tl.cumsum(keep.to(tl.int32), 0) - 1
                    store(ids, scores, grads, weights, target, index + offset, score, g, w, keep)
                    number += tl.sum(keep.to(tl.int32))
                    tl.debug_barrier()  # all of the tile is written before it is read
                    if number + tile * tile > capacity:
                        worst, last = worst_of_best(ids, scores, number, size, id_bits, tile * tile)
                        number = keep_best(ids, scores, grads, weights, number, worst, last, tile * tile)
    if number > limit:
        worst, last = worst_of_best(ids, scores, number, size, id_bits, tile * tile)
        number = keep_best(ids, scores, grads, weights, number, worst, last, tile * tile)
    tl.store(threshold, worst)
    tl.store(count, number)
    tl.store(count + 2, number)
    tl.store(count + 3, tl.full((), 0, tl.int64))
    tl.store(count + 4, tl.full((), 0, tl.int64))


@triton.jit
def least_gradient(threshold, lowest):
    """The smallest abs(gradient) that can reach the threshold, by any weight; below 0 where any can."""
    return tl.where(threshold > SMALLEST, threshold * lowest, -1.0)


@triton.jit
def may_reach(least, order, norms, rows, i, j, slack):
    """Whether a tile's largest bound reaches; its first row and column have the largest norms, or one that is NaN."""
    of_row, of_column = tl.load(norms + tl.load(order + i)), tl.load(norms + tl.load(order + rows + j))
    return (of_row * of_column * slack < least) == 0


@triton.jit
def is_marked(marks, index, inside):
    """Whether entries are excluded."""
    return (tl.load(marks + index // 32, mask=inside, other=0) >> (index % 32).to(tl.int32)) & 1


@triton.jit
def _multiplied(
    values, left_places, pitch, i, j, tile: tl.constexpr, depth: tl.constexpr, precision: tl.constexpr,
    widens: tl.constexpr,
):  # fmt: skip
    """A tile (tile, tile) of the product of the packed factors."""
    left = values + (i + tl.arange(0, tile)).to(tl.int64)[:, None] * pitch
    right = values + (left_places + j + tl.arange(0, tile)).to(tl.int64)[None, :] * pitch
    total = tl.zeros((tile, tile), tl.float32)
    for first in range(0, pitch, depth):
        token = first + tl.arange(0, depth)
        factor, other = tl.load(left + token[None, :]), tl.load(right + token[:, None])
        if widens:
            factor, other = factor.to(tl.float32), other.to(tl.float32)
        total = tl.dot(factor, other, total, input_precision=precision)
    return total


@triton.jit
def _columns_of(order, rows, cols, i, j, height: tl.constexpr, width: tl.constexpr):
    """The weight's rows (height,) and columns (width,) of a tile, and which of its entries there are."""
    row, column = i + tl.arange(0, height), j + tl.arange(0, width)
    there, also = row < rows, column < cols
    row, column = tl.load(order + row, mask=there, other=0), tl.load(order + rows + column, mask=also, other=rows)
    return row, column - rows, there[:, None] & also[None, :]
