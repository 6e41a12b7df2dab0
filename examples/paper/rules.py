"""Rules that select entries by the gradient of a calibration, with a view to how they spread over rows and columns.

In: the gradient of every tensor by its name, (n_out, n_in). Out: a set for ``sparsify(model, None, entries)``: the flat
indices (n,) of each tensor's entries, as many in all as the budget. The rules are pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.selection.static import spread
from sparsify.strategies.strategy import share_out

Tensors = Mapping[str, Tensor]
Entries = dict[str, Tensor]


class Moments(NamedTuple):
    """What a calibration finds of every candidate."""

    gradients: Tensors  # the sum over the batches
    consistency: Tensors  # its size by the root of the sum of the batches' squares: 1 where they are noise


def largest(scores: Tensors, budget: int) -> Entries:
    """The entries with the largest scores of all tensors; those of -inf are never selected."""
    flat = torch.cat([score.flatten() for score in scores.values()])
    values, ids = flat.topk(budget)
    if values[-1] == -torch.inf:
        raise ValueError(f"budget={budget:,}, and the rule leaves fewer entries; loosen its cap.")
    return _by_tensor(ids, scores)


def capped(gradients: Tensors, budget: int, *, column: int | None = None, square: int | None = None) -> Entries:
    """The largest gradients, but at most ``column`` entries of a column, or ``square`` of a column and of a row."""
    scores = {name: gradient.abs() for name, gradient in gradients.items()}
    if square is not None:
        scores = {name: spread(score, square) for name, score in scores.items()}
    if column is not None:
        least = {name: score.topk(min(column, len(score)), dim=0).values[-1] for name, score in scores.items()}
        scores = {name: score.where(score >= least[name], -torch.inf) for name, score in scores.items()}
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
    scores = _uniform(gradients, seed)
    if number := round(share * budget):
        for name, ids in capped(gradients, number).items():
            scores[name].view(-1)[ids] = torch.inf
    return largest(scores, budget)


def sampled(gradients: Tensors, budget: int, power: float, seed: int) -> Entries:
    """Entries drawn without replacement, in proportion to a power of their gradients' sizes (Gumbel's trick)."""
    draws = _uniform(gradients, seed)
    return largest({name: power * g.abs().log() - (-draws[name].log()).log() for name, g in gradients.items()}, budget)


def balanced(gradients: Tensors, budget: int, seed: int) -> Entries:
    """Entries drawn at random, but the same density everywhere: all rows of a tensor have as many, and all columns."""
    scores, generator = _uniform(gradients, seed), torch.Generator().manual_seed(seed)
    counts = share_out(budget, [gradient.numel() for gradient in gradients.values()])
    for score, number in zip(scores.values(), counts, strict=True):
        lines = [torch.cat([torch.randperm(size, generator=generator) for _ in range(number // size + 1)])[:number]
                 for size in score.shape]  # fmt: skip
        score.view(-1)[(lines[0] * score.shape[1] + lines[1]).to(score.device)] += 1  # a few are drawn twice
    return best_of_each(scores, counts)


def evenly_spread(scores: Tensors, budget: int) -> Entries:
    """The largest scores, the same density in each tensor, at most twice an even share in a row or column of it."""
    counts = share_out(budget, [score.numel() for score in scores.values()])
    caps = [-(-2 * number // min(score.shape)) for score, number in zip(scores.values(), counts, strict=True)]
    kept = {name: spread(score, cap) for (name, score), cap in zip(scores.items(), caps, strict=True)}
    return best_of_each(kept, counts)


def redrawn(gradients: Tensors, entries: Entries, seed: int) -> Entries:
    """Entries drawn at random, as many in each tensor as another rule takes."""
    counts = [len(entries.get(name, ())) for name in gradients]
    return best_of_each(_uniform(gradients, seed), counts)


def best_of_each(scores: Tensors, counts: Sequence[int]) -> Entries:
    """The largest scores of each tensor, as many as its count says."""
    chosen = {
        name: score.flatten().topk(number).indices.sort().values
        for (name, score), number in zip(scores.items(), counts, strict=True)
    }
    return {name: ids for name, ids in chosen.items() if ids.numel()}


def only(gradients: Tensors, part: str) -> Tensors:
    """The tensors with ``part`` in their name."""
    return {name: gradient for name, gradient in gradients.items() if part in name}


def _uniform(gradients: Tensors, seed: int) -> dict[str, Tensor]:
    """A number in [0, 1) for every entry, the same on each device."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(gradient.shape, generator=generator).to(gradient.device)
        for name, gradient in gradients.items()
    }


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


# by a set that is computed: of the calibration's moments, the budget and the seed
RULES: dict[str, Callable[[Moments, int, int], Entries]] = {
    "column-8": lambda m, budget, seed: capped(m.gradients, budget, column=8),
    "square-4": lambda m, budget, seed: capped(m.gradients, budget, square=4),
    "floor-1": lambda m, budget, seed: floored(m.gradients, budget, 1),
    "mixed-10": lambda m, budget, seed: mixed(m.gradients, budget, 0.1, seed),
    "mixed-25": lambda m, budget, seed: mixed(m.gradients, budget, 0.25, seed),
    "sampled-25": lambda m, budget, seed: sampled(m.gradients, budget, 0.25, seed),
    "sampled-50": lambda m, budget, seed: sampled(m.gradients, budget, 0.5, seed),
    "balanced": lambda m, budget, seed: balanced(m.gradients, budget, seed),
    "random-mlp": lambda m, budget, seed: mixed(only(m.gradients, "mlp"), budget, 0, seed),
    "random-attention": lambda m, budget, seed: mixed(only(m.gradients, "attn"), budget, 0, seed),
    "consistent": lambda m, budget, seed: capped(m.consistency, budget),
    "consistent-square-4": lambda m, budget, seed: capped(m.consistency, budget, square=4),
    "consistent-square-8": lambda m, budget, seed: capped(m.consistency, budget, square=8),
    "consistent-even": lambda m, budget, seed: evenly_spread(m.consistency, budget),
    "consistent-redrawn": lambda m, budget, seed: redrawn(m.gradients, capped(m.consistency, budget, square=8), seed),
}
