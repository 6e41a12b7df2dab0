"""The candidates of a selection, in arrays of a fixed size on their device, which alone knows how many there are."""

from __future__ import annotations

import torch
from torch import Tensor


class Candidates:
    """Entries that may be among the best, in arrays of a fixed size.

    Args:
        room: how many there may be.
        total: all global ids are below.
        dtype: of scores and gradients.
        device: where they live.

    Attributes:
        ids: (room + 1,) int64, the candidates' global ids; the last place belongs to nobody.
        scores: (room + 1,) their scores.
        grads: (room + 1,) their gradients.
        count: (1,) int64, how many there are.
        threshold: (1,) the score that a newcomer has to reach.
        finite: (1,) bool, whether all gradients so far were finite.
    """

    def __init__(self, room: int, total: int, dtype: torch.dtype, device: torch.device) -> None:
        self.room = room
        self.total = total
        self.ids = torch.zeros(room + 1, dtype=torch.int64, device=device)
        self.scores = torch.zeros(room + 1, dtype=dtype, device=device)
        self.grads = torch.zeros(room + 1, dtype=dtype, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.threshold = torch.full((1,), -torch.inf, dtype=dtype, device=device)
        self.finite = torch.ones(1, dtype=torch.bool, device=device)

    @property
    def held(self) -> Tensor:
        """(room + 1,) bool: which places have a candidate."""
        return torch.arange(self.room + 1, device=self.count.device) < self.count

    def order(self) -> Tensor:
        """(room + 1,) int64: the places, that of the best candidate first, those that have none last."""
        return best_first(self.ids, self.scores.where(self.held, -torch.inf))


def best_first(ids: Tensor, scores: Tensor) -> Tensor:
    """(n,) int64: the places of some entries (n,), highest score first, equal scores by ascending id."""
    by_id = ids.argsort()
    return by_id[scores[by_id].argsort(descending=True, stable=True)]
