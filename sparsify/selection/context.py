"""What a step looks for in the gradients, and what is left of a gradient that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from sparsify.masked.tensor import Gradient, MaskedTensor
from sparsify.selection.counters import Work
from sparsify.selection.topk import Pool, offer_gradient
from sparsify.strategies.importance import GradientImportance


@dataclass(frozen=True)
class Search:
    """The best entries by an importance.

    Attributes:
        pool: takes the candidates.
        importance: scores them.
        work: what was done for it; is added to.
    """

    pool: Pool
    importance: GradientImportance
    work: Work


class Offered(NamedTuple):
    """What is left of a gradient that was offered.

    Attributes:
        unmasked: (k,) the gradient of the unmasked entries.
        rest: the gradient in the form that was looked at.
        finite: bool scalar on the pool's device: whether what was looked at is finite.
    """

    unmasked: Tensor
    rest: Gradient
    finite: Tensor


def offer_whole(search: Search, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor) -> Offered:
    """Offers all entries of a gradient but the excluded ones.

    Args:
        search: has the pool.
        tensor: whose gradient it is.
        gradient: is written to, where it is not a product still.
        excluded: (e,) flat indices that are no candidates.
    """
    search.work.multiplied += gradient.numel
    gradient = gradient.dense()
    unmasked = gradient.take(tensor.indices)
    if excluded.numel():
        gradient.clear(excluded)  # an entry whose gradient is zero is never offered
    finite = offer_gradient(
        search.pool, search.importance, tensor.matrix, gradient.values, gradient.rows, tensor.offset
    )
    return Offered(unmasked, gradient, finite.to(search.pool.floor.device))
