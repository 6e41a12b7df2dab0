"""Scanning a gradient for a step's best entries: what is looked for, what a scan leaves, and the work it took."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from torch import Tensor

from sparsify.masked.gradients import Gradient
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.topk import TopK, offer_gradient
from sparsify.strategies.importance import GradientImportance


@dataclass
class Work:
    """Entries that a selection looked at, by the way it took; entries that are no candidates are counted too.

    The numbers are known from shapes and lengths: counting waits for no device. Each rank counts its own work.

    Attributes:
        screened: computed tile by tile and compared, in bfloat16 where the CPU has matrix units.
        verified: screened entries that could be among the best.
        dense: taken from a whole gradient.
        skipped: ruled out by the norms of a product's factors, so not computed.
        wasted: screened first, then computed densely after all, as too many were left or not all might be finite.
    """

    screened: int = 0
    verified: int = 0
    dense: int = 0
    skipped: int = 0
    wasted: int = 0

    def __str__(self) -> str:
        """Describes the work.

        Example:
            >>> print(Work(screened=84_934_656, verified=312, dense=600_123))
            84.9 M entries screened, 312 entries verified, 0.6 M entries dense
        """
        numbers = {field.name: getattr(self, field.name) for field in fields(self)}
        short = {way: f"{n:,}" if n < 100_000 else f"{n / 1e6:,.1f} M" for way, n in numbers.items() if n}
        return ", ".join(f"{number} entries {way}" for way, number in short.items()) or "no entry was looked at"


@dataclass(frozen=True)
class SelectionContext:
    """What a selection looks for: the best entries by an importance."""

    topk: TopK  # takes the candidates
    importance: GradientImportance  # scores them
    work: Work  # counts the entries that are scanned


class ScanResult(NamedTuple):
    """What a scan leaves of a gradient."""

    unmasked: Tensor  # (k,) the gradient of the unmasked entries
    rest: Gradient  # the gradient in the form that was scanned
    finite: Tensor  # bool scalar on the top-k's device: whether everything scanned is finite


def scan_dense(context: SelectionContext, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor) -> ScanResult:
    """Offers all entries of a gradient but the excluded ones to the top-k.

    Args:
        context: has the top-k.
        tensor: whose gradient it is.
        gradient: is written to, unless it is a product still.
        excluded: (e,) flat indices that are no candidates.
    """
    context.work.dense += gradient.numel
    gradient = gradient.dense()
    unmasked = gradient.take(tensor.indices)
    if excluded.numel():
        gradient.clear(excluded)  # an entry whose gradient is zero is never offered
    finite = offer_gradient(
        context.topk, context.importance, tensor.matrix, gradient.values, gradient.rows, tensor.offset
    )
    return ScanResult(unmasked, gradient, finite.to(context.topk.threshold.device))
