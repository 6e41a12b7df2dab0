"""The Triton forms of the hot loops.

``scatter``    Writes values into many weights in one launch, each at its weight's address. Torch casts them first.
``sddmm``      A program takes a block of entries and a share of the tokens, and the shares are summed afterwards: few
               entries keep the whole GPU busy, and the sum is the same at every run. The factors are transposed first,
               so that a dot product reads consecutive numbers, some tokens at a time, so that they stay in a cache.
``select_d3``  One pass over weight and gradient. A program scores a block of entries and reserves places for those that
               it keeps with one atomic addition: they come in any order, but it is always the same set.
``cut``        A single program. It finds the worst score that stays, and the last id of those that have it, eight
               bits at a time, by counting (radix selection): positive floats are ordered as their bits are.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsify.common.raw_bits import as_bits
from sparsify.core.devices import upload
from sparsify.kernels.select import Candidates, Part

BLOCK = 1024  # entries of a program
COUNTED, MOVED, CUT_WARPS = 2048, 1024, 32  # entries that the one program which cuts takes at once, and its warps
SLACK = tl.constexpr(1 - 2.0**-20)  # for the rounding of a quotient, and of a product
SMALLEST_RULED_OUT = tl.constexpr(1e-30)  # threshold: near zero, numbers are rounded by more
EXACT_EXPONENTS = (0.0, 1.0, 2.0)  # products alone; others take a logarithm, in float64 to round as torch does
ENTRIES = 64  # of a program of the SDDMM
TOKENS = 16  # at once
SHARE = 256  # tokens of a program
AT_ONCE = 24 << 20  # bytes of both factors that are transposed together: half of an H100's cache


def scatter(
    weights: Sequence[Tensor], offsets: Sequence[int], counts: Sequence[int], ids: Tensor, values: Tensor,
    seen: bool = True,
) -> None:  # fmt: skip
    """Writes values (k,) into weights, ``counts`` for each, at global ids (k,); ``seen``: by version counters."""
    number = ids.numel()
    written = [(weight, offset) for weight, offset, count in zip(weights, offsets, counts, strict=True) if count]
    repeats = [count for count in counts if count]
    first = [weight.data_ptr() - offset * weight.itemsize for weight, offset in written]  # where id 0 would be
    kinds = [(weight.device, weight.dtype) for weight, _ in written]
    for device, dtype in dict.fromkeys(kinds):
        table = [address if kind == (device, dtype) else 0 for address, kind in zip(first, kinds, strict=True)]
        addresses = upload(table, device).repeat_interleave(upload(repeats, device), output_size=number)
        bits, places = (part.to(device, non_blocking=True) for part in (as_bits(values.to(dtype)), ids))
        with torch.cuda.device_of(bits):
            _scatter[(triton.cdiv(number, BLOCK),)](addresses, places, bits, number, block=BLOCK)
    torch.autograd.graph.increment_version([weight for weight, _ in written] if seen else [])


@triton.jit(do_not_specialize=["number"])
def _scatter(addresses, ids, values, number, block: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    address = tl.load(addresses + entry, mask=entry < number, other=0)
    mine = address != 0  # those of another dtype, or on another device, have their own launch
    id = tl.load(ids + entry, mask=mine, other=0)
    value = tl.load(values + entry, mask=mine, other=0)
    tl.store(address.to(tl.pointer_type(values.dtype.element_ty)) + id, value, mask=mine)


def sddmm(left: Tensor, right: Tensor, indices: Tensor) -> Tensor:
    """See :func:`sparsify.kernels.sddmm.sddmm`; takes at least one token and one entry."""
    number, cols = indices.numel(), right.shape[1]
    shares = max(1, AT_ONCE // (left[:1].nbytes + right[:1].nbytes) // SHARE)  # of tokens, at once
    partial = torch.empty(triton.cdiv(left.shape[0], SHARE), number, dtype=torch.float32, device=left.device)
    slices = zip(left.split(shares * SHARE), right.split(shares * SHARE), partial.split(shares), strict=True)
    with torch.cuda.device_of(left):
        for some_left, some_right, sums in slices:
            _sddmm[(triton.cdiv(number, ENTRIES), sums.shape[0])](
                *(some_left.t().contiguous(), some_right.t().contiguous(), indices.contiguous(), sums),
                *(some_left.shape[0], number, cols, ENTRIES, TOKENS, SHARE),
            )
    return partial.sum(0)


@triton.jit(do_not_specialize=["number"])
def _sddmm(
    left, right, indices, partial, tokens, number, cols,
    entries: tl.constexpr, at_once: tl.constexpr, share: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64) * entries + tl.arange(0, entries)
    inside = entry < number
    index = tl.load(indices + entry, mask=inside, other=0)
    row, col = (index // cols)[None, :] * tokens, (index % cols)[None, :] * tokens
    total = tl.zeros((entries,), dtype=tl.float32)
    start = tl.program_id(1).to(tl.int64) * share
    for first in range(0, share, at_once):
        token = (start + first + tl.arange(0, at_once))[:, None]
        there = (token < tokens) & inside[None, :]
        factor = tl.load(left + row + token, mask=there, other=0.0).to(tl.float32)
        other = tl.load(right + col + token, mask=there, other=0.0).to(tl.float32)
        total += tl.sum(factor * other, axis=0)
    tl.store(partial + tl.program_id(1).to(tl.int64) * number + entry, total, mask=inside)


def select_d3(candidates: Candidates, importance: Any, part: Part) -> None:
    weight, grad, rows, offset, ids, start, stop = part
    with torch.cuda.device_of(grad):
        _select[(triton.cdiv(stop - start, BLOCK),)](
            *(weight.contiguous(), grad.contiguous(), grad if rows is None else rows.contiguous()),
            *(grad if ids is None else ids, start, stop, offset, grad.shape[1], importance.eps, float(importance.exp)),
            *(*candidates.arrays, candidates.count, candidates.threshold, candidates.finite.view(torch.int8)),
            exact_exp=int(importance.exp) if importance.exp in EXACT_EXPONENTS else -1,
            has_rows=rows is not None,
            has_ids=ids is not None,
            block=BLOCK,
        )


def cut(candidates: Candidates, limit: int) -> None:
    with torch.cuda.device_of(candidates.ids):
        _cut[(1,)](
            *(*candidates.arrays, candidates.count, candidates.threshold),
            *(candidates.size, limit, triton.cdiv(candidates.total.bit_length(), 8)),
            counted=COUNTED,
            moved=MOVED,
            num_warps=CUT_WARPS,
        )


@triton.jit
def store(ids, scores, grads, weights, target, own, score, g, w, keep):
    """Writes those of a block's entries that are to be kept to their places among the candidates."""
    tl.store(ids + target, own, mask=keep)
    tl.store(scores + target, score, mask=keep)
    tl.store(grads + target, g, mask=keep)
    tl.store(weights + target, w, mask=keep)


@triton.jit(do_not_specialize=["start", "stop", "offset", "cols"])
def _select(
    weight, grad, rows, entry_ids, start, stop, offset, cols, eps, exp,
    ids, scores, grads, weights, count, threshold, finite,
    exact_exp: tl.constexpr, has_rows: tl.constexpr, has_ids: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    first = start + tl.program_id(0).to(tl.int64) * block  # added to pointers: 64 bits for each entry take longer
    lane = tl.arange(0, block)
    inside = lane < tl.minimum(stop - first, block).to(tl.int32)
    g = tl.load(grad + first + lane, mask=inside, other=0.0).to(tl.float32)
    if has_rows:
        row = (first + lane) // cols
        flat = (tl.load(rows + row, mask=inside, other=0) - row) * cols + first + lane
        w = tl.load(weight + flat, mask=inside, other=0.0).to(tl.float32)
    else:
        w = tl.load(weight + first + lane, mask=inside, other=0.0).to(tl.float32)
    size, base, least = tl.abs(g), tl.abs(w) + eps, tl.load(threshold)
    near = (size > 0) & (size < float("inf"))
    # most entries are ruled out by a product, which takes a tenth of a quotient's time
    lowest = tl.where(least >= SMALLEST_RULED_OUT, least * SLACK, -float("inf"))
    if exact_exp == 1:
        near = near & (size >= lowest * base)
    if exact_exp == 2:
        near = near & (size >= lowest * (base * base))
    bad = (size < float("inf")) == 0  # infinite, or not a number
    both = tl.sum(near.to(tl.int32) + bad.to(tl.int32) * (2 * block))  # two counts by one sum
    if both >= 2 * block:
        tl.store(finite, 0)
    if both % (2 * block) > 0:
        score = size
        if exact_exp == 1:
            score = tl.div_rn(size, base)
        if exact_exp == 2:
            score = tl.div_rn(size, base * base)
        if exact_exp == -1:
            score = tl.div_rn(size, tl.exp2(exp * tl.log2(base.to(tl.float64))).to(tl.float32))
        # where the gradient is 0, and outside, the score is 0 or not a number
        keep = near & (score > 0) & (score < float("inf")) & (score >= least)
        number = tl.sum(keep.to(tl.int32))
        if number > 0:
            target = tl.atomic_add(count, number.to(tl.int64)) + tl.cumsum(keep.to(tl.int32), 0) - 1
            if has_ids:
                own = tl.load(entry_ids + first + lane, mask=inside, other=0)
            elif has_rows:
                own = flat + offset
            else:
                own = first + offset + lane
            store(ids, scores, grads, weights, target, own, score, g, w, keep)


@triton.jit(do_not_specialize=["size", "limit", "id_digits"])
def _cut(
    ids, scores, grads, weights, count, threshold, size, limit, id_digits, counted: tl.constexpr, moved: tl.constexpr
):  # fmt: skip
    number = tl.load(count).to(tl.int32)
    if number > limit:
        worst = tl.full((), 0, tl.int64)  # the score of the worst that stays, as bits; its digits so far
        missing = size.to(tl.int32)  # of those that stay, how many have no larger score
        level = missing  # how many have the score
        for step in range(4):
            shift = 24 - 8 * step
            found = count_digits(ids, scores, number, worst, worst, shift, False, counted)
            at_least = tl.sum(found) - tl.cumsum(found, 0) + found  # a digit as large as this
            digit = tl.sum((at_least >= missing).to(tl.int32)) - 1
            digits = tl.arange(0, 256)
            missing -= tl.sum(tl.where(digits > digit, found, 0))
            level = tl.sum(tl.where(digits == digit, found, 0))
            worst = worst | (digit.to(tl.int64) << shift)
        last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)  # the largest id of those with that score that stay
        if missing < level:
            last = tl.full((), 0, tl.int64)
            for step in range(id_digits):
                shift = 8 * (id_digits - 1 - step)
                found = count_digits(ids, scores, number, worst, last, shift, True, counted)
                digit = tl.sum((tl.cumsum(found, 0) < missing).to(tl.int32))
                missing -= tl.sum(tl.where(tl.arange(0, 256) < digit, found, 0))
                last = last | (digit.to(tl.int64) << shift)
        worst_score = worst.to(tl.int32).to(tl.float32, bitcast=True)
        kept = tl.full((), 0, tl.int64)
        for first in range(0, number, moved):  # moves the best to the front
            place = first + tl.arange(0, moved)
            inside = place < number
            score = tl.load(scores + place, mask=inside, other=0.0)
            own = tl.load(ids + place, mask=inside, other=0)
            g = tl.load(grads + place, mask=inside, other=0.0)
            w = tl.load(weights + place, mask=inside, other=0.0)
            keep = inside & ((score > worst_score) | ((score == worst_score) & (own <= last)))
            tl.debug_barrier()  # the whole block is read before any of it is written to
            target = kept + tl.cumsum(keep.to(tl.int32), 0) - 1
            store(ids, scores, grads, weights, target, own, score, g, w, keep)
            kept += tl.sum(keep.to(tl.int32))
        tl.store(threshold, worst_score)
        tl.store(count, kept)


@triton.jit
def count_digits(ids, scores, number, worst, prefix, shift, of_ids: tl.constexpr, block: tl.constexpr):
    """How many candidates have each digit (256,), the eight bits from ``shift`` on, if those above are the prefix's.

    The digits are those of the scores, or of the ids of the candidates whose score is ``worst``.
    """
    found = tl.zeros((256,), tl.int32)
    for first in range(0, number, block):
        place = first + tl.arange(0, block)
        inside = place < number
        key = tl.load(scores + place, mask=inside, other=0.0).to(tl.int32, bitcast=True).to(tl.int64)
        if of_ids:
            inside = inside & (key == worst)
            key = tl.load(ids + place, mask=inside, other=0)
        has_prefix = inside & ((key >> shift >> 8) == (prefix >> shift >> 8))
        found += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=has_prefix)
    return found
