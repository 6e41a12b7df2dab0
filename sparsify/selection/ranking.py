"""Entries chosen ahead of a gradient: by the weights alone, by a calibration's gradients, or because they are given.

In: the masked tensors. Out: global ids, the best first: score, then position of the tensor, then index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sparsify.common.names import plain_name
from sparsify.errors import SparsifyError
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.topk import TopK, in_blocks, offer_scores
from sparsify.strategies.importance import SNIP, Custom, Fisher, GradientImportance, GraSP, WeightImportance


def rank_by_weight(
    tensors: Sequence[MaskedTensor], importance: WeightImportance, topk: TopK, seed: str, *, masked_only: bool
) -> Tensor:
    """The entries that the weights alone say are best.

    Args:
        tensors: where to look.
        importance: scores them.
        topk: of the size that is wanted.
        seed: of a random importance; each tensor draws from a generator of its own, seeded by this and its name.
        masked_only: leave out what is unmasked already.

    Returns:
        (n,) int64 global ids; fewer than wanted where no more have a finite score.
    """
    for tensor in tensors:
        if importance.covers(tensor.name):
            digest = hashlib.sha256(f"{seed}:{tensor.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
            scores = (importance.score(block, generator) for block in in_blocks(tensor.weight))
            excluded = tensor.not_candidates.sort().values if masked_only else tensor.never_candidates
            offer_scores(topk, scores, tensor.offset, excluded)
    return topk.winners().ids


def rank_by_gradient(
    tensors: Sequence[MaskedTensor], importance: GradientImportance, totals: Sequence[Tensor], topk: TopK
) -> Tensor:
    """The entries that the gradients of a calibration say are best; those that score 0 are none, but for GraSP.

    Args:
        tensors: where to look.
        importance: scores them.
        totals: for each tensor, in its shape, what :func:`sparsify.strategies.calibration.calibrate` summed up.
        topk: of the size that is wanted.

    Raises:
        SparsifyError: when fewer entries than wanted score above 0.
    """
    for tensor, total in zip(tensors, totals, strict=True):
        offer_scores(topk, _scores(tensor, importance, total), tensor.offset, tensor.never_candidates)
    ids = topk.winners().ids
    if ids.numel() < topk.size:
        raise SparsifyError(_too_few(tensors, importance, topk.size, ids.numel()))
    return ids


def _too_few(tensors: Sequence[MaskedTensor], importance: GradientImportance, wanted: int, found: int) -> str:
    """``wanted`` is the whole budget, or what the allocation gives to a single tensor."""
    share = f"budget={wanted:,}" if len(tensors) > 1 else f"`{tensors[0].name}` is to get {wanted:,} entries"
    if isinstance(importance, Custom):
        return (
            f"{share}, but the importance {importance.name!r} gave only {found:,} entries a score above 0 in the "
            "calibration: NaN, infinite, negative and zero scores do not count. Correct it, or lower the budget."
        )
    text = (
        f"{share}, but only {found:,} entries have an importance above 0 in the calibration; "
        "give it more examples, or lower the budget."
    )
    zeros = [tensor.name for tensor in tensors if not tensor.weight.any()]
    if isinstance(importance, SNIP) and zeros:
        text += (
            f" SNIP scores abs(weight x grad), and {len(zeros)} of {len(tensors)} tensors are all zeros, such as "
            f"`{zeros[0]}`; start them from something else (PEFT's LoRA: init_lora_weights=False)."
        )
    return text


def _scores(tensor: MaskedTensor, importance: GradientImportance, total: Tensor) -> Iterator[Tensor]:
    for weight, block in zip(in_blocks(tensor.weight), in_blocks(total), strict=True):
        # Fisher's total is the score already; for any other importance it is a gradient
        scores = block if isinstance(importance, Fisher) else importance.score(weight, block)
        # GraSP's scores have a sign: those below 0 come last, and are better than none
        yield scores if isinstance(importance, GraSP) else scores.where((block != 0) & (scores > 0), -torch.inf)


def find_given(tensors: Sequence[MaskedTensor], support: Mapping[str, Tensor]) -> Tensor:
    """The entries of a given set, by ascending id.

    Args:
        tensors: where they are.
        support: by tensor name, in the model or in the plain model: a bool mask, or flat indices (n,).

    Raises:
        SparsifyError: when a name is no candidate's, a mask's shape or an index does not fit, or nothing is given.
    """
    by_name = {plain_name(tensor.name): tensor for tensor in tensors}
    ids = [_given_in(name, by_name, entries) for name, entries in support.items()]
    found = torch.cat(ids).unique() if ids else torch.empty(0, dtype=torch.int64)
    if not found.numel():
        raise SparsifyError("the given set is empty; expected masks or indices with at least one entry.")
    return found


def _given_in(name: str, tensors: Mapping[str, MaskedTensor], entries: Tensor) -> Tensor:
    tensor = tensors.get(plain_name(name))
    if tensor is None:
        raise SparsifyError(
            f"the given set has entries of `{name}`, which is no candidate of this model; "
            f"expected names such as `{next(iter(tensors))}`."
        )
    entries = torch.as_tensor(entries).detach().cpu()
    if entries.dtype == torch.bool:
        if entries.shape != tensor.shape:
            raise SparsifyError(
                f"the mask of `{name}` has shape {tuple(entries.shape)}, expected {tuple(tensor.shape)}."
            )
        entries = entries.flatten().nonzero().squeeze(1)
    if entries.is_floating_point() or entries.is_complex() or entries.dim() != 1:
        raise SparsifyError(f"the given set has {entries.dtype} for `{name}`; expected a bool mask or flat indices.")
    numel = tensor.numel
    if entries.numel() and not (int(entries.min()) >= 0 and int(entries.max()) < numel):
        raise SparsifyError(f"the given set has indices of `{name}` outside its {numel:,} entries.")
    if torch.isin(entries, tensor.never_candidates.cpu()).any():
        raise SparsifyError(f"the given set has entries of `{name}` in its padding row, which is never trained.")
    return entries.to(torch.int64) + tensor.offset
