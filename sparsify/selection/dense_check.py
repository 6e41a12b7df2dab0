"""A step's selection, made a second time from whole gradients as the paper has it, and compared.

    offer      every entry of the tensor is scored, and all scores are kept: more memory than dense gradients take
    winners    the best of all scores, against those that the selector found by its shorter ways

Sums over tokens are rounded in another order by one way than by the other. So a score may be off by ``ROUNDING`` of
what the entry would score if its products did not cancel, or more where the tokens are many, and in a short type by the
rounding of its gradient. A selection is right where the chosen entries are the best for some scores within that slack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.errors import SparsifyError
from sparsify.masked.gradients import DenseGradient, Gradient, Product, TiedGradient
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.counters import Work
from sparsify.selection.selectors import Selector
from sparsify.selection.small_tensors import SmallGradients
from sparsify.selection.topk import Winners
from sparsify.strategies.importance import GradientImportance

ROUNDING = {torch.float32: 2e-6, torch.float64: 1e-12}
WHOLE = "the whole gradient"
WAYS = {"the screen": "screened", "the bound of the norms": "skipped", WHOLE: "multiplied"}
FEW_TOKENS = 64  # whose sum is off by no more than that; errors grow with the root of the number of terms


class Scored(NamedTuple):
    """Entries in the dense form.

    Attributes:
        ids: (n,) int64, global.
        scores: (n,).
        slack: (n,) what a score may be off by.
    """

    ids: Tensor
    scores: Tensor
    slack: Tensor


class CheckedSelector:
    """Chooses as another selector does, and raises where the dense form would not.

    Args:
        selector: who is checked.
        size: how many entries it is to choose.
        importance: scores the entries.
        work: what it counts its work in.
        masked_only: whether entries that are unmasked already are no candidates.
    """

    def __init__(
        self, selector: Selector, size: int, importance: GradientImportance, work: Work, *, masked_only: bool
    ) -> None:
        self._chooser = selector
        self._size = size
        self._importance = importance
        self._work = work
        self._masked_only = masked_only
        self._scored: dict[MaskedTensor, Scored] = {}
        self._ways: dict[MaskedTensor, str] = {}
        self._finite = True

    def wants(self, tensor: MaskedTensor) -> bool:
        return self._chooser.wants(tensor)

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        self._scored[tensor] = self._score(tensor, gradient)
        before = replace(self._work)
        taken = self._chooser.offer(tensor, gradient)
        grown = [way for way, counter in WAYS.items() if getattr(self._work, counter) > getattr(before, counter)]
        self._ways[tensor] = " and ".join(grown) or "no look at all"
        return taken

    @property
    def offer_small(self) -> Callable[[SmallGradients], None] | None:
        return None if self._chooser.offer_small is None else self._offer_small

    def skip(self, tensor: MaskedTensor) -> None:
        self._chooser.skip(tensor)

    def winners(self) -> Winners:
        """The chosen entries, best first.

        Raises:
            SparsifyError: when the dense form chooses others, or they come with other gradients.
        """
        winners = self._chooser.winners()
        if self._finite and self._scored:  # otherwise nothing is unmasked
            self._compare(winners)
        return winners

    def finite(self) -> list[Tensor]:
        return self._chooser.finite()

    def _offer_small(self, small: SmallGradients) -> None:
        for tensor, gradient in small.pairs:
            self._scored[tensor], self._ways[tensor] = self._score(tensor, gradient), WHOLE
        offer = self._chooser.offer_small
        assert offer is not None
        offer(small)

    def _score(self, tensor: MaskedTensor, gradient: Gradient) -> Scored:
        """A tensor's entries that can be chosen."""
        rows, (grad, largest, error) = gradient.rows, _in_full(gradient)
        weight = _at_least_float32(tensor.matrix if rows is None else tensor.matrix[rows])
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
        every = Scored(*(torch.cat(parts) for parts in zip(*self._on(winners.ids.device), strict=True)))
        ids, order = every.ids.sort()
        scores, slack = every.scores[order], every.slack[order]
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

    def _on(self, device: torch.device) -> list[tuple[Tensor, ...]]:
        return [tuple(part.to(device) for part in scored) for scored in self._scored.values()]

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
            f"entry {entry - tensor.offset:,} of `{tensor.name}`, found or not by {self._ways[tensor]}, {what}; by the "
            f"dense form its score is {score:.9g}, and the last entry to be unmasked has {cut:.9g}. Both ways should "
            "choose the same: please report it. The environment variable SPARSIFY_NATIVE=0 tells whether it is the "
            "compiled loops."
        )


def _in_full(gradient: Gradient) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient (n, cols) in float32 at least, what it would be without cancelling, and the rounding of its own type.

    Of a product the second counts how errors grow with the tokens. The third is what rounding may move an entry by: a
    product of short numbers is multiplied out in that type, and its single entries are not.
    """
    if isinstance(gradient, TiedGradient):
        grad, largest, error = _in_full(gradient.product)
        rows = gradient.looked_up.dense().values.to(grad)
        at = gradient.looked_up.rows
        assert at is not None
        total = grad.index_add(0, at, rows)
        short = _rounding(gradient.product)  # of the product, of the rows, and of their sum
        error = error.index_add(0, at, short * rows.abs()) + short * total.abs()
        return total, largest.index_add(0, at, rows.abs()), error
    if not isinstance(gradient, Product):
        grad = _at_least_float32(gradient.dense().values)
        return grad, grad, torch.zeros_like(grad)
    left, right = (_at_least_float32(factor) for factor in (gradient.left, gradient.right))
    left_norm, right_norm = (torch.linalg.vector_norm(factor, dim=0) for factor in (left, right))
    largest = left_norm[:, None] * right_norm * max(1.0, (left.shape[0] / FEW_TOKENS) ** 0.5)
    grad = left.t() @ right
    return grad, largest, _rounding(gradient) * grad.abs()


def _rounding(gradient: Gradient) -> float:
    """What a number of a product is rounded by, relative to itself, where its factors are short."""
    assert isinstance(gradient, Product)
    return 0.0 if gradient.left.dtype in ROUNDING else torch.finfo(gradient.left.dtype).eps


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
