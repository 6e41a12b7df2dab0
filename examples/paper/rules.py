"""Rules that select entries by the gradient of a calibration, with a view to how they spread over rows and columns.

In: the gradient of every tensor by its name, (n_out, n_in). Out: a set for ``sparsify(model, None, entries)``: the flat
indices (n,) of each tensor's entries, as many in all as the budget. The rules are pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Entries = dict[str, Tensor]


def largest(scores: Tensors, budget: int) -> Entries:
    """The entries with the largest scores of all tensors; those of -inf are never selected."""
    flat = torch.cat([score.flatten() for score in scores.values()])
    values, ids = flat.topk(budget)
    if values[-1] == -torch.inf:
        raise ValueError(f"budget={budget:,}, and the rule leaves fewer entries; loosen its cap.")
    return _by_tensor(ids, scores)


def capped(gradients: Tensors, budget: int, column: int | None = None, row: int | None = None) -> Entries:
    """The largest gradients, but at most ``column`` entries of a column, and then at most ``row`` of a row."""
    scores = {name: gradient.abs() for name, gradient in gradients.items()}
    for dim, cap in ((0, column), (1, row)):
        if cap is not None:
            scores = {name: _best_along(score, cap, dim) for name, score in scores.items()}
    return largest(scores, budget)


def floored(gradients: Tensors, budget: int, row: int) -> Entries:
    """The ``row`` largest gradients of every row, then the largest of the others."""
    scores = {}
    for name, gradient in gradients.items():
        first = gradient.abs().topk(min(row, gradient.shape[1]), dim=1).indices
        scores[name] = gradient.abs().scatter(1, first, torch.inf)
    return largest(scores, budget)


def mixed(gradients: Tensors, budget: int, share: float, seed: int) -> Entries:
    """A share of the budget by the largest gradients, the others drawn uniformly."""
    generator = torch.Generator().manual_seed(seed)
    scores = {name: torch.rand(gradient.shape, generator=generator) for name, gradient in gradients.items()}
    if number := round(share * budget):
        for name, ids in capped(gradients, number).items():
            scores[name].view(-1)[ids] = torch.inf
    return largest(scores, budget)


def _best_along(score: Tensor, number: int, dim: int) -> Tensor:
    """The scores, and -inf in place of those that are not among the largest ``number`` along a dimension."""
    values, ids = score.topk(min(number, score.shape[dim]), dim=dim)
    return torch.full_like(score, -torch.inf).scatter(dim, ids, values)


def _by_tensor(ids: Tensor, tensors: Tensors) -> Entries:
    """Cuts ids over all tensors, laid end to end, into flat indices of each; tensors without one are left out."""
    found, start = {}, 0
    ids = ids.sort().values
    for name, tensor in tensors.items():
        own = ids[(ids >= start) & (ids < start + tensor.numel())] - start
        start += tensor.numel()
        if own.numel():
            found[name] = own
    return found
