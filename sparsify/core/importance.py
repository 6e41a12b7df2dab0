"""Importance of entries: pure functions of weights and gradients, applied block by block."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsify.errors import SparsifyError

ROUNDING_SLACK = 1 + 1e-5  # a bound stays above the score however either is rounded


class Importance:
    """A named score of entries.

    If it uses the gradient, an entry whose gradient or score is zero is never unmasked. Otherwise it scores the weights
    alone, and its ranking is known before a step.
    """

    name: str  # in a delta's config
    uses_gradient: bool = True
    monotone: bool = False  # whether, for any weight, a larger abs(grad) never scores lower

    def score(self, weight: Tensor, grad: Any, /) -> Tensor:
        """Scores (..., n) of entries by their weights (..., n) and gradients (..., n), ``None`` where it uses none."""
        raise NotImplementedError(f"the importance {self.name!r} has no scores")

    def least_gradient(self, threshold: Tensor, weight: Tensor) -> Tensor:
        """Lower bound (rows,) of abs(grad) at the entries of each row of weights (rows, cols) that reach a score."""
        return threshold.new_zeros(()).expand(weight.shape[0])

    def covers(self, parameter_name: str) -> bool:
        """Whether entries of the parameter with this name can be selected."""
        return True


@dataclass(frozen=True)
class D3(Importance):
    """Dynamic magnitude and gradient importance, the paper's H: abs(grad) / (abs(weight) + eps)^exp.

    ``exp=0`` is the gradient's magnitude alone; a large ``exp`` prefers small weights.

    Args:
        exp: how strongly a large weight lowers the importance; may be negative.
        eps: smoothing, above 0.

    Example:
        >>> D3(exp=2, eps=1).score(torch.tensor([0.0, 1.0]), torch.tensor([-3.0, 4.0]))
        tensor([3., 1.])
    """

    exp: float = 2.0
    eps: float = 1.0
    name = "d3"
    monotone = True

    def __post_init__(self) -> None:
        are_finite = (isinstance(own, (int, float)) and math.isfinite(own) for own in (self.exp, self.eps))
        if not (all(are_finite) and self.eps > 0):
            expected = "exp must be a finite int or float and eps one above 0. The paper uses D3(exp=2, eps=1)"
            raise SparsifyError(f"D3 got exp={self.exp!r}, eps={self.eps!r}; {expected} for language understanding.")

    def score(self, weight: Tensor, grad: Tensor) -> Tensor:
        return grad.abs() / (weight.abs() + self.eps) ** self.exp

    def least_gradient(self, threshold: Tensor, weight: Tensor) -> Tensor:
        threshold = with_slack(threshold)
        if self.exp >= 0:  # the denominator is smallest where the weight is 0: no pass over the weights is needed
            return (threshold * self.eps**self.exp).expand(weight.shape[0])
        largest = torch.linalg.vector_norm(weight, torch.inf, dim=1).to(threshold.dtype)
        return (threshold * (largest + self.eps) ** self.exp).nan_to_num(nan=0.0, posinf=torch.inf)


def with_slack(threshold: Tensor) -> Tensor:
    """A little below the threshold, at least 0, so that no entry is missed by rounding or by flushing to zero."""
    return (threshold - torch.finfo(threshold.dtype).tiny).div_(ROUNDING_SLACK).clamp_(min=0)
