"""Candidates of a selection in arrays of a fixed size on their device, and the parts of tensors they come from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Candidates:
    """Entries that may be among the best, in arrays of a fixed size; their number is read on their device only.

    Args:
        size: how many of the best are looked for, at least 1.
        limit: how many may stay until a cut, at least ``size``.
        capacity: largest number of candidates, at least ``limit``.
        total: all global ids are below this.
        dtype: of scores, gradients and weights.
        device: of the arrays.
    """

    def __init__(
        self, size: int, limit: int, capacity: int, total: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.size, self.limit, self.capacity, self.total = size, limit, capacity, total
        # (capacity + 1,) each; the last place is where entries that are not kept are written
        self.ids = torch.empty(capacity + 1, dtype=torch.int64, device=device)  # global
        self.scores, self.grads, self.weights = (torch.empty_like(self.ids, dtype=dtype) for _ in range(3))
        self.arrays = self.ids, self.scores, self.grads, self.weights
        # the number of candidates; for the Triton forms also the number of places that were left when entries found too
        # few of them, and the number of candidates after the last cut
        self.count = torch.zeros(3, dtype=torch.int64, device=device)
        # (1,) each
        self.threshold = torch.full((1,), -torch.inf, dtype=dtype, device=device)  # the score that is needed to join
        self.finite = torch.ones(1, dtype=torch.bool, device=device)  # whether all gradients so far were finite

    @property
    def held(self) -> Tensor:
        """(capacity + 1,) bool: which places have a candidate."""
        return torch.arange(self.capacity + 1, device=self.count.device) < self.count[0]


class Part(NamedTuple):
    """Consecutive entries of the gradient of one tensor, or of several small ones."""

    weight: Tensor  # (n_rows, cols), the whole tensor
    grad: Tensor  # (n, cols), the gradient of all rows, or some
    rows: Tensor | None  # (n,) int64, the weight's rows that grad has; None for all of them in order
    offset: int  # global id of the tensor's first entry
    ids: Tensor | None  # (n * cols,) int64, the entries' global ids; None where they follow from the offset
    start: int  # the first entry of the part, flat in grad
    stop: int  # the one after the last
