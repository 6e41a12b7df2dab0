"""A streaming top-k for GPUs, which waits for them once in a step and not at every tensor.

Only the device knows how many entries reach the threshold. The host counts as if all of them did, and launches a cut,
which the device carries out where it is due. A step's first parts are small: the sooner there is a threshold, the fewer
entries join.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from sparsify.core.importance import D3, Importance
from sparsify.core.topk import Winners, best_first
from sparsify.kernels import has_triton
from sparsify.kernels.sddmm import SHORT
from sparsify.kernels.select import Candidates, Part, plain_cut, plain_select

SMALLEST_CUT = 1 << 12  # candidates beyond the best that are cheaper to keep than to cut
FEWEST_AT_ONCE = 1 << 14  # entries in a step's first part
# entries in a part, all of which may become candidates, at 20 bytes each: a share of the model's, but so many
AT_ONCE, MOST_AT_ONCE, SHARE = 1 << 22, 1 << 24, 64


class DeviceTopK:
    """The best ``size`` of all ``total`` entries of a model, as ``TopK`` finds them, kept on their own devices."""

    def __init__(self, size: int, total: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.dtype, self._total = size, dtype, total
        self._most_at_once = min(total, MOST_AT_ONCE, max(AT_ONCE, total // SHARE))
        self._seen = 0  # entries offered so far
        self._held: dict[torch.device, Candidates] = {}
        self._held_on(device)  # that of the winners first

    def _held_on(self, device: torch.device) -> Candidates:
        if device not in self._held:
            limit = self.size + max(self.size, SMALLEST_CUT)  # candidates that may stay until a cut
            candidates = Candidates(self.size, limit, limit + self._most_at_once, self._total, self.dtype, device)
            candidates.is_fused = self.dtype == torch.float32 and has_triton(device)
            self._held[device] = candidates
        return self._held[device]

    @property
    def finite(self) -> Tensor:
        """Bool scalar: whether all gradients so far were finite."""
        finite = (candidates.finite[0] for candidates in self._held.values())
        return reduce(lambda one, other: one & other.to(one.device), finite)

    def offer(
        self, importance: Importance, weight: Tensor, grad: Tensor, rows: Tensor | None, offset: int,
        ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Offers the entries of one tensor in parts; see :meth:`sparsify.core.topk.TopK.offer`."""
        candidates, start = self._held_on(grad.device), 0
        while start < grad.numel():
            at_once = min(self._most_at_once, max(FEWEST_AT_ONCE, self._seen))
            number = min(at_once, grad.numel() - start)
            if candidates.most + number > candidates.limit + at_once:
                cut(candidates, candidates.limit)
            select(candidates, importance, Part(weight, grad, rows, offset, ids, start, start + number))
            start += number
            self._seen += number

    def best(self) -> list[Tensor]:
        """Returns ids, scores, gradients and weights (size,) each, best first; scores are 0 where there are too few."""
        parts = []
        for candidates in self._held.values():
            cut(candidates, self.size)
            arrays = [candidates.ids, candidates.scores.where(candidates.held, 0), candidates.grads, candidates.weights]
            parts.append([array[: self.size].to(next(iter(self._held))) for array in arrays])
        return keep_best([torch.cat(own) for own in zip(*parts, strict=True)], self.size)

    def winners(self) -> Winners:
        """Returns the best entries, highest score first, equal scores by ascending id; -1 where there are too few."""
        ids, scores, grads, weights = self.best()
        return Winners(ids.where(scores > 0, -1), grads, weights)


def keep_best(entries: Sequence[Tensor], size: int) -> list[Tensor]:
    """Returns the best of some entries, whose ids (n,) and scores (n,) come first, in order."""
    order = best_first(entries[0], entries[1])[:size]
    return [part[order] for part in entries]


def select(candidates: Candidates, importance: Importance, part: Part) -> None:
    """Adds those of a part's entries that reach the threshold, in Triton where it runs."""
    candidates.most += part.stop - part.start
    short = part.weight.dtype in SHORT and part.grad.dtype in SHORT
    if candidates.is_fused and short and type(importance) is D3:
        from sparsify.kernels.triton import select_d3

        select_d3(candidates, importance, part)
    else:
        plain_select(candidates, importance, part)


def cut(candidates: Candidates, limit: int) -> None:
    """Keeps the best of more than ``limit`` candidates, in Triton where it runs."""
    candidates.most = min(candidates.most, limit)
    if candidates.is_fused:
        from sparsify.kernels.triton import cut as fused_cut

        fused_cut(candidates, limit)
    else:
        plain_cut(candidates, limit)
