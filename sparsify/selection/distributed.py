"""Streaming selectors for several ranks, all of which select the same: the best entries of the mean gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import pad

from sparsify.common.ranks import Ranks, num_ranks
from sparsify.common.shards import is_fully_sharded
from sparsify.core.gradients import DenseGradient, Gradient, Product, as_matrix, padded_unique
from sparsify.core.importance import ROUNDING_SLACK, Importance
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import TopK, Winners
from sparsify.selection.device_topk import ScoredEntries
from sparsify.selection.screening import RowBlocks, StreamingSelector, Work, some_rows
from sparsify.selection.small import SmallGradients, is_small

MOST_AT_ONCE = 1 << 26  # entries of a gradient that are averaged at once, at 4 bytes each
RAISING = 4  # entries of a rank that are exchanged to raise the threshold, per entry to be selected
ALL_ROWS = -1


class RanksSelector(StreamingSelector):
    """The common part of the selectors of several ``ranks``, of all masked ``tensors``, by number."""

    def __init__(
        self, topk: Any, importance: Importance, work: Work, masked_only: bool, ranks: Ranks,
        tensors: Sequence[MaskedTensor],
    ) -> None:  # fmt: skip
        super().__init__(topk, importance, work, masked_only)
        self._ranks, self._tensors, self._names = ranks, tensors, [tensor.name for tensor in tensors]

    def skip(self, tensor: MaskedTensor) -> None:
        nothing = torch.empty(0, dtype=torch.int64, device=tensor.parameter.device)
        self.offer(tensor, DenseGradient(torch.zeros(0, tensor.matrix_shape[1], device=nothing.device), nothing))

    def _headers(self, tensor: MaskedTensor, gradient: Gradient, *numbers: int) -> tuple[Tensor, ...]:
        """How many rows each rank's gradient has (ranks,), ``ALL_ROWS`` where it has all; and each rank's numbers."""
        rows = ALL_ROWS if gradient.rows is None else gradient.rows.numel()
        return self._ranks.headers(tensor.number, (rows, *numbers), self._names).unbind(1)


class DistributedSelector(RanksSelector):
    """Selects the best entries on CPUs, where waiting for the other ranks at each tensor costs little.

    Each rank proposes the entries that could be among the best by its own gradient; the ranks gather the proposals,
    average the gradient at their union, and offer it to the top-k, which holds the same entries on all ranks at all
    times. The mean of the ranks' gradients is no larger than the largest of them: as long as the importance grows with
    abs(grad), an entry whose mean reaches the threshold reaches it on one rank at least. Where proposals would take
    more bytes than the gradient, the ranks exchange their best first, which raises the threshold; if that does not
    help, the whole gradient is averaged.
    """

    batches_small = False  # one of the ranks may have to skip a tensor

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        return self._offer(tensor, gradient, self._excluded(tensor), raises=True)

    def _offer(self, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor, *, raises: bool) -> Tensor:
        """Offers all but the excluded entries (e,); ``raises``: the best may be exchanged first, for a threshold."""
        if self._importance.monotone:
            proposed, taken, gradient = self._propose(tensor, gradient, excluded)
        else:
            taken, gradient = self._compute(tensor, gradient, excluded)
            proposed = tensor.indices[:0]
        rows, numbers = self._headers(tensor, gradient, proposed.numel())
        few = numbers.clamp(max=self._topk.size * RAISING)
        complete = self._pays(tensor, rows, numbers)
        if not complete and not (raises and self._pays(tensor, rows, few)):
            self._offer_whole_mean(tensor, gradient, excluded, rows)
            return taken
        numbers = numbers if complete else few
        if numbers.any():
            most = int(numbers.max())
            union = self._ranks.union(proposed[:most], most, tensor.numel)
            self._offer_mean(tensor, gradient, union)
            excluded = torch.cat([excluded, union.to(excluded.device)])
        if not complete:
            self._offer(tensor, gradient, excluded, raises=False)
        return taken

    def _propose(self, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor) -> tuple[Tensor, Tensor, Gradient]:
        """Finds entries that could reach the threshold, by this rank's gradient.

        Returns:
            Their flat indices (n,), best first; the gradient of the unmasked entries (k,); and the whole gradient in
            the form that was scanned.
        """
        threshold = self._topk.threshold
        most = 2 * tensor.numel // (num_ranks() + 2) + 1  # so many proposals take more bytes than the gradient
        # rounding keeps no entry out: of a sum of so many float32 terms, and of its quotient, which may be squared
        slack = ROUNDING_SLACK * (1 + num_ranks() * 2.0**-22) ** 2
        own = TopK(most, threshold.dtype, threshold.device, threshold / slack)
        taken, gradient = StreamingSelector(own, self._importance, self._work).scan(tensor, gradient, excluded)
        self._topk.finite &= own.finite
        return own.winners().ids - tensor.offset, taken, gradient

    def _pays(self, tensor: MaskedTensor, rows: Tensor, numbers: Tensor) -> bool:
        """Whether exchanging so many proposals (ranks,) takes no more bytes than averaging the whole gradient."""
        if not self._importance.monotone:
            return False
        whole = tensor.numel
        if not (rows == ALL_ROWS).any():
            whole = min(whole, int(rows.sum()) * tensor.matrix_shape[1])
        # each rank's indices, as many as the longest list has, then the gradient at their union, twice on its way
        return 4 * int(numbers.max()) * numbers.numel() + 8 * int(numbers.sum()) <= 8 * whole

    def _offer_mean(self, tensor: MaskedTensor, gradient: Gradient, union: Tensor) -> None:
        """Offers the entries (k,) with the mean of their gradients."""
        indices = union.to(tensor.parameter.device)
        grads = self._ranks.mean_(gradient.take(indices).to(self._topk.threshold))
        self._topk.offer_entries(self._importance, union + tensor.offset, tensor.take(indices).to(grads), grads)
        self._topk.cut()

    def _offer_whole_mean(self, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor, lengths: Tensor) -> None:
        """Offers all entries but the excluded ones, by the mean of the whole gradient."""
        if isinstance(gradient, Product):
            self._work.dense += gradient.numel
        gradient, rows, number = gradient.dense(), None, tensor.matrix_shape[0]
        gradient.clear(excluded)  # an entry whose gradient is zero is never offered
        if gradient.rows is not None and not (lengths == ALL_ROWS).any():
            rows = self._ranks.union(gradient.rows, int(lengths.max()), tensor.numel)
            number, gradient = rows.numel(), DenseGradient(gradient.values, torch.searchsorted(rows, gradient.rows))
        values = some_rows(gradient, 0, number).to(self._topk.threshold.dtype)
        self._topk.offer(self._importance, tensor.matrix, self._ranks.mean_(values), rows, tensor.offset)
        self._topk.cut()  # a higher threshold means fewer proposals


class ShardedSelector(RanksSelector):
    """Selects the best entries on devices that the host runs ahead of: each rank from a share, with a ``DeviceTopK``.

    Each tensor's gradient is averaged over the ranks, each of which offers its share of the entries to a top-k of its
    own; the small tensors come last, all at once. Then the ranks gather their best entries, and take the same best of
    these. The host never waits for a device: the ranks decide on lengths, which they exchange on the CPU. A table of
    which the ranks looked up few rows is averaged over the rows that any of them did. The mean is of gradients in the
    flat delta's dtype, as DDP averages them: a sum in bfloat16 would be rounded once for each rank.
    """

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        # FSDP2 has each weight whole in its own backward only
        self.batches_small = not is_fully_sharded(self._tensors[0].collector.entries.root)
        small = [tensor for tensor in self._tensors if is_small(tensor) and self.batches_small]
        self._small: dict[MaskedTensor, Gradient | None] = dict.fromkeys(small)  # gradients, as far as there are any

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        lengths, *_ = self._headers(tensor, gradient)
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
            super().skip(tensor)

    def offer_small(self, small: SmallGradients) -> None:
        self._small.update(zip(small.tensors, map(DenseGradient, map(as_matrix, small.values)), strict=True))

    def winners(self) -> Winners:
        """Returns the selected entries, best first; to be called once all ranks have come to the end of the pass."""
        self._offer_mean_of_small()
        best = self._topk.best()
        everyone = ScoredEntries(*(self._ranks.gather(array).view(-1) for array in best))
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
        self._offer_rows(tensor, number, partial(some_rows, gradient), covered)

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
            self._work.dense += small.numel
            weight, grad, ids = small.entries([self._excluded(tensor) for tensor in small.tensors])
            mean = self._ranks.mean_share(grad.to(self._topk.dtype))
            first = dist.get_rank() * mean.numel()
            self._offer(weight[first:], mean, 0, ids[first:])

    def _offer(self, weight: Tensor, mean: Tensor, offset: int, ids: Tensor | None = None) -> None:
        """Offers entries (n,), of which ``weight`` and ``ids`` have more, or less where ``mean`` ends with padding."""
        mean, weight = mean[: weight.numel()], weight[: mean.numel()]
        ids = None if ids is None else ids[: mean.numel()]
        self._topk.offer(self._importance, weight[None], mean[None], None, offset, ids)
