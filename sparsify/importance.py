"""How much an entry matters: pure scores of weights and gradients, block by block.

Two kinds, told apart by ``uses_gradient``:

* a *gradient importance* scores ``(weight, grad)`` blocks during backward. An entry whose gradient is zero scores
  zero and is never unmasked;
* a *weight importance* needs no gradient, so its ranking is known before training starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsify.errors import SparsifyError

ROUNDING_SLACK = 1 + 1e-5  # a bound has to stay above the score however either is rounded


@runtime_checkable
class GradientImportance(Protocol):
    """What the streaming selection asks of an importance that looks at gradients."""

    name: ClassVar[str]
    uses_gradient: ClassVar[bool]
    monotone: ClassVar[bool]  # whether, for any weight, a larger abs(grad) never scores lower

    def score(self, weight: Tensor, grad: Tensor) -> Tensor:
        """Scores (..., n) of the entries with these weights (..., n) and gradients (..., n)."""

    def bound(self, grad_max: Tensor, weight: Tensor) -> Tensor:
        """Upper bound (rows,) of the scores in each row, from max abs(grad) (rows,) and the weights (rows, cols)."""


@runtime_checkable
class WeightImportance(Protocol):
    """What the static selection asks of an importance that looks at weights only."""

    name: ClassVar[str]
    uses_gradient: ClassVar[bool]

    def score(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        """Scores (n,) of a block of weights (n,); ``generator`` is the only source of randomness."""

    def covers(self, parameter_name: str) -> bool:
        """Whether entries of the parameter with this name can be selected at all."""


Importance = GradientImportance | WeightImportance


@dataclass(frozen=True)
class D3:
    """Dynamic magnitude and gradient importance: abs(grad) / (abs(weight) + eps)^exp.

    The paper's equation for H (D3). ``exp=0`` is the gradient's magnitude alone; a large ``exp`` prefers small weights.

    Args:
        exp: how strongly a large weight lowers the importance; may be negative.
        eps: smoothing, above 0.

    Example:
        >>> D3(exp=2, eps=1).score(torch.tensor([0.0, 1.0]), torch.tensor([-3.0, 4.0]))
        tensor([3., 1.])
    """

    exp: float = 2.0
    eps: float = 1.0
    name: ClassVar[str] = "d3"
    uses_gradient: ClassVar[bool] = True
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (self.eps > 0 and math.isfinite(self.eps) and math.isfinite(self.exp)):
            raise SparsifyError(
                f"D3 got exp={self.exp!r}, eps={self.eps!r}; exp must be finite and eps a finite number above 0. "
                "The paper uses D3(exp=2, eps=1) for language understanding."
            )

    def score(self, weight: Tensor, grad: Tensor) -> Tensor:
        return grad.abs() / (weight.abs() + self.eps) ** self.exp

    def bound(self, grad_max: Tensor, weight: Tensor) -> Tensor:
        if self.exp >= 0:  # the denominator is smallest where the weight is 0: no pass over the weights is needed
            smallest = self.eps**self.exp
        else:
            smallest = (weight.abs().amax(dim=1).to(grad_max.dtype) + self.eps) ** self.exp
        return grad_max / smallest * ROUNDING_SLACK + torch.finfo(grad_max.dtype).tiny


@dataclass(frozen=True)
class Magnitude:
    """The smallest weights matter most: score -abs(weight), zeros first (PaFi, Liao et al. 2023).

    Example:
        >>> Magnitude().score(torch.tensor([0.5, -0.25]), torch.Generator())
        tensor([-0.5000, -0.2500])
    """

    name: ClassVar[str] = "magnitude"
    uses_gradient: ClassVar[bool] = False

    def score(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        return -weight.abs()

    def covers(self, parameter_name: str) -> bool:
        return True


@dataclass(frozen=True)
class Random:
    """Every entry is as likely as any other, from a generator seeded by (seed, parameter name)."""

    name: ClassVar[str] = "random"
    uses_gradient: ClassVar[bool] = False

    def score(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        # drawn on the CPU, so that a seed means the same entries on every device
        return torch.rand(weight.shape, generator=generator, dtype=torch.float32).to(weight.device)

    def covers(self, parameter_name: str) -> bool:
        return True


@dataclass(frozen=True)
class Bias:
    """Parameters named ``bias``, all alike, and nothing else (BitFit, Ben Zaken et al. 2022).

    Example:
        >>> Bias().covers("encoder.layer.0.output.dense.bias"), Bias().covers("encoder.layer.0.output.dense.weight")
        (True, False)
    """

    name: ClassVar[str] = "bias"
    uses_gradient: ClassVar[bool] = False

    def score(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        return torch.ones_like(weight)

    def covers(self, parameter_name: str) -> bool:
        return parameter_name.rsplit(".", 1)[-1] == "bias"


IMPORTANCES: dict[str, Callable[..., Importance]] = {kind.name: kind for kind in (D3, Magnitude, Random, Bias)}
