"""What a step looks for in the gradients, and what is left of a gradient that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from sparsify.masked.gradients import Gradient
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.counters import Work
from sparsify.selection.topk import TopK, offer_gradient
from sparsify.strategies.importance import GradientImportance


@dataclass(frozen=True)
class SelectionContext:
    """The best entries by an importance.

    Attributes:
        topk: takes the candidates.
        importance: scores them.
        work: what was done for it; is added to.
    """

    topk: TopK
    importance: GradientImportance
    work: Work


class ScanResult(NamedTuple):
    """What is left of a gradient that was offered.

    Attributes:
        unmasked: (k,) the gradient of the unmasked entries.
        rest: the gradient in the form that was looked at.
        finite: bool scalar on the top-k's device: whether what was looked at is finite.
    """

    unmasked: Tensor
    rest: Gradient
    finite: Tensor


def scan_dense(context: SelectionContext, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor) -> ScanResult:
    """Offers all entries of a gradient but the excluded ones.

    Args:
        context: has the topk.
        tensor: whose gradient it is.
        gradient: is written to, where it is not a product still.
        excluded: (e,) flat indices that are no candidates.
    """
    context.work.multiplied += gradient.numel
    gradient = gradient.dense()
    unmasked = gradient.take(tensor.indices)
    if excluded.numel():
        gradient.clear(excluded)  # an entry whose gradient is zero is never result
    finite = offer_gradient(
        context.topk, context.importance, tensor.matrix, gradient.values, gradient.rows, tensor.offset
    )
    return ScanResult(unmasked, gradient, finite.to(context.topk.threshold.device))
