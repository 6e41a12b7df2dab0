"""Repeats a step's selection densely, as the paper's Algorithm 1 has it, and compares the two.

    offer      scores every entry of the tensor and keeps all scores: this takes more memory than dense gradients
    winners    compares the best of all scores with the winners of the streaming selector

The two sum over tokens in different orders. So a score may be off by ``ROUNDING`` times what the entry would score if
its products did not cancel, by more for many tokens, and in a 16-bit type by the rounding of its gradient. A selection
is right if its entries are the best for some scores within that slack.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.errors import SparsifyError
from sparsify.kernels.candidates import at_least_float32
from sparsify.masked.gradients import Gradient, Product, TiedGradient
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.context import SelectionContext
from sparsify.selection.selectors import StreamingSelector
from sparsify.selection.small_tensors import SmallGradients
from sparsify.selection.topk import Winners

ROUNDING = {torch.float32: 2e-6, torch.float64: 1e-12}
FEW_TOKENS = 64  # up to as many, ROUNDING holds; beyond, errors grow with the root of the number of tokens


class CheckedSelector(StreamingSelector):
    """Selects the best entries by their gradients, and raises where the dense form would select others."""

    def __init__(self, context: SelectionContext) -> None:
        super().__init__(context)
        self._scored: dict[MaskedTensor, Tensor] = {}  # (2, numel) of each: scores, and how far they may be off

    def offer(self, tensor: MaskedTensor, gradient: Gradient) -> Tensor:
        self._score(tensor, gradient)
        return super().offer(tensor, gradient)

    def offer_small(self, small: SmallGradients) -> None:
        for tensor, gradient in small.pairs:
            self._score(tensor, gradient)
        super().offer_small(small)

    def winners(self) -> Winners:
        """Returns the selected entries, best first.

        Raises:
            SparsifyError: when the dense form selects others, or gives them other gradients.
        """
        winners = super().winners()
        winners = winners.first(int((winners.ids >= 0).sum()))
        if self._scored and self.finite():  # otherwise nothing is unmasked
            self._compare(winners)
        return winners

    def _score(self, tensor: MaskedTensor, gradient: Gradient) -> None:
        """Scores a tensor's entries; those that are no candidates get 0."""
        importance, rows = self._context.importance, gradient.rows
        grad, largest, error = _in_full(gradient)
        weight = at_least_float32(tensor.matrix if rows is None else tensor.matrix[rows])
        scores = importance.score(weight, grad)
        most = importance.score(weight, largest).abs().maximum(scores)
        rounding = (importance.score(weight, grad + error * grad.sign()) - scores).abs()
        scored = torch.stack([scores, ROUNDING[scores.dtype] * most + rounding])
        scored = scored.where((scores > 0) & scores.isfinite() & (grad != 0), 0)
        if rows is not None:
            scored = scored.new_zeros(2, *tensor.matrix.shape).index_add_(1, rows, scored)
        self._scored[tensor] = scored.view(2, -1).index_fill_(1, self._context.excluded(tensor), 0)

    def _compare(self, winners: Winners) -> None:
        size, total = self._context.topk.size, max(tensor.offset + tensor.numel for tensor in self._scored)
        scores, slack = winners.grads.new_zeros(2, total)
        found = torch.full_like(scores, torch.nan)  # the scores of the winners, by the gradients they come with
        found[winners.ids] = torch.inf
        for tensor, scored in self._scored.items():
            place = slice(tensor.offset, tensor.offset + tensor.numel)
            scores[place], slack[place] = scored
            own = (winners.ids >= place.start) & (winners.ids < place.stop)
            indices = winners.ids[own] - tensor.offset
            weight = tensor.take(indices.to(tensor.parameter.device)).to(scores)
            found[place][indices] = self._context.importance.score(weight, winners.grads[own])
        selected, (best_scores, best) = ~found.isnan(), scores.topk(min(size, total))
        cut = best_scores[-1] if size <= total else scores.new_zeros(())
        most, least = scores + slack, scores - slack
        worst = most.where(selected & (scores > 0), torch.inf).amin()
        passed_over = least.where(~selected, -torch.inf).amax()
        wrong = selected & ((found - scores).abs() > slack)
        wrong |= ~selected & (least > worst) & (scores >= cut)
        wrong |= selected & (most < passed_over) & (scores <= cut)
        if winners.ids.numel() < size:
            wrong[best] |= ~selected[best] & (best_scores > slack[best])
        if wrong.any():
            entry = int(wrong.nonzero()[0])
            tensor = next(t for t in self._scored if 0 <= entry - t.offset < t.numel)
            what = f"was unmasked with a score of {float(found[entry]):.9g}" if selected[entry] else "was not unmasked"
            raise SparsifyError(
                f"entry {entry - tensor.offset:,} of `{tensor.name}` {what}; by the dense form its score is "
                f"{float(scores[entry]):.9g}, and the last entry to be unmasked has {float(cut):.9g}. Both should "
                "select the same entries: please report it, and whether it happens with SPARSIFY_NATIVE=0 in the "
                "environment (without the compiled loops) too."
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
