"""Scanning a gradient for a step's best entries: what is looked for, and the work it took."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch import Tensor

from sparsify.core.gradients import Gradient
from sparsify.core.importance import Importance
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import TopK
from sparsify.selection.device_topk import DeviceTopK
from sparsify.selection.small import SmallGradients


@dataclass
class Work:
    """Entries that a selection looked at, by the way it took; entries that are no candidates are counted too.

    The numbers are known from shapes and lengths: counting waits for no device. Each rank counts its own work.

    Attributes:
        screened: not ruled out by the norms of a product's factors, so computed and compared.
        dense: taken from a whole gradient.
        skipped: ruled out by the norms, so not computed.
    """

    screened: int = 0
    dense: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        """Describes the work.

        Example:
            >>> print(Work(screened=84_312, dense=600_123, skipped=84_934_656))
            84,312 entries screened, 0.6 M entries dense, 84.9 M entries skipped
        """
        short = {way: f"{n:,}" if n < 100_000 else f"{n / 1e6:,.1f} M" for way, n in asdict(self).items() if n}
        return ", ".join(f"{number} entries {way}" for way, number in short.items()) or "no entry was looked at"


@dataclass(frozen=True)
class SelectionContext:
    """What a selection looks for: the best entries by an importance."""

    topk: TopK | DeviceTopK  # takes the candidates
    importance: Importance  # scores them
    work: Work  # counts the entries that are scanned
    masked_only: bool = True  # whether unmasked entries are no candidates

    def entries_of(self, small: SmallGradients) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, gradients and global ids (n,) of small tensors' entries; no candidate's gradient is zero."""
        self.work.dense += sum(small.sizes)
        return small.entries([self.excluded(tensor) for tensor in small.tensors])

    def excluded(self, tensor: MaskedTensor) -> Tensor:
        """Flat indices (e,), in no order, of a tensor's entries that are no candidates."""
        return tensor.not_candidates if self.masked_only else tensor.never_candidates


def scan_dense(
    context: SelectionContext, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor
) -> tuple[Tensor, Gradient]:
    """Offers all entries of a tensor's gradient but the excluded ones (e,) to the top-k; it is written to.

    Returns:
        The gradient of the unmasked entries (k,), and the whole gradient in its dense form.
    """
    context.work.dense += gradient.numel
    gradient = gradient.dense()
    unmasked = gradient.take(tensor.indices)
    if excluded.numel():
        gradient.clear(excluded)  # an entry whose gradient is zero is never offered
    context.topk.offer(context.importance, tensor.matrix, gradient.values, gradient.rows, tensor.offset)
    return unmasked, gradient
