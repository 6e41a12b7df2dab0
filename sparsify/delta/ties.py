"""Merges deltas that interfere by TIES (Yadav et al. 2023) and DARE (Yu et al. 2024).

    trim      keep a share of each delta's entries in each tensor: the largest changes, or (DARE) any, scaled up
    elect     a sign for each entry: that of the sum of the changes, or that of most of them
    merge     the mean of the weighted changes that have this sign; dare_linear: the sum of all

For dense changes the results are those of PEFT's ``add_weighted_adapter``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsify.delta.algebra import DeltaSum, Parts, change, finite
from sparsify.delta.entries import one_of, require

METHODS, SIGN_METHODS = ("ties", "dare_ties", "dare_linear"), ("total", "frequency")


class DeltaMerge(DeltaSum):
    """The result of :func:`merge_deltas`."""

    method, density, sign_method, seed = "ties", 1.0, "total", 0

    def _change(self, name: str, parts: Parts, base: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        changes = torch.zeros(len(parts), base.numel(), dtype=torch.float64)
        for number, (_, part, at) in enumerate(parts):
            changes[number, at] = self._trimmed(change(name, part, target), f"{self.seed} {name} {number}")
        weighted = changes * torch.tensor([factor for factor, *_ in parts], dtype=torch.float64)[:, None]
        if self.method != "dare_linear":
            votes = changes if self.sign_method == "total" else changes.sign()
            agree = changes.sign() == torch.where(votes.sum(0) >= 0, 1, -1)
            weighted = weighted * agree / agree.sum(0).clamp(min=1)
        return weighted.sum(0), (base.double() + weighted.sum(0)).to(base.dtype)

    def _trimmed(self, changes: Tensor, seed: str) -> Tensor:
        """Changes (k,) of which a share is kept and the others are zero."""
        if self.method == "ties":
            kept = changes.abs().topk(round(self.density * changes.numel())).indices
            return torch.zeros_like(changes).index_copy_(0, kept, changes[kept])
        generator = torch.Generator().manual_seed(int(hashlib.sha256(seed.encode()).hexdigest()[:15], 16))
        return changes * (torch.rand(changes.shape, generator=generator) < self.density) / self.density


def merge_deltas(
    deltas: Sequence[Any], weights: Sequence[float] | None = None, method: str = "ties", *, density: float = 1.0,
    majority_sign_method: str = "total", seed: int = 0,
) -> DeltaMerge:  # fmt: skip
    """Merges deltas of one base by TIES or DARE; arguments as of PEFT's ``add_weighted_adapter``.

    Args:
        deltas: the :class:`sparsify.SparseDelta` of each task.
        weights: a factor for each; 1 by default.
        method: ``"ties"``, ``"dare_ties"`` or ``"dare_linear"``.
        density: the share of each delta's entries that is kept in each tensor: of those changed, not of the tensor.
        majority_sign_method: ``"total"``: the sign of the sum of the changes; ``"frequency"``: that of most of them.
        seed: of DARE's random choice.

    Returns:
        An expression, as a sum of deltas is one: ``apply`` it, or ``save(path, base=base)``.

    Raises:
        SparsifyError: when an argument is none of these.
    """
    factors = [finite(weight, "multiplied") for weight in (weights if weights is not None else [1.0] * len(deltas))]
    require(method in METHODS, "method is", method, one_of(METHODS))
    require(majority_sign_method in SIGN_METHODS, "majority_sign_method is", majority_sign_method, one_of(SIGN_METHODS))
    require(0 < finite(density, "thinned out") <= 1, "density is", density, "a share, above 0 and at most 1")
    require(len(factors) == len(deltas) > 0, "there are weights", factors, f"a weight for each of {len(deltas)} deltas")
    merged = DeltaMerge(tuple(zip(factors, deltas, strict=True)))
    merged.method, merged.density, merged.sign_method, merged.seed = method, density, majority_sign_method, seed
    return merged
