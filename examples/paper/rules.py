"""Rules that select entries by the gradient of a calibration, with a view to how they spread over rows and columns.

Also a rate for each entry, :func:`rates`.

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
SQUARES = (4, 8, 32)  # entries of a row and of a column at most


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


def by_rank(gradients: Tensors, budget: int, seed: int) -> Entries:
    """Entries drawn at random, in each tensor a LoRA's share of the budget: in proportion to rows plus columns."""
    return best_of_each(_uniform(gradients, seed), share_out(budget, [sum(g.shape) for g in gradients.values()]))


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
    **{f"column-{cap}": lambda m, budget, seed, cap=cap: capped(m.gradients, budget, column=cap) for cap in (3, 8, 32)},
    **{f"square-{cap}": lambda m, budget, seed, cap=cap: capped(m.gradients, budget, square=cap) for cap in SQUARES},
    **{f"floor-{row}": lambda m, budget, seed, row=row: floored(m.gradients, budget, row) for row in (1,)},
    **{
        f"mixed-{part}": lambda m, budget, seed, part=part: mixed(m.gradients, budget, part / 100, seed)
        for part in (0, 10, 25, 50)
    },
    **{
        f"sampled-{part}": lambda m, budget, seed, part=part: sampled(m.gradients, budget, part / 100, seed)
        for part in (25, 50)
    },
    "balanced": lambda m, budget, seed: balanced(m.gradients, budget, seed),
    "by-rank": lambda m, budget, seed: by_rank(m.gradients, budget, seed),
    "random-mlp": lambda m, budget, seed: mixed(only(m.gradients, "mlp"), budget, 0, seed),
    "random-attention": lambda m, budget, seed: mixed(only(m.gradients, "attn"), budget, 0, seed),
    "consistent": lambda m, budget, seed: capped(m.consistency, budget),
    **{
        f"consistent-square-{cap}": lambda m, budget, seed, cap=cap: capped(m.consistency, budget, square=cap)
        for cap in SQUARES
    },
    "consistent-even": lambda m, budget, seed: evenly_spread(m.consistency, budget),
    "consistent-redrawn": lambda m, budget, seed: redrawn(m.gradients, capped(m.consistency, budget, square=8), seed),
}
# entries by a rule, each with a rate of its own: the power of the gradient's size that it falls with
SCALED = {f"scaled-{part}": ("mixed-0", part / 100) for part in (25, 50, 100)}
SCALED |= {"square-4-scaled-50": ("square-4", 0.5), "steep-25": ("mixed-0", -0.25), "steep-50": ("mixed-0", -0.5)}
