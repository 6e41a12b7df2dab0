"""The streaming selector of several ranks, all of which select the same: the best entries of the mean gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import pad

from sparsify.common.ranks import Ranks, num_ranks
from sparsify.common.shards import is_fully_sharded
from sparsify.core.gradients import DenseGradient, Gradient, Product, as_matrix, padded_unique
from sparsify.core.importance import Importance
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import TopK, Winners
from sparsify.selection.device_topk import DeviceTopK, keep_best
from sparsify.selection.screening import RowBlocks, StreamingSelector, Work, some_rows
from sparsify.selection.small import SmallGradients, is_small

MOST_AT_ONCE = 1 << 26  # entries of a gradient that are averaged at once, at 4 bytes each
ALL_ROWS = -1


class ShareTopK(TopK):
    """A top-k on a CPU that gives the scores of its best too, as a :class:`DeviceTopK` does."""

    def best(self) -> list[Tensor]:
        """Returns ids, scores, 0 where there are too few entries, and gradients of the best, each (size,)."""
        self.cut()
        return [pad(part, (0, self.size - part.numel())) for part in self._best]


class RanksSelector(StreamingSelector):
    """Selects the best entries of all masked ``tensors``, by number, together with all other ``ranks``.

    Each tensor's gradient is averaged over the ranks, each of which offers its share of the entries to a top-k of its
    own; the small tensors come last, all at once. Then the ranks gather their best entries, and take the same best of
    these. The host never waits for a device: the ranks decide on lengths, which they exchange on the CPU. A table of
    which the ranks looked up few rows is averaged over the rows that any of them did. The mean is of gradients in the
    flat delta's dtype, as DDP averages them: a sum in bfloat16 would be rounded once for each rank.
    """

    def __init__(
        self, topk: ShareTopK | DeviceTopK, importance: Importance, work: Work, masked_only: bool, ranks: Ranks,
        tensors: Sequence[MaskedTensor],
    ) -> None:  # fmt: skip
        super().__init__(topk, importance, work, masked_only)
        self._ranks, self._names = ranks, [tensor.name for tensor in tensors]
        entries = tensors[0].collector.entries
        self._dtype: torch.dtype = entries.values.dtype
        # FSDP2 has each weight whole in its own backward only
        self.batches_small = not is_fully_sharded(entries.root)
        small = [tensor for tensor in tensors if is_small(tensor) and self.batches_small]
        self._small: dict[MaskedTensor, Gradient | None] = dict.fromkeys(small)  # gradients, as far as there are any

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        rows = ALL_ROWS if gradient.rows is None else gradient.rows.numel()
        lengths = self._ranks.headers(tensor.number, [rows], self._names)
        if isinstance(gradient, Product) and gradient.numel > MOST_AT_ONCE:
            self._work.dense += gradient.numel
            blocks = RowBlocks(gradient, tensor.indices, self._excluded(tensor))
            self._offer_rows(tensor, tensor.matrix_shape[0], blocks.rows)
            return blocks.taken
        unmasked, dense = self._compute(tensor, gradient, self._excluded(tensor))
        self._offer_mean(tensor, dense, lengths)
        return unmasked  # this rank's: DDP averages the flat gradient

    def skip(self, tensor: MaskedTensor) -> None:
        if tensor not in self._small:
            none = torch.empty(0, dtype=torch.int64, device=tensor.parameter.device)
            self.offer(tensor, DenseGradient(torch.zeros(0, tensor.matrix_shape[1], device=none.device), none))

    def offer_small(self, small: SmallGradients) -> None:
        self._small.update(zip(small.tensors, map(DenseGradient, map(as_matrix, small.values)), strict=True))

    def winners(self) -> Winners:
        """Returns the selected entries, best first; to be called once all ranks have come to the end of the pass."""
        self._offer_mean_of_small()
        everyone = [self._ranks.gather(part).view(-1) for part in self._topk.best()]
        ids, scores, *rest = keep_best(everyone, self._topk.size)
        return Winners(ids.where(scores > 0, -1), *rest)

    def _offer_mean(self, tensor: MaskedTensor, gradient: DenseGradient, lengths: Tensor) -> None:
        """Offers this rank's share of a tensor's mean gradient; each rank has so many rows, or ``ALL_ROWS``."""
        ranks, number, covered = num_ranks(), tensor.matrix_shape[0], None
        least, most = int(lengths.min()), int(lengths.max())
        if gradient.rows is not None and least != ALL_ROWS and most * ranks < number:
            if not most:
                return
            missing = most - gradient.rows.numel()  # filled up by some more of the first row, with zeros
            covered, _ = padded_unique(self._ranks.gather(pad(gradient.rows, (0, missing))).view(-1))
            number, gradient = most * ranks, DenseGradient(gradient.values, torch.searchsorted(covered, gradient.rows))
        self._offer_rows(tensor, number, partial(some_rows, gradient), covered)

    def _offer_rows(
        self, tensor: MaskedTensor, number: int, rows_of: Callable[[int, int], Tensor], covered: Tensor | None = None
    ) -> None:
        """Averages a gradient of ``number`` rows, some at a time, and offers this rank's shares.

        ``rows_of`` computes those from a start to a stop. They are the weight's rows ``covered`` (number,), or all.
        """
        ranks, weight = num_ranks(), tensor.matrix
        entries, cols = weight.reshape(-1), weight.shape[1]
        at_once = max(1, MOST_AT_ONCE // (ranks * cols)) * ranks
        for start in range(0, number, at_once):
            rows = rows_of(start, min(start + at_once, number)).to(self._dtype)
            mean = self._ranks.mean_share(rows.view(-1))
            first = start * cols + dist.get_rank() * mean.numel()  # of a row, unless all rows are averaged
            if covered is None:
                self._offer(entries[first:], mean, tensor.offset + first)
            else:
                places = covered[first // cols :][: mean.numel() // cols]
                self._topk.offer(self._importance, weight, mean.view(-1, cols), places, tensor.offset)

    def _offer_mean_of_small(self) -> None:
        by_device: dict[torch.device, SmallGradients] = {}
        for tensor, gradient in self._small.items():
            device = tensor.parameter.device
            own = gradient or DenseGradient(torch.zeros(tensor.matrix_shape, dtype=self._dtype, device=device))
            by_device.setdefault(device, SmallGradients()).add(tensor, own)
        for small in by_device.values():
            self._work.dense += small.numel
            weight, grad, ids = small.entries([self._excluded(tensor) for tensor in small.tensors])
            mean = self._ranks.mean_share(grad.to(self._dtype))
            first = dist.get_rank() * mean.numel()
            self._offer(weight[first:], mean, 0, ids[first:])

    def _offer(self, weight: Tensor, mean: Tensor, offset: int, ids: Tensor | None = None) -> None:
        """Offers entries (n,), of which ``weight`` and ``ids`` have more, or less where ``mean`` ends with padding."""
        mean, weight = mean[: weight.numel()], weight[: mean.numel()]
        ids = None if ids is None else ids[: mean.numel()]
        self._topk.offer(self._importance, weight[None], mean[None], None, offset, ids)
