"""Who chooses a step's entries while the gradients come by, one tensor at a time.

A *streaming* selector finds them by the gradients; a *ranked* one knows them ahead and only waits for their gradients.
Either ends with the winners and their own gradients, and says whether every gradient it saw was finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from sparsify.masked.gradients import Gradient
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.context import ScanResult, SelectionContext, scan_dense
from sparsify.selection.screening import can_screen, scan_screened
from sparsify.selection.small_tensors import SmallGradients
from sparsify.selection.topk import Winners


class Selector(Protocol):
    """Chooses the entries of one step."""

    def wants(self, tensor: MaskedTensor) -> bool:
        """Whether it has to see this tensor's gradient."""

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        """Takes the whole gradient of one tensor and returns that of its unmasked entries (k,).

        The gradient may be written to and is not used afterwards.
        """

    @property
    def offer_small(self) -> Callable[[SmallGradients], None] | None:
        """Takes the whole gradients of all small tensors, after the others; ``None``: each is offered by itself."""

    def skip(self, tensor: MaskedTensor) -> None:
        """The tensor's gradient is empty: no token came by."""

    def winners(self) -> Winners:
        """The chosen entries, best first."""

    def finite(self) -> list[Tensor]:
        """Bool scalars: whether what was seen is finite."""


class StreamingSelector:
    """The best entries by their gradients, in memory for as many as are wanted.

    Args:
        context: its topk is of the size that is wanted.
        masked_only: whether entries that are unmasked already are no candidates.
    """

    def __init__(self, context: SelectionContext, *, masked_only: bool) -> None:
        self._search = context
        self._masked_only = masked_only
        self._finite: list[Tensor] = []

    def wants(self, tensor: MaskedTensor) -> bool:
        return True

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        excluded = tensor.not_candidates if self._masked_only else tensor.never_candidates
        result = scan(self._search, tensor, gradient, excluded)
        self._finite.append(result.finite)
        return result.unmasked

    def offer_small(self, small: SmallGradients) -> None:
        self._finite.append(small.offer(self._search, masked_only=self._masked_only))

    def skip(self, tensor: MaskedTensor) -> None:
        """No token came by, so nothing can be chosen."""

    def winners(self) -> Winners:
        return self._search.topk.winners()

    def finite(self) -> list[Tensor]:
        return self._finite


def scan(context: SelectionContext, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor) -> ScanResult:
    """Offers a tensor's entries but for the excluded ones (e,), flat indices: screened where that is sooner done."""
    result = scan_screened(context, tensor, gradient, excluded) if can_screen(context, gradient) else None
    return result or scan_dense(context, tensor, gradient, excluded)


class RankedSelector:
    """Entries that are known ahead.

    Args:
        ids: (n,) int64 global ids, best first.
        tensors: all masked tensors, by ascending offset.
        like: the flat gradient, for its dtype and device.
    """

    offer_small = None

    def __init__(self, ids: Tensor, tensors: Sequence[MaskedTensor], like: Tensor) -> None:
        self._ids, self._order = ids.to(like.device).sort()
        self._grads = like.new_zeros(ids.numel())
        ends = torch.tensor([0, *(tensor.offset + tensor.numel for tensor in tensors)], device=like.device)
        cuts = torch.searchsorted(self._ids, ends).tolist()
        self._own = {t: slice(*cut) for t, cut in zip(tensors, pairwise(cuts), strict=True)}

    def wants(self, tensor: MaskedTensor) -> bool:
        return self._own[tensor].start < self._own[tensor].stop

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        own = self._own[tensor]
        if own.start < own.stop:
            indices = (self._ids[own] - tensor.offset).to(tensor.parameter.device)
            self._grads[own] = gradient.take(indices).to(self._grads)
        return gradient.take(tensor.indices)

    def skip(self, tensor: MaskedTensor) -> None:
        """No token came by, so nothing can be chosen."""

    def winners(self) -> Winners:
        back = self._order.argsort()
        return Winners(self._ids[back], self._grads[back])

    def finite(self) -> list[Tensor]:
        return [self._grads.isfinite().all()]
