"""The streaming selector of several ranks, all of which select the same: the best entries of the mean gradient."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from sparsify.common.ranks import PLACES, Ranks, num_ranks
from sparsify.common.shards import is_fully_sharded
from sparsify.core.gradients import DenseGradient, Gradient, Product
from sparsify.core.importance import Importance
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import TopK, Winners
from sparsify.masked.tensor import BlockGradient, matrix_shape
from sparsify.selection.device_topk import DeviceTopK, keep_best
from sparsify.selection.joined import Joined, is_small
from sparsify.selection.screening import RowBlocks, StreamingSelector, some_rows

MOST_AT_ONCE = 1 << 26  # entries of a gradient that are averaged at once, at 4 bytes each
BLOCK_AT_ONCE = 1 << 23  # entries of a tensor-parallel weight's gradient, at 12 bytes each
MOST_WAITING = 1 << 23  # entries of gradients that wait for others, to share a header with them


class RanksSelector(StreamingSelector):
    """Selects the best entries of all masked ``tensors``, by number, together with all other ``ranks``.

    Each tensor's gradient is averaged over the ranks, each of which offers its share of the entries to a top-k of its
    own, once the next average has begun; the small tensors come last, all at once. Then the ranks gather their best
    entries, and take the same best of these. The host never waits for a device. The mean is of gradients in the flat
    delta's dtype, as DDP averages them: a sum in bfloat16 would be rounded once for each rank.
    """

    def __init__(
        self, topk: TopK | DeviceTopK, importance: Importance, work: Counter[str], masked_only: bool, ranks: Ranks,
        tensors: Sequence[Any],
    ) -> None:  # fmt: skip
        super().__init__(topk, importance, work, masked_only)
        self._ranks, self._names = ranks, [tensor.name for tensor in tensors]
        entries = tensors[0].collector.entries
        self._dtype: torch.dtype = entries.values.dtype
        # FSDP2 has each weight whole in its own backward only, where its gradient is offered
        self.joins = self._can_wait = not is_fully_sharded(entries.root)
        small = [tensor for tensor in tensors if is_small(tensor) and self.joins]
        self._small: dict[MaskedTensor, Tensor | None] = dict.fromkeys(small)  # gradients (n,), as far as there are any
        self._waiting: list[tuple[MaskedTensor, DenseGradient]] = []
        self._begun: Callable[[], None] | None = None  # offers what is being averaged
        meshes = [tensor.parameter.device_mesh for tensor in tensors if tensor.shards > 1]
        self._copies = ranks.copies(meshes[0]) if meshes else None

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        (wanted, excluded), is_large = self._wanted_and_excluded(tensor), tensor.numel > MOST_AT_ONCE
        if is_large:
            self._offer_waiting()
        if is_large and isinstance(gradient, Product):
            self._work["dense"] += gradient.numel
            blocks = RowBlocks(gradient, wanted, excluded)
            self._ranks.headers([tensor.number], (), self._names)
            self._offer_mean(tensor, blocks.rows)
            return blocks.taken
        taken, dense = self._compute(gradient, wanted, excluded)
        self._waiting.append((tensor, dense.own()))
        number = sum(other.numel for other, _ in self._waiting)  # not of their gradients: the same on all ranks
        if is_large or number > MOST_WAITING or len(self._waiting) == PLACES or not self._can_wait:
            self._offer_waiting()
        return taken  # this rank's: DDP averages the flat gradient

    def _offer_waiting(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._ranks.headers([tensor.number for tensor, _ in waiting], (), self._names)
            for tensor, dense in waiting:
                if isinstance(dense, BlockGradient):
                    self._offer_mean_of_block(tensor, dense)
                else:
                    self._offer_mean(tensor, partial(some_rows, dense))

    def offer_joined(self, batches: Sequence[Joined]) -> None:
        self._offer_waiting()
        for own in batches:
            self._small.update(own.gradients)

    def winners(self) -> Winners:
        """Returns the selected entries, best first; to be called once all ranks have come to the end of the pass."""
        self._offer_waiting()
        self._offer_mean_of_small()
        self._offer_begun()
        everyone = [self._ranks.gather(part).view(-1) for part in self._topk.best()]
        ids, scores, *rest = keep_best(everyone, self._topk.size)
        return Winners(ids.where(scores > 0, -1), *rest)

    def _offer_mean(self, tensor: MaskedTensor, rows_of: Callable[[int, int], Tensor]) -> None:
        (height, cols), entries, ranks = matrix_shape(tensor), tensor.matrix.reshape(-1), num_ranks()
        at_once = max(1, MOST_AT_ONCE // (ranks * cols)) * ranks
        for start in range(0, height, at_once):
            rows = rows_of(start, min(start + at_once, height)).to(self._dtype)
            self._offer_share(entries[start * cols :], rows.view(-1), tensor.offset + start * cols)

    def _offer_mean_of_block(self, tensor: Any, gradient: BlockGradient) -> None:
        """Averages what this rank holds of a weight over the ranks that hold the same."""
        weight, values = tensor.local, gradient.values.reshape(-1)
        for start in range(0, values.numel(), BLOCK_AT_ONCE):
            grad = values[start : start + BLOCK_AT_ONCE].to(self._dtype)
            places = torch.arange(start, start + grad.numel(), device=grad.device)
            ids = gradient.block.indices(places) + tensor.offset
            self._offer_share(weight[start:], grad, 0, ids, self._copies)

    def _offer_mean_of_small(self) -> None:
        by_device: defaultdict[torch.device, Joined] = defaultdict(Joined)
        for tensor, found in self._small.items():
            device = tensor.parameter.device
            own = torch.zeros(tensor.numel, dtype=self._dtype, device=device) if found is None else found
            by_device[device].add([tensor], own)
        for small in by_device.values():
            weight, grad, offset, ids = small.entries(self._excluded_places(small))
            self._work["dense"] += grad.numel()
            self._offer_share(weight, grad.to(self._dtype), offset, ids)

    def _offer_share(
        self, weight: Tensor, grad: Tensor, offset: int, ids: Tensor | None = None, group: Any = None
    ) -> None:
        """Averages gradients (n,), to offer this rank's share, of weights (n or more,) and global ids (n,)."""
        number, averaged = grad.numel(), self._ranks.mean_share(grad, group)

        def offer() -> None:
            mean = averaged()
            first = dist.get_rank(group) * mean.numel()
            share = slice(first, min(first + mean.numel(), number))  # without padding
            if first < number:
                mean, own = mean[: share.stop - first], None if ids is None else ids[share]
                self._topk.offer(self._importance, weight[share][None], mean[None], None, offset + first, own)

        self._offer_begun()
        self._begun = offer
        if not self._can_wait:
            self._offer_begun()

    def _offer_begun(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun()
