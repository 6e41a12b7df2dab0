"""Entries that are chosen once, before training: how many of each tensor, which, and what becomes of the others.

In: the masked tensors of a model that is still plain, the strategy and the budget. Out: global ids, best first; for
:class:`sparsify.Prune`, also zeros where nothing was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.errors import SparsifyError
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.ranking import rank_by_gradient, rank_by_weight
from sparsify.selection.topk import TopK
from sparsify.strategies.allocation import GLOBAL, allocate
from sparsify.strategies.calibration import Calibration, LossFunction, calibrate
from sparsify.strategies.strategy import Prune, Static, Strategy

Rank = Callable[[Sequence[MaskedTensor], int], Tensor]  # the best so many of some tensors: global ids, best first


def choose(
    model: nn.Module,
    tensors: Sequence[MaskedTensor],
    strategy: Strategy,
    budget: int,
    dtype: torch.dtype,
    seed: int,
    calibration: Calibration | None = None,
    loss_fn: LossFunction | None = None,
) -> Tensor:
    """The entries that a static selection trains.

    Args:
        model: still plain; only read.
        tensors: its candidates.
        strategy: with ``Static`` or ``Prune``.
        budget: how many entries.
        dtype: of the scores.
        seed: of a random importance.
        calibration: for a gradient importance.
        loss_fn: the loss in the calibration.

    Returns:
        (budget,) int64 global ids, best first; with an allocation by tensor, every beginning of them is shared out as
        the whole is. Before all others come the tensors that ``Prune`` leaves whole.

    Raises:
        SparsifyError: when the budget leaves nothing to the matrices, or the importance or the calibration does not
            give enough scores.
    """
    importance: Any = strategy.importance
    selection = strategy.selection
    assert isinstance(selection, Static)
    whole, ranked = _split(tensors, selection)
    if not importance.uses_gradient:
        ranked = [tensor for tensor in ranked if importance.covers(tensor.name)]
    nothing = torch.empty(0, dtype=torch.int64, device=tensors[0].parameter.device)
    kept = torch.cat([nothing, *(_ids(tensor).to(nothing) for tensor in whole)])
    left = _left_for(ranked, strategy, budget, kept.numel())
    rank = _ranking(model, ranked, importance, dtype, seed, calibration, loss_fn)
    if selection.allocation == GLOBAL:
        return torch.cat([kept, rank(ranked, left)])
    shapes, candidates = [tensor.shape for tensor in ranked], [tensor.num_candidates for tensor in ranked]
    counts = allocate(left, shapes, candidates, selection.allocation)
    parts = [rank([tensor], count) for tensor, count in zip(ranked, counts, strict=True) if count]
    return torch.cat([kept, _interleave(parts)])


def check_new(tensors: Sequence[MaskedTensor], strategy: Strategy, new: Container[str]) -> None:
    """Refuses to prune what may be pretrained, unless the user insists.

    Args:
        tensors: the candidates.
        strategy: any; only one with ``Prune`` is refused.
        new: names of the parameters that the base does not have.

    Raises:
        SparsifyError: naming a pretrained matrix and the ways out.
    """
    selection = strategy.selection
    if not isinstance(selection, Prune) or selection.pretrained:
        return
    pruned = [tensor.name for tensor in tensors if selection.removes_from(tensor.shape)]
    if old := [name for name in pruned if name not in new]:
        raise SparsifyError(
            f"{strategy.importance} with {selection} sets every entry that is not chosen to zero, and {len(old):,} of "
            f"the {len(pruned):,} matrices to prune are not known to be new, such as `{old[0]}`: a pretrained model "
            "would lose nearly all its weights. Add adapters or a LoRA first, or name new modules in "
            f"fresh_modules=[...]. To prune pretrained weights all the same, pass "
            f"Strategy({strategy.importance}, {replace(selection, pretrained=True)})."
        )


@torch.no_grad()
def zero_others(tensors: Sequence[MaskedTensor], selection: Prune, ids: Tensor) -> None:
    """Sets every candidate entry of the pruned tensors to zero, but for those with these global ids (n,)."""
    ids = ids.sort().values
    ends = [tensors[0].offset, *(tensor.offset + tensor.numel for tensor in tensors)]
    cuts = torch.searchsorted(ids, torch.tensor(ends, device=ids.device)).tolist()
    for tensor, (first, last) in zip(tensors, pairwise(cuts), strict=True):
        if selection.removes_from(tensor.shape):
            removed = torch.ones(tensor.numel, dtype=torch.bool, device=tensor.parameter.device)
            removed[(ids[first:last] - tensor.offset).to(removed.device)] = False
            removed[tensor.never_candidates] = False
            tensor.parameter.masked_fill_(removed.view(tensor.shape), 0)


def _split(tensors: Sequence[MaskedTensor], selection: Static) -> tuple[list[MaskedTensor], list[MaskedTensor]]:
    """Tensors that are trained whole, and those in which entries are chosen."""
    whole = [tensor for tensor in tensors if isinstance(selection, Prune) and not selection.removes_from(tensor.shape)]
    return whole, [tensor for tensor in tensors if tensor not in whole]


def _ids(tensor: MaskedTensor) -> Tensor:
    candidates = torch.ones(tensor.numel, dtype=torch.bool, device=tensor.parameter.device)
    candidates[tensor.never_candidates] = False
    return candidates.nonzero().squeeze(1) + tensor.offset


def _left_for(ranked: Sequence[MaskedTensor], strategy: Strategy, budget: int, kept: int) -> int:
    """What the budget leaves to the tensors in which entries are chosen; ``kept`` entries are trained anyway."""
    available = sum(tensor.num_candidates for tensor in ranked)
    if not available:
        raise SparsifyError(
            f"{strategy.importance} with {strategy.selection} finds nothing to prune: no candidate that it covers has "
            "two dimensions; expected trainable matrices, such as an adapter's projections."
        )
    if not kept < budget <= kept + available:
        raise SparsifyError(
            f"budget={budget:,} with {strategy.selection}: biases, norms and other vectors are trained whole and take "
            f"{kept:,} entries of it; expected {kept + 1:,} to {kept + available:,}, or freeze the vectors before "
            "(requires_grad_(False))."
        )
    return budget - kept


def _ranking(
    model: nn.Module,
    ranked: Sequence[MaskedTensor],
    importance: Any,
    dtype: torch.dtype,
    seed: int,
    calibration: Calibration | None,
    loss_fn: LossFunction | None,
) -> Rank:
    """Ranks by the weights, or by a calibration, which is run here and once."""
    device = ranked[0].parameter.device
    if calibration is None:

        def by_weight(group: Sequence[MaskedTensor], number: int) -> Tensor:
            ids = rank_by_weight(group, importance, TopK(number, dtype, device), str(seed), masked_only=False)
            if ids.numel() < number:
                raise SparsifyError(
                    f"the importance {importance.name!r} gave only {ids.numel():,} entries a finite score, and "
                    f"{number:,} are to be chosen; correct it, or lower the budget."
                )
            return ids

        return by_weight
    parameters: Any = [tensor.parameter for tensor in ranked]
    totals = dict(zip(ranked, calibrate(model, parameters, importance, calibration, loss_fn), strict=True))
    return lambda group, number: rank_by_gradient(
        group, importance, [totals[tensor] for tensor in group], TopK(number, dtype, device)
    )


def _interleave(parts: Sequence[Tensor]) -> Tensor:
    """One order of several tensors' ids, best first in each, whose every beginning has their proportions."""
    places = [torch.arange(1, part.numel() + 1, dtype=torch.float64) / part.numel() for part in parts]
    order = torch.cat(places).argsort(stable=True)
    ids = torch.cat([part.to(parts[0].device) for part in parts])
    return ids[order.to(ids.device)]
