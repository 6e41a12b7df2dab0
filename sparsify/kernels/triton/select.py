"""The Triton forms of ``kernels/select.py``: one pass over weight and gradient, and one program that cuts.

``select_d3``   A program scores a block of entries, counts those that it keeps, reserves as many places among the
                candidates with one atomic addition, and writes them there: in any order, but always the same set.
``cut``         A single program, which exits at once where nothing is to be cut. It finds the worst score that stays,
                and the last id of those that have it, bit by bit: positive floats are ordered as their bits are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparsify.kernels.candidates import Candidates, Part
from sparsify.strategies.importance import D3

BLOCK = 1024  # entries that a program scores
CUT_BLOCK, CUT_WARPS = 4096, 16  # entries that the one program which cuts looks at at once, and its warps
EXACT_EXPONENTS = (0.0, 1.0, 2.0)  # products alone; others take a logarithm, in float64 to round as torch does


def select_d3(candidates: Candidates, importance: D3, part: Part) -> None:
    """See :func:`sparsify.kernels.select.select`."""
    weight, grad, rows, offset, start, stop = part
    exp, eps = importance.exp, importance.eps
    with torch.cuda.device_of(grad):
        _select[(triton.cdiv(stop - start, BLOCK),)](
            *(weight.contiguous(), grad.contiguous(), grad if rows is None else rows.contiguous()),
            *(candidates.ids, candidates.scores, candidates.grads, candidates.count, candidates.threshold),
            *(candidates.finite.view(torch.int8), start, stop, offset, grad.shape[1], eps, float(exp)),
            exact_exp=int(exp) if exp in EXACT_EXPONENTS else -1,
            has_rows=rows is not None,
            block=BLOCK,
        )


def cut(candidates: Candidates, size: int, limit: int) -> None:
    """See :func:`sparsify.kernels.select.cut`."""
    with torch.cuda.device_of(candidates.ids):
        _cut[(1,)](
            *(candidates.ids, candidates.scores, candidates.grads, candidates.count, candidates.threshold),
            *(size, limit, candidates.total.bit_length()),
            block=CUT_BLOCK,
            num_warps=CUT_WARPS,
        )


@triton.jit
def _select(
    weight, grad, rows, ids, scores, grads, count, threshold, finite, start, stop, offset, cols, eps, exp,
    exact_exp: tl.constexpr, has_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    place = start + tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)  # flat in the gradient
    inside = place < stop
    g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    if has_rows:  # then flat in the weight
        place = tl.load(rows + place // cols, mask=inside, other=0) * cols + place % cols
    w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(g)
    score = size
    if exact_exp == 1:
        score = tl.div_rn(size, tl.abs(w) + eps)
    if exact_exp == 2:
        base = tl.abs(w) + eps
        score = tl.div_rn(size, base * base)
    if exact_exp == -1:
        power = tl.exp2(exp * tl.log2((tl.abs(w) + eps).to(tl.float64)))
        score = tl.div_rn(size, power.to(tl.float32))
    infinity = float("inf")
    if tl.sum((inside & ((size == infinity) | (size != size))).to(tl.int32)) > 0:
        tl.store(finite, 0)
    keep = inside & (score >= tl.load(threshold)) & (score > 0) & (score < infinity) & (size > 0)
    number = tl.sum(keep.to(tl.int32))
    if number > 0:
        first = tl.atomic_add(count, number.to(tl.int64))
        target = first + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(ids + target, place + offset, mask=keep)
        tl.store(scores + target, score, mask=keep)
        tl.store(grads + target, g, mask=keep)


@triton.jit
def _cut(ids, scores, grads, count, threshold, size, limit, id_bits, block: tl.constexpr):
    number = tl.load(count).to(tl.int32)
    if number > limit:
        # the largest score, as bits, that at least `size` candidates reach
        worst = tl.full((), 0, tl.int32)
        for step in range(31):
            trial = worst | (1 << (30 - step))
            reaching = tl.zeros((block,), tl.int32)
            for first in range(0, number, block):
                place = first + tl.arange(0, block)
                bits = tl.load(scores + place, mask=place < number, other=0.0).to(tl.int32, bitcast=True)
                reaching += (bits >= trial).to(tl.int32)
            worst = tl.where(tl.sum(reaching) >= size, trial, worst)
        above = tl.zeros((block,), tl.int32)
        level = tl.zeros((block,), tl.int32)
        for first in range(0, number, block):
            place = first + tl.arange(0, block)
            bits = tl.load(scores + place, mask=place < number, other=0.0).to(tl.int32, bitcast=True)
            above += (bits > worst).to(tl.int32)
            level += (bits == worst).to(tl.int32)
        # the last id that stays of those whose score is the worst: fewer than `wanted` of them have a lower one
        wanted = size - tl.sum(above)
        last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
        if tl.sum(level) > wanted:
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
        # those that stay move to the front
        kept = 0
        for first in range(0, number, block):
            place = first + tl.arange(0, block)
            inside = place < number
            score = tl.load(scores + place, mask=inside, other=0.0)
            own = tl.load(ids + place, mask=inside, other=0)
            g = tl.load(grads + place, mask=inside, other=0.0)
            bits = score.to(tl.int32, bitcast=True)
            keep = (bits > worst) | ((bits == worst) & (own <= last))
            tl.debug_barrier()  # the whole block is read before any of it is written to
            target = kept + tl.cumsum(keep.to(tl.int32), 0) - 1
            tl.store(scores + target, score, mask=keep)
            tl.store(ids + target, own, mask=keep)
            tl.store(grads + target, g, mask=keep)
            kept += tl.sum(keep.to(tl.int32))
        tl.store(count, tl.full((), size, tl.int64))
        tl.store(threshold, worst.to(tl.float32, bitcast=True))
