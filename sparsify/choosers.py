"""Who chooses a step's entries while the gradients come by, one tensor at a time.

A *streaming* chooser finds them by the gradients; a *ranked* one knows them ahead and only waits for their gradients.
Either ends with the winners and their own gradients, and says whether every gradient it saw was finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from sparsify.importance import GradientImportance
from sparsify.masked.product import Product
from sparsify.masked.tensor import Gradient, MaskedTensor
from sparsify.screen import can_screen, offer_screened
from sparsify.selection import Pool, Winners, offer_gradient


class Chooser(Protocol):
    """Chooses the entries of one step."""

    def wants(self, tensor: MaskedTensor) -> bool:
        """Whether it has to see this tensor's gradient."""

    def prepare(self, tensor: MaskedTensor, gradient: Gradient) -> Gradient:
        """The gradient in the form in which :meth:`offer` will want it."""

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> None:
        """Takes the whole gradient of one tensor; it may be written to and is not used afterwards."""

    def skip(self, tensor: MaskedTensor) -> None:
        """The tensor's gradient is empty: no token came by."""

    def winners(self) -> Winners:
        """The chosen entries, best first."""

    def finite(self) -> list[Tensor]:
        """Bool scalars: whether what was seen is finite."""


class StreamingChooser:
    """The best entries by their gradients, in memory for as many as are wanted.

    Args:
        pool: of the size that is wanted.
        importance: scores the entries.
        masked_only: whether entries that are unmasked already are no candidates.
    """

    def __init__(self, pool: Pool, importance: GradientImportance, *, masked_only: bool) -> None:
        self._pool = pool
        self._importance = importance
        self._masked_only = masked_only
        self._finite: list[Tensor] = []

    def wants(self, tensor: MaskedTensor) -> bool:
        return True

    def prepare(self, tensor: MaskedTensor, gradient: Gradient) -> Gradient:
        """The place where a tensor gets its candidates from a screen in bfloat16, or from the whole gradient."""
        screens = isinstance(gradient, Product) and can_screen(gradient, self._importance, self._pool, tensor.count)
        return gradient if screens else gradient.dense()

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> None:
        excluded = tensor.not_candidates if self._masked_only else tensor.never_candidates
        _, finite = offer_masked(self._pool, self._importance, tensor, gradient, excluded)
        self._finite.append(finite)

    def skip(self, tensor: MaskedTensor) -> None:
        pass

    def winners(self) -> Winners:
        return self._pool.winners()

    def finite(self) -> list[Tensor]:
        return self._finite


def offer_masked(
    pool: Pool, importance: GradientImportance, tensor: MaskedTensor, gradient: Gradient, excluded: Tensor
) -> tuple[Gradient, Tensor]:
    """Offers a tensor's entries but for the excluded ones (k,), given by flat index.

    Returns:
        The gradient in the form that was looked at, and a bool scalar on the pool's device: whether all was finite.
    """
    if isinstance(gradient, Product):
        if offer_screened(pool, importance, tensor.matrix, gradient, excluded, tensor.offset):
            return gradient, torch.ones_like(pool.floor, dtype=torch.bool)
        gradient = gradient.dense()
    if excluded.numel():
        gradient.clear(excluded)  # an entry whose gradient is zero is never offered
    finite = offer_gradient(pool, importance, tensor.matrix, gradient.values, gradient.rows, tensor.offset)
    return gradient, finite.to(pool.floor.device)


class RankedChooser:
    """Entries that are known ahead.

    Args:
        ids: (n,) int64 global ids, best first.
        tensors: all masked tensors, by ascending offset.
        like: the flat gradient, for its dtype and device.
    """

    def __init__(self, ids: Tensor, tensors: Sequence[MaskedTensor], like: Tensor) -> None:
        self._ids, self._order = ids.to(like.device).sort()
        self._grads = like.new_zeros(ids.numel())
        ends = torch.tensor([0, *(tensor.offset + tensor.numel for tensor in tensors)], device=like.device)
        cuts = torch.searchsorted(self._ids, ends).tolist()
        self._own = {t: slice(*cut) for t, cut in zip(tensors, pairwise(cuts), strict=True)}

    def wants(self, tensor: MaskedTensor) -> bool:
        return self._own[tensor].start < self._own[tensor].stop

    def prepare(self, tensor: MaskedTensor, gradient: Gradient) -> Gradient:
        return gradient

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> None:
        own = self._own[tensor]
        if own.start < own.stop:
            indices = (self._ids[own] - tensor.offset).to(tensor.parameter.device)
            self._grads[own] = gradient.take(indices).to(self._grads)

    def skip(self, tensor: MaskedTensor) -> None:
        pass

    def winners(self) -> Winners:
        back = self._order.argsort()
        return Winners(self._ids[back], self._grads[back])

    def finite(self) -> list[Tensor]:
        return [self._grads.isfinite().all()]
