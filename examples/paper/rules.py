"""Rules that select entries by the gradient of a calibration, with a view to how they spread over rows and columns.

Also a rate for each entry, :func:`rates`.

In: the gradient of every tensor by its name, (n_out, n_in). Out: a set for ``sparsify(model, None, entries)``: the flat
indices (n,) of each tensor's entries, as many in all as the budget. The rules are pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Entries = dict[str, Tensor]
CHUNKS = 256  # parts of a tensor, to each of which a cap is applied at once


def largest(scores: Tensors, budget: int) -> Entries:
    """The entries with the largest scores of all tensors; those of -inf are never selected."""
    flat = torch.cat([score.flatten() for score in scores.values()])
    values, ids = flat.topk(budget)
    if values[-1] == -torch.inf:
        raise ValueError(f"budget={budget:,}, and the rule leaves fewer entries; loosen its cap.")
    return _by_tensor(ids, scores)


def capped(gradients: Tensors, budget: int, column: int | None = None, row: int | None = None) -> Entries:
    """The largest gradients, but at most ``column`` entries of a column and ``row`` of a row."""
    return largest({name: _capped(gradient.abs(), column, row) for name, gradient in gradients.items()}, budget)


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


def rates(gradients: Tensors, entries: Entries, power: float) -> Tensor:
    """A factor (n,) of the learning rate for each entry, with mean 1: smaller in rows and columns of large gradients.

    It is (row's rms x column's rms / tensor's rms)^-power: with power 1 the steps of Adam become those of Newton's
    method, if curvature is in proportion to the squared gradient. Factors are cut off at ten times their median.
    """
    found = []
    for name, ids in entries.items():
        square = gradients[name].square()
        row, column = square.mean(1), square.mean(0)
        size = (row[ids // len(column)] * column[ids % len(column)] / square.mean()).sqrt()
        found.append(size.clamp(min=1e-30) ** -power)
    factors = torch.cat(found)
    factors = factors.clamp(max=10 * factors.median())
    return factors / factors.mean()


def _capped(score: Tensor, column: int | None, row: int | None) -> Tensor:
    """The scores (n_out, n_in), and -inf where an entry's column or row is full of larger ones.

    Greedy, in chunks from the largest score down; within a chunk an entry may find its row full of entries whose own
    column is full, so that a few places stay empty.
    """
    kept, width = torch.full_like(score, -torch.inf), score.shape[1]
    places = [torch.full((n,), cap or score.numel()) for n, cap in zip(score.shape, (row, column), strict=True)]
    for ids in score.flatten().argsort(descending=True).split(max(1, score.numel() // CHUNKS)):
        ids = ids[(places[0][ids // width] > 0) & (places[1][ids % width] > 0)]
        lines = [ids // width, ids % width]
        free = [_earlier(own) < left[own] for own, left in zip(lines, places, strict=True)]
        accepted = ids[free[0] & free[1]]
        kept.view(-1)[accepted] = score.flatten()[accepted]
        places[0] -= (accepted // width).bincount(minlength=len(places[0]))
        places[1] -= (accepted % width).bincount(minlength=width)
    return kept


def _earlier(lines: Tensor) -> Tensor:
    """For each entry (n,), how many before it have the same line."""
    ordered, order = lines.sort(stable=True)
    return torch.empty_like(order).scatter(0, order, torch.arange(len(order)) - torch.searchsorted(ordered, ordered))


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
