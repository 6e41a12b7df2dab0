"""Repeats a step's selection densely, as the paper's Algorithm 1 has it, and compares the two.

    offer      scores every entry of the tensor and keeps all scores: this takes more memory than dense gradients
    winners    compares the best of all scores with the winners of the selector under test

The two sum over tokens in different orders. So a score may be off by ``ROUNDING`` times what the entry would score if
its products did not cancel, by more for many tokens, and in a 16-bit type by the rounding of its gradient. A selection
is right if its entries are the best for some scores within that slack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.errors import SparsifyError
from sparsify.kernels.candidates import at_least_float32
from sparsify.masked.gradients import DenseGradient, Gradient, Product, TiedGradient
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.selectors import Selector
from sparsify.selection.small_tensors import SmallGradients
from sparsify.selection.topk import Winners
from sparsify.strategies.importance import GradientImportance

ROUNDING = {torch.float32: 2e-6, torch.float64: 1e-12}
FEW_TOKENS = 64  # up to as many, ROUNDING holds; beyond, errors grow with the root of the number of tokens


class Scored(NamedTuple):
    """Entries in the dense form."""

    ids: Tensor  # (n,) int64, global
    scores: Tensor  # (n,)
    slack: Tensor  # (n,) how far a score may be off


class CheckedSelector(Selector):
    """Selects as another selector does, and raises where the dense form would not.

    Args:
        selector: the selector under test.
        size: how many entries it selects.
        importance: scores the entries.
        masked_only: whether unmasked entries are no candidates.
    """

    def __init__(self, selector: Selector, size: int, importance: GradientImportance, *, masked_only: bool) -> None:
        self._selector = selector
        self._size = size
        self._importance = importance
        self._masked_only = masked_only
        self._scored: dict[MaskedTensor, Scored] = {}
        self._finite = True

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        self._scored[tensor] = self._score(tensor, gradient)
        return self._selector.offer(tensor, gradient)

    @property
    def offer_small(self) -> Callable[[SmallGradients], None] | None:
        return None if self._selector.offer_small is None else self._offer_small

    def winners(self) -> Winners:
        """Returns the selected entries, best first.

        Raises:
            SparsifyError: when the dense form selects others, or gives them other gradients.
        """
        winners = self._selector.winners()
        if self._finite and self._scored:  # otherwise nothing is unmasked
            self._compare(winners)
        return winners

    def finite(self) -> list[Tensor]:
        return self._selector.finite()

    def _offer_small(self, small: SmallGradients) -> None:
        for tensor, gradient in small.pairs:
            self._scored[tensor] = self._score(tensor, gradient)
        offer = self._selector.offer_small
        assert offer is not None
        offer(small)

    def _score(self, tensor: MaskedTensor, gradient: Gradient) -> Scored:
        """Scores a tensor's candidates."""
        rows, (grad, largest, error) = gradient.rows, _in_full(gradient)
        weight = at_least_float32(tensor.matrix if rows is None else tensor.matrix[rows])
        self._finite &= bool(grad.isfinite().all())
        scores = self._importance.score(weight, grad)
        candidates = DenseGradient(scores.where((scores > 0) & scores.isfinite() & (grad != 0), 0), rows)
        candidates.clear(tensor.not_candidates if self._masked_only else tensor.never_candidates)
        at = row, column = candidates.values.nonzero(as_tuple=True)
        ids = (row if rows is None else rows[row]) * weight.shape[1] + column + tensor.offset
        most = self._importance.score(weight, largest).abs().maximum(scores)
        rounding = (self._importance.score(weight, grad + error * grad.sign()) - scores).abs()
        return Scored(ids, scores[at], ROUNDING[scores.dtype] * most[at] + rounding[at])

    def _compare(self, winners: Winners) -> None:
        device = winners.ids.device
        parts = zip(*self._scored.values(), strict=True)
        ids, scores, slack = (torch.cat([one.to(device) for one in part]) for part in parts)
        ids, order = ids.sort()
        scores, slack = scores[order], slack[order]
        best = scores.argsort(descending=True, stable=True)[: self._size]
        cut = scores[best[-1]] if best.numel() == self._size else scores.new_zeros(())
        known, claimed = torch.isin(winners.ids, ids), self._scores_of(winners).to(scores)
        if not known.all():
            stranger = int((~known).nonzero()[0])
            self._raise(int(winners.ids[stranger]), float(claimed[stranger]), 0.0, float(cut))
        if not ids.numel():  # and no winners
            return
        found = torch.full_like(scores, torch.nan)
        found[torch.searchsorted(ids, winners.ids)] = claimed
        chosen = ~found.isnan()
        wrong = chosen & ((found - scores).abs() > slack)
        most, least = scores + slack, scores - slack
        worst, passed_over = most.where(chosen, torch.inf).amin(), least.where(~chosen, -torch.inf).amax()
        wrong |= ~chosen & (least > worst) & (scores >= cut)
        wrong |= chosen & (most < passed_over) & (scores <= cut)
        if winners.ids.numel() < best.numel():
            wrong[best] |= ~chosen[best] & (scores[best] > slack[best])
        if wrong.any():
            entry = int(wrong.nonzero()[0])
            self._raise(int(ids[entry]), float(found[entry]), float(scores[entry]), float(cut))

    def _scores_of(self, winners: Winners) -> Tensor:
        """The scores (n,) of winners by the gradients that they come with."""
        scores = torch.full_like(winners.grads, torch.inf)
        for tensor in self._scored:
            own = (winners.ids >= tensor.offset) & (winners.ids < tensor.offset + tensor.numel)
            weight = tensor.take((winners.ids[own] - tensor.offset).to(tensor.parameter.device)).to(scores)
            scores[own] = self._importance.score(weight, winners.grads[own])
        return scores

    def _raise(self, entry: int, found: float, score: float, cut: float) -> None:
        tensor = next(t for t in self._scored if 0 <= entry - t.offset < t.numel)
        what = "was not unmasked" if found != found else f"was unmasked with a score of {found:.9g}"
        raise SparsifyError(
            f"entry {entry - tensor.offset:,} of `{tensor.name}` {what}; by the dense form its score is {score:.9g}, "
            f"and the last entry to be unmasked has {cut:.9g}. Both should select the same entries: please report it, "
            "and whether it happens with SPARSIFY_NATIVE=0 in the environment (without the compiled loops) too."
        )


def _in_full(gradient: Gradient) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a gradient (n, cols) in float32 at least, its size without cancellation, and the error of its rounding.

    The second grows with the tokens of a product, as errors do. The third is there for 16-bit factors: the dense
    product is rounded to their type, and single entries are not.
    """
    if isinstance(gradient, TiedGradient):
        grad, largest, error = _in_full(gradient.product)
        rows = gradient.looked_up.dense().values.to(grad)
        at = gradient.looked_up.rows
        assert at is not None
        total = grad.index_add(0, at, rows)
        short = _rounding(gradient.product)  # once for the product, the rows, and their sum
        error = error.index_add(0, at, short * rows.abs()) + short * total.abs()
        return total, largest.index_add(0, at, rows.abs()), error
    if not isinstance(gradient, Product):
        grad = at_least_float32(gradient.dense().values)
        return grad, grad, torch.zeros_like(grad)
    left, right = (at_least_float32(factor) for factor in (gradient.left, gradient.right))
    left_norm, right_norm = (torch.linalg.vector_norm(factor, dim=0) for factor in (left, right))
    largest = left_norm[:, None] * right_norm * max(1.0, (left.shape[0] / FEW_TOKENS) ** 0.5)
    grad = left.t() @ right
    return grad, largest, _rounding(gradient) * grad.abs()


def _rounding(gradient: Gradient) -> float:
    """Relative rounding of an entry of a product of 16-bit factors."""
    assert isinstance(gradient, Product)
    return 0.0 if gradient.left.dtype in ROUNDING else torch.finfo(gradient.left.dtype).eps
