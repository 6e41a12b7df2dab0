"""A streaming selector for several ranks on devices that the host runs ahead of: each rank selects from a share.

    each tensor      its gradient is averaged over the ranks, each of which gets a share of the entries, and offers it
                     to a top-k of its own
    small tensors    come last, all at once; a rank that has no gradient for one of them takes part with zeros
    the end          the ranks gather their best entries, and all take the same best of these

The host never waits for a device: the ranks decide on lengths, which they exchange in headers on the CPU. The mean is
of gradients in the flat delta's dtype, as DDP averages them: a sum in bfloat16 would be rounded once for each rank.
A table of which the ranks looked up few rows is averaged over the rows that any of them did, else as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import pad

from sparsify.common.ranks import Ranks, num_ranks
from sparsify.common.shards import is_fully_sharded
from sparsify.core.gradients import DenseGradient, Gradient, Product, TiedGradient, padded_unique
from sparsify.core.importance import Importance
from sparsify.core.small import SmallGradients
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import Winners
from sparsify.selection.device_topk import ScoredEntries
from sparsify.selection.distributed import ALL_ROWS, RanksSelector
from sparsify.selection.row_blocks import RowBlocks
from sparsify.selection.screening import Work

MOST_AT_ONCE = 1 << 26  # entries that are averaged at once, at 4 bytes each


class ShardedSelector(RanksSelector):
    """Selects the best entries by the mean of all ranks' gradients, with a :class:`DeviceTopK`."""

    def __init__(
        self, topk: Any, importance: Importance, work: Work, masked_only: bool, ranks: Ranks,
        tensors: Sequence[MaskedTensor],
    ) -> None:  # fmt: skip
        super().__init__(topk, importance, work, masked_only, ranks, tensors)
        # FSDP2 has each weight whole in its own backward only
        self.batches_small = not is_fully_sharded(tensors[0].collector.entries.root)
        small = [tensor for tensor in tensors if tensor.is_small and self.batches_small]
        self._small: dict[MaskedTensor, Gradient | None] = dict.fromkeys(small)  # gradients, as far as there are any

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        lengths, *_ = self._headers(tensor, gradient)
        if isinstance(gradient, (Product, TiedGradient)) and gradient.numel > MOST_AT_ONCE:
            self._work.dense += gradient.numel
            blocks = RowBlocks(gradient, tensor.indices, self._excluded(tensor))
            self._offer_rows(tensor, tensor.matrix_shape[0], blocks.rows)
            return blocks.taken
        unmasked, dense = self._compute(tensor, gradient, self._excluded(tensor))
        self._offer_mean(tensor, dense, lengths)
        return unmasked  # this rank's: DDP averages the flat gradient

    def skip(self, tensor: MaskedTensor) -> None:
        if tensor not in self._small:
            super().skip(tensor)

    def offer_small(self, small: SmallGradients) -> None:
        self._small.update(small.pairs)

    def winners(self) -> Winners:
        """Returns the selected entries, best first; to be called once all ranks have come to the end of the pass."""
        self._offer_mean_of_small()
        best = self._topk.candidates().best(self._topk.size)
        gathered = self._ranks.gather(torch.cat([array.view(torch.uint8) for array in best]))
        parts = gathered.split([array.nbytes for array in best], dim=1)
        everyone = ScoredEntries(*(part.reshape(-1).view(array.dtype) for part, array in zip(parts, best, strict=True)))
        return everyone.best(self._topk.size).winners()

    def _offer_mean(self, tensor: MaskedTensor, gradient: DenseGradient, lengths: Tensor) -> None:
        """Offers this rank's share of a tensor's mean gradient, given how many rows each rank has (ranks,)."""
        ranks, number, covered = num_ranks(), tensor.matrix_shape[0], None
        least, most = int(lengths.min()), int(lengths.max())
        if gradient.rows is not None and least != ALL_ROWS and most * ranks < number:
            if not most:
                return
            missing = most - gradient.rows.numel()  # filled up by some more of the first row, with zeros
            covered, _ = padded_unique(self._ranks.gather(pad(gradient.rows, (0, missing))).view(-1))
            number, gradient = most * ranks, DenseGradient(gradient.values, torch.searchsorted(covered, gradient.rows))
        self._offer_rows(tensor, number, gradient.some_rows, covered)

    def _offer_rows(
        self, tensor: MaskedTensor, number: int, rows_of: Callable[[int, int], Tensor], covered: Tensor | None = None
    ) -> None:
        """Averages a gradient some rows at a time and offers this rank's shares.

        Args:
            tensor: whose gradient it is.
            number: of its rows.
            rows_of: computes the rows (stop - start, cols) of this rank's gradient, from ``start`` and ``stop``.
            covered: (number,) int64, the weight's rows that these are; ``None`` for all of them in order.
        """
        ranks, weight = num_ranks(), tensor.matrix
        entries, cols = weight.reshape(-1), weight.shape[1]
        at_once = max(1, MOST_AT_ONCE // (ranks * cols)) * ranks
        for start in range(0, number, at_once):
            rows = rows_of(start, min(start + at_once, number)).to(self._topk.dtype)
            mean = self._ranks.mean_share(rows.view(-1))
            first = start * cols + dist.get_rank() * mean.numel()  # of a row, unless all rows are averaged
            if covered is None:
                self._offer(entries[first:], mean, tensor.offset + first)
            else:
                places = covered[first // cols :][: mean.numel() // cols]
                self._topk.offer(self._importance, weight, mean.view(-1, cols), places, tensor.offset)

    def _offer_mean_of_small(self) -> None:
        """Offers this rank's share of the small tensors' mean gradients."""
        by_device: dict[torch.device, SmallGradients] = {}
        for tensor, gradient in self._small.items():
            device = tensor.parameter.device
            own = gradient or DenseGradient(torch.zeros(tensor.matrix_shape, dtype=self._topk.dtype, device=device))
            by_device.setdefault(device, SmallGradients()).add(tensor, own)
        for small in by_device.values():
            self._work.dense += sum(small.sizes)
            weight, grad, ids = small.entries([self._excluded(tensor) for tensor in small.tensors])
            mean = self._ranks.mean_share(grad.to(self._topk.dtype))
            first = dist.get_rank() * mean.numel()
            self._offer(weight[first:], mean, 0, ids[first:])

    def _offer(self, weight: Tensor, mean: Tensor, offset: int, ids: Tensor | None = None) -> None:
        """Offers entries (n,), of which ``weight`` and ``ids`` have more, or less where ``mean`` ends with padding."""
        mean, weight = mean[: weight.numel()], weight[: mean.numel()]
        ids = None if ids is None else ids[: mean.numel()]
        self._topk.offer(self._importance, weight[None], mean[None], None, offset, ids)
