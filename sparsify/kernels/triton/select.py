"""The Triton forms of ``kernels/select.py``: one pass over weight and gradient, and one program that cuts.

``select_d3``   A program scores a block of entries and reserves places for those that it keeps with one atomic
                addition: they come in any order, but it is always the same set.
``cut``         A single program. It finds the worst score that stays, and the last id of those that have it, bit by
                bit: positive floats are ordered as their bits are.

Where a block's entries find no room, no later block's do, since the count only grows. All candidates so far give a
threshold; then a single program takes the part again from its start, and cuts whenever the places run out.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sparsify.kernels.candidates import Candidates, Part

BLOCK = 1024  # entries that a program scores at once
AGAIN_WARPS = 8  # of the one program that scores and cuts; with more warps, or larger blocks, registers spill
CUT_BLOCK, CUT_WARPS = 2048, 16  # entries that the one program which cuts looks at at once, and its warps
EXACT_EXPONENTS = (0.0, 1.0, 2.0)  # products alone; others take a logarithm, in float64 to round as torch does


def select_d3(candidates: Candidates, importance: Any, part: Part, overflows: bool) -> None:
    """See :func:`sparsify.kernels.select.select`."""
    weight, grad, rows, offset, ids, start, stop = part
    entries = (
        *(weight.contiguous(), grad.contiguous(), grad if rows is None else rows.contiguous()),
        *(grad if ids is None else ids, start, stop, offset, grad.shape[1], importance.eps, float(importance.exp)),
    )
    exact_exp = int(importance.exp) if importance.exp in EXACT_EXPONENTS else -1
    form: dict[str, Any] = {"exact_exp": exact_exp, "has_rows": rows is not None, "has_ids": ids is not None}
    arrays = (*candidates.arrays, candidates.count, candidates.threshold)
    with torch.cuda.device_of(grad):
        finite = candidates.finite.view(torch.int8)
        _select[(triton.cdiv(stop - start, BLOCK),)](
            *entries, *arrays, finite, candidates.capacity, **form, block=BLOCK
        )
        if overflows:
            free = candidates.capacity - candidates.size
            block = min(BLOCK, 1 << free.bit_length() - 1)  # finds room after a cut
            _select_again[(1,)](
                *entries, *arrays, *_sizes(candidates, candidates.limit), **form, block=block, num_warps=AGAIN_WARPS
            )


def cut(candidates: Candidates, limit: int) -> None:
    """See :func:`sparsify.kernels.select.cut`."""
    arrays = (*candidates.arrays, candidates.count, candidates.threshold)
    with torch.cuda.device_of(candidates.ids):
        _cut[(1,)](*arrays, *_sizes(candidates, limit), block=CUT_BLOCK, num_warps=CUT_WARPS)


def _sizes(candidates: Candidates, limit: int) -> tuple[int, ...]:
    """Sizes as kernels that cut take them: candidates to keep, the limit, the capacity, and the bits of an id."""
    return candidates.size, limit, candidates.capacity, candidates.total.bit_length()


@triton.jit
def _score(
    weight, grad, rows, entry_ids, offset, cols, eps, exp, place, inside,
    exact_exp: tl.constexpr, has_rows: tl.constexpr, has_ids: tl.constexpr,
):  # fmt: skip
    """Id, gradient, weight and score of the entries at some places, and which of them may be selected at all."""
    g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    own = place + offset
    if has_ids:
        own = tl.load(entry_ids + place, mask=inside, other=0)
    if has_rows:  # flat in the gradient so far, now in the weight
        place = tl.load(rows + place // cols, mask=inside, other=0) * cols + place % cols
        own = place + offset
    w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    score = tl.abs(g)
    base = tl.abs(w) + eps
    if exact_exp == 1:
        score = tl.div_rn(score, base)
    if exact_exp == 2:
        score = tl.div_rn(score, base * base)
    if exact_exp == -1:
        score = tl.div_rn(score, tl.exp2(exp * tl.log2(base.to(tl.float64))).to(tl.float32))
    return own, g, w, score, inside & (score > 0) & (score < float("inf")) & (tl.abs(g) > 0)


@triton.jit
def store(ids, scores, grads, weights, target, own, score, g, w, keep):
    """Writes those of a block's entries that are to be kept to their places among the candidates."""
    tl.store(ids + target, own, mask=keep)
    tl.store(scores + target, score, mask=keep)
    tl.store(grads + target, g, mask=keep)
    tl.store(weights + target, w, mask=keep)


@triton.jit
def _select(
    weight, grad, rows, entry_ids, start, stop, offset, cols, eps, exp,
    ids, scores, grads, weights, count, threshold, finite, capacity,
    exact_exp: tl.constexpr, has_rows: tl.constexpr, has_ids: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    place = start + tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < stop
    own, g, w, score, keep = _score(
        weight, grad, rows, entry_ids, offset, cols, eps, exp, place, inside, exact_exp, has_rows, has_ids
    )
    if tl.sum((inside & ((tl.abs(g) == float("inf")) | (g != g))).to(tl.int32)) > 0:
        tl.store(finite, 0)
    keep = keep & (score >= tl.load(threshold))
    number = tl.sum(keep.to(tl.int32))
    if number > 0:
        first = tl.atomic_add(count, number.to(tl.int64))
        if first + number <= capacity:
            target = first + tl.cumsum(keep.to(tl.int32), 0) - 1
            store(ids, scores, grads, weights, target, own, score, g, w, keep)
        else:
            tl.atomic_max(count + 1, capacity - first)  # how many places were left


@triton.jit
def _select_again(
    weight, grad, rows, entry_ids, start, stop, offset, cols, eps, exp,
    ids, scores, grads, weights, count, threshold, size, limit, capacity, id_bits,
    exact_exp: tl.constexpr, has_rows: tl.constexpr, has_ids: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    number = tl.load(count)
    if number > capacity:
        worst, last = worst_of_best(ids, scores, capacity - tl.load(count + 1), size, id_bits, block)
        number = keep_best(ids, scores, grads, weights, tl.load(count + 2), worst, last, block)
        first = start + tl.full((), 0, tl.int64)
        while first < stop:
            place = first + tl.arange(0, block)
            own, g, w, score, keep = _score(
                weight, grad, rows, entry_ids, offset, cols, eps, exp, place, place < stop, exact_exp, has_rows, has_ids
            )
            keep = keep & (score >= worst)
            target = number + tl.cumsum(keep.to(tl.int32), 0) - 1
            store(ids, scores, grads, weights, target, own, score, g, w, keep)
            number += tl.sum(keep.to(tl.int32))
            tl.debug_barrier()  # all of the block is written before it is read
            if number + block > capacity:
                worst, last = worst_of_best(ids, scores, number, size, id_bits, block)
                number = keep_best(ids, scores, grads, weights, number, worst, last, block)
            first += block
        tl.store(threshold, worst)
        tl.store(count + 1, tl.full((), 0, tl.int64))
    if number > limit:
        worst, last = worst_of_best(ids, scores, number, size, id_bits, block)
        number = keep_best(ids, scores, grads, weights, number, worst, last, block)
        tl.store(threshold, worst)
    tl.store(count, number)
    tl.store(count + 2, number)


@triton.jit
def _cut(ids, scores, grads, weights, count, threshold, size, limit, capacity, id_bits, block: tl.constexpr):
    number = tl.load(count)
    if number > limit:
        worst, last = worst_of_best(ids, scores, number, size, id_bits, block)
        number = keep_best(ids, scores, grads, weights, number, worst, last, block)
        tl.store(threshold, worst)
    tl.store(count, number)
    tl.store(count + 2, number)


@triton.jit
def count_reaching(scores, number, least, block: tl.constexpr):
    """How many of the first ``number`` scores are at least one given as bits."""
    reaching = tl.zeros((block,), tl.int32)
    for first in range(0, number, block):
        place = first + tl.arange(0, block)
        bits = tl.load(scores + place, mask=place < number, other=0.0).to(tl.int32, bitcast=True)
        reaching += ((bits >= least) & (place < number)).to(tl.int32)
    return tl.sum(reaching)


@triton.jit
def worst_of_best(ids, scores, number, size, id_bits, block: tl.constexpr):
    """The worst score of the ``size`` best of at least as many candidates, and the last id of those that have it."""
    number = number.to(tl.int32)
    worst = tl.full((), 0, tl.int32)  # the largest score, as bits, that at least `size` candidates reach
    for step in range(31):
        trial = worst | (1 << (30 - step))
        worst = tl.where(count_reaching(scores, number, trial, block) >= size, trial, worst)
    above = count_reaching(scores, number, worst + 1, block)
    wanted = size - above  # of those whose score is the worst; fewer than so many of them have a lower id
    last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    if count_reaching(scores, number, worst, block) - above > wanted:
        last = tl.full((), 0, tl.int64)
        for step in range(id_bits):
            trial = last | (tl.full((), 1, tl.int64) << (id_bits - 1 - step))
            below = tl.zeros((block,), tl.int32)
            for first in range(0, number, block):
                place = first + tl.arange(0, block)
                inside = place < number
                bits = tl.load(scores + place, mask=inside, other=0.0).to(tl.int32, bitcast=True)
                own = tl.load(ids + place, mask=inside, other=0)
                below += ((bits == worst) & (own < trial)).to(tl.int32)
            last = tl.where(tl.sum(below) < wanted, trial, last)
    return worst.to(tl.float32, bitcast=True), last


@triton.jit
def keep_best(ids, scores, grads, weights, number, worst, last, block: tl.constexpr):
    """Moves those of the first ``number`` candidates that are not behind the worst to the front; returns how many."""
    number = number.to(tl.int32)
    kept = tl.full((), 0, tl.int64)
    for first in range(0, number, block):
        place = first + tl.arange(0, block)
        inside = place < number
        score = tl.load(scores + place, mask=inside, other=0.0)
        own = tl.load(ids + place, mask=inside, other=0)
        g = tl.load(grads + place, mask=inside, other=0.0)
        w = tl.load(weights + place, mask=inside, other=0.0)
        keep = inside & ((score > worst) | ((score == worst) & (own <= last)))
        tl.debug_barrier()  # the whole block is read before any of it is written to
        target = kept + tl.cumsum(keep.to(tl.int32), 0) - 1
        store(ids, scores, grads, weights, target, own, score, g, w, keep)
        kept += tl.sum(keep.to(tl.int32))
    tl.debug_barrier()
    return kept
