"""A streaming selector for several ranks on devices that the host runs ahead of: each rank selects from a share.

    each tensor      its gradient is averaged over the ranks, each of which gets a share of the entries, and offers it
                     to a top-k of its own
    small tensors    come last, all at once; a rank that has no gradient for one of them takes part with zeros
    the end          the ranks gather their best entries, and all take the same best of these

The host never waits for a device: what the ranks decide together they decide on lengths, which they exchange in headers
on the CPU. The order of the entries is :class:`sparsify.core.topk.TopK`'s, so the winners are those of the mean
gradient. The mean is of the ranks' gradients in the flat delta's dtype, float32 or float64, as the winners' gradients
are and as DDP averages them: a sum in bfloat16 would be rounded once for each rank.

A table of which the ranks looked up few rows is averaged over the rows that any of them did, else as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import pad

from sparsify.common.ranks import Ranks, num_ranks
from sparsify.common.shards import is_fully_sharded
from sparsify.core.gradients import DenseGradient, Gradient, Product, TiedGradient, as_matrix, padded_unique
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import Winners
from sparsify.selection.context import SelectionContext
from sparsify.selection.device_topk import DeviceTopK, Entries
from sparsify.selection.row_blocks import RowBlocks
from sparsify.selection.small import BatchingSelector, SmallGradients, is_small

MOST_AT_ONCE = 1 << 26  # entries that are averaged at once, at 4 bytes each
ALL_ROWS = -1  # in a header


class ShardedSelector(BatchingSelector):
    """Selects the best entries by the mean of all ranks' gradients.

    Args:
        context: its top-k has the size that is wanted; the work is this rank's.
        ranks: the other ranks.
        tensors: all masked tensors, by number.
        dtype: that gradients are averaged in.
    """

    def __init__(
        self, context: SelectionContext, ranks: Ranks, tensors: Sequence[MaskedTensor], dtype: torch.dtype
    ) -> None:
        assert isinstance(context.topk, DeviceTopK)
        # FSDP2 has each weight whole in its own backward only
        self.batches_small = not is_fully_sharded(tensors[0].collector.entries.root)
        self._context, self._topk, self._ranks, self._dtype = context, context.topk, ranks, dtype
        self._names = [tensor.name for tensor in tensors]
        self._small: dict[MaskedTensor, Gradient | None] = {}  # gradients of all small tensors, as far as there are any
        if self.batches_small:
            self._small = dict.fromkeys(filter(is_small, tensors))

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        self._context.work.dense += gradient.numel
        if isinstance(gradient, (Product, TiedGradient)) and gradient.numel > MOST_AT_ONCE:
            blocks = RowBlocks(gradient, tensor.indices, self._context.excluded(tensor))
            self._ranks.headers(tensor.number, [ALL_ROWS], self._names)
            self._offer_rows(tensor, tensor.matrix_shape[0], blocks.rows)
            return blocks.taken
        gradient = gradient.dense()
        unmasked = gradient.take(tensor.indices)  # this rank's: DDP averages the flat gradient
        if (excluded := self._context.excluded(tensor)).numel():
            gradient.clear(excluded)  # an entry whose gradient is zero is never offered
        self._offer_mean(tensor, gradient)
        return unmasked

    def skip(self, tensor: MaskedTensor) -> None:
        if tensor not in self._small:
            nothing = torch.empty(0, dtype=torch.int64, device=tensor.parameter.device)
            values = nothing.new_empty((0, tensor.matrix_shape[1]), dtype=self._dtype)
            self._offer_mean(tensor, DenseGradient(values, nothing))

    def offer_small(self, small: SmallGradients) -> None:
        self._small.update(zip(small.tensors, map(DenseGradient, map(as_matrix, small.values)), strict=True))

    def winners(self) -> Winners:
        """Returns the selected entries, best first; to be called once all ranks have come to the end of the pass."""
        self._offer_mean_of_small()
        best = self._topk.candidates().best(self._topk.size)
        gathered = self._ranks.gather(torch.cat([array.view(torch.uint8) for array in best]))
        parts = gathered.split([array.nbytes for array in best], dim=1)
        everyone = Entries(*(part.reshape(-1).view(array.dtype) for part, array in zip(parts, best, strict=True)))
        return everyone.best(self._topk.size).winners()

    def finite(self) -> Tensor:
        return self._topk.finite

    def _offer_mean(self, tensor: MaskedTensor, gradient: DenseGradient) -> None:
        """Offers this rank's share of a tensor's mean gradient."""
        ranks, number, covered = num_ranks(), tensor.matrix_shape[0], None
        own = ALL_ROWS if gradient.rows is None else gradient.rows.numel()
        lengths = self._ranks.headers(tensor.number, [own], self._names)
        least, most = int(lengths.min()), int(lengths.max())
        if gradient.rows is not None and least != ALL_ROWS and most * ranks < number:
            if not most:
                return
            everyone = self._ranks.gather(pad(gradient.rows, (0, most - own)))  # some more of the first row, with zeros
            covered, _ = padded_unique(everyone.view(-1))
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
            rows = rows_of(start, min(start + at_once, number)).to(self._dtype)
            mean = self._ranks.mean_share(rows.view(-1))
            first = start * cols + dist.get_rank() * mean.numel()  # of a row, unless all rows are averaged
            if covered is None:
                self._offer(entries[first:], mean, tensor.offset + first)
            else:
                places = covered[first // cols :][: mean.numel() // cols]
                self._topk.offer(self._context.importance, weight, mean.view(-1, cols), places, tensor.offset)

    def _offer_mean_of_small(self) -> None:
        """Offers this rank's share of the small tensors' mean gradients."""
        by_device: dict[torch.device, SmallGradients] = {}
        for tensor, gradient in self._small.items():
            device = tensor.parameter.device
            own = gradient or DenseGradient(torch.zeros(tensor.matrix_shape, dtype=self._dtype, device=device))
            by_device.setdefault(device, SmallGradients()).add(tensor, own)
        for small in by_device.values():
            weight, grad, ids = self._context.entries_of(small)
            mean = self._ranks.mean_share(grad.to(self._dtype))
            first = dist.get_rank() * mean.numel()
            self._offer(weight[first:], mean, 0, ids[first:])

    def _offer(self, weight: Tensor, mean: Tensor, offset: int, ids: Tensor | None = None) -> None:
        """Offers entries (n,), of which ``weight`` and ``ids`` have more, or less where ``mean`` ends with padding."""
        mean, weight = mean[: weight.numel()], weight[: mean.numel()]
        ids = None if ids is None else ids[: mean.numel()]
        self._topk.offer(self._context.importance, weight[None], mean[None], None, offset, ids)
