"""How much an entry matters: pure scores of weights and gradients, block by block.

Two kinds, told apart by ``uses_gradient``:

* a *gradient importance* scores ``(weight, grad)`` blocks during backward. An entry whose gradient or score is zero is
  never unmasked;
* a *weight importance* needs no gradient, so its ranking is known ahead of a step.

A user's own is a pure function with a name: :func:`register_importance`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsify.errors import SparsifyError

ROUNDING_SLACK = 1 + 1e-5  # a bound has to stay above the score however either is rounded


@runtime_checkable
class GradientImportance(Protocol):
    """What the streaming selection asks of an importance that looks at gradients."""

    @property
    def name(self) -> str:
        """What it is called in JSON."""

    @property
    def uses_gradient(self) -> bool:
        """True."""

    @property
    def monotone(self) -> bool:
        """Whether, for any weight, a larger abs(grad) never scores lower."""

    def score(self, weight: Tensor, grad: Tensor) -> Tensor:
        """Scores (..., n) of the entries with these weights (..., n) and gradients (..., n)."""

    def least_gradient(self, floor: Tensor, weight: Tensor) -> Tensor:
        """Lower bound (rows,) of abs(grad) at the entries of each row of weights (rows, cols) that score ``floor``."""


@runtime_checkable
class WeightImportance(Protocol):
    """What a selection asks of an importance that looks at weights only."""

    @property
    def name(self) -> str:
        """What it is called in JSON."""

    @property
    def uses_gradient(self) -> bool:
        """False."""

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

    def least_gradient(self, floor: Tensor, weight: Tensor) -> Tensor:
        floor = _with_slack(floor)
        if self.exp >= 0:  # the denominator is smallest where the weight is 0: no pass over the weights is needed
            return (floor * self.eps**self.exp).expand(weight.shape[0])
        return _or_any(floor * (_largest(weight, floor) + self.eps) ** self.exp)


@dataclass(frozen=True)
class Fisher:
    """The diagonal of the empirical Fisher information: grad^2, summed over examples one by one (Sung et al. 2021).

    With :class:`sparsify.Static` the sum is taken over calibration examples at their true labels, before training. Any
    other selection sees one gradient a step, that of the batch, and squares that.

    Args:
        num_samples: calibration examples, at least 1.

    Example:
        >>> Fisher().score(torch.tensor([0.0, 1.0]), torch.tensor([-3.0, 4.0]))
        tensor([ 9., 16.])
    """

    num_samples: int = 1024
    name: ClassVar[str] = "fisher"
    uses_gradient: ClassVar[bool] = True
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.num_samples, bool) or not isinstance(self.num_samples, int) or self.num_samples < 1:
            raise SparsifyError(f"Fisher got num_samples={self.num_samples!r}; expected an int of at least 1.")

    def score(self, weight: Tensor, grad: Tensor) -> Tensor:
        return grad.square()

    def least_gradient(self, floor: Tensor, weight: Tensor) -> Tensor:
        return _with_slack(floor).sqrt().expand(weight.shape[0])


@dataclass(frozen=True)
class SNIP:
    """Connection sensitivity: abs(weight x grad), how much the loss changes to first order without the entry.

    An entry that is zero scores zero and is never unmasked: a new LoRA, whose ``B`` is all zeros, has no entry that
    scores at all, unless PEFT is told ``init_lora_weights=False``.

    Example:
        >>> SNIP().score(torch.tensor([0.5, 0.0]), torch.tensor([-3.0, 4.0]))
        tensor([1.5000, 0.0000])

    Source: Lee et al. 2019, "SNIP: Single-shot network pruning based on connection sensitivity". The paper divides the
    scores by their sum, which changes no order.
    """

    name: ClassVar[str] = "snip"
    uses_gradient: ClassVar[bool] = True
    monotone: ClassVar[bool] = True

    def score(self, weight: Tensor, grad: Tensor) -> Tensor:
        return (weight * grad).abs()

    def least_gradient(self, floor: Tensor, weight: Tensor) -> Tensor:
        return _or_any(_with_slack(floor) / _largest(weight, floor))


@dataclass(frozen=True)
class GraSP:
    """Gradient signal preservation: weight x (H grad), with H the loss's Hessian. For pruning (:class:`Prune`).

    Without an entry the squared norm of the gradient changes by -2 weight x (H grad), to first order. The paper removes
    the entries for which -weight x (H grad) is largest; here the entries to *keep* score highest, hence the sign. A
    score below zero says that the gradient flows better without the entry.

    It takes a calibration of batches that differentiates the loss twice and so holds the whole graph of one batch and a
    dense gradient of all candidates; a training step has nothing like it, so that it goes with ``Static`` and ``Prune``
    only. The paper divides the logits by 200 first: pass a ``loss_fn`` that does, for that.

    Example:
        >>> GraSP().score(torch.tensor([0.5, -2.0]), torch.tensor([-3.0, -4.0]))
        tensor([-1.5000,  8.0000])

    Source: Wang et al. 2020, "Picking winning tickets before training by preserving gradient flow", equations 6 to 8.
    """

    name: ClassVar[str] = "grasp"
    uses_gradient: ClassVar[bool] = True
    monotone: ClassVar[bool] = False

    def score(self, weight: Tensor, grad: Tensor) -> Tensor:
        """Scores (..., n) from the weights (..., n) and, in the gradients' place, H grad (..., n)."""
        return weight * grad

    def least_gradient(self, floor: Tensor, weight: Tensor) -> Tensor:
        return floor.new_zeros(()).expand(weight.shape[0])


@dataclass(frozen=True)
class Magnitude:
    """The smallest weights matter most: score -abs(weight), zeros first (PaFi, Liao et al. 2023).

    Args:
        largest: score abs(weight) instead, so that the largest weights come first.

    Example:
        >>> Magnitude().score(torch.tensor([0.5, -0.25]), torch.Generator())
        tensor([-0.5000, -0.2500])
    """

    largest: bool = False
    name: ClassVar[str] = "magnitude"
    uses_gradient: ClassVar[bool] = False

    def score(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        return weight.abs() if self.largest else -weight.abs()

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


@dataclass(frozen=True)
class Custom:
    """An importance of the user's own; made by :func:`register_importance`."""

    name: str
    function: Callable[..., Tensor] = field(repr=False, compare=False)
    uses_gradient: bool = field(default=True, compare=False)
    monotone: ClassVar[bool] = False  # nothing is known of the function, so every entry is scored

    def score(self, weight: Tensor, other: Any) -> Tensor:
        scores = self.function(weight, other) if self.uses_gradient else self.function(weight)
        if not isinstance(scores, Tensor) or scores.shape != weight.shape:
            raise SparsifyError(
                f"the importance {self.name!r} made {getattr(scores, 'shape', scores)} of a block of shape "
                f"{tuple(weight.shape)}; expected a score for every entry, in that shape."
            )
        return scores

    def least_gradient(self, floor: Tensor, weight: Tensor) -> Tensor:
        return floor.new_zeros(()).expand(weight.shape[0])

    def covers(self, parameter_name: str) -> bool:
        return True


def _with_slack(floor: Tensor) -> Tensor:
    """A little below the floor, or 0: an entry has to be found however its score was rounded, or flushed to zero."""
    return (floor - torch.finfo(floor.dtype).tiny).div_(ROUNDING_SLACK).clamp_(min=0)


def _or_any(least: Tensor) -> Tensor:
    """0 where nothing can be said."""
    return least.nan_to_num(nan=0.0, posinf=torch.inf)


def _largest(weight: Tensor, like: Tensor) -> Tensor:
    """The largest abs(weight) (rows,) of each row (rows, cols)."""
    return torch.linalg.vector_norm(weight, torch.inf, dim=1).to(like.dtype)


IMPORTANCES: dict[str, Callable[..., Importance]] = {
    kind.name: kind for kind in (D3, Fisher, SNIP, GraSP, Magnitude, Random, Bias)
}


def register_importance(name: str, *, uses_gradient: bool = True) -> Callable[[Callable[..., Tensor]], Custom]:
    """Makes an importance of a pure function, for any selection, under a name that JSON can hold.

    Args:
        name: what it is called in a delta's config.
        uses_gradient: whether the function takes (weight, grad) or the weight alone.

    Returns:
        A decorator. The function gets blocks of weights and gradients of one shape, in float32 or float64, and
        returns their scores in that shape; entry by entry, since where the blocks begin and end is not its business.
        With the gradient, only entries that score above 0 are ever unmasked. Scores that are not finite do not count,
        and where no entry has one that does, an error (before training) or a warning (in training) names it.

    Raises:
        SparsifyError: when the name is one of the built-in importances'.

    Example:
        >>> @register_importance("movement")
        ... def movement(weight, grad):
        ...     return -weight * grad  # above 0 where a descent step takes the weight away from zero
        >>> movement.score(torch.tensor([1.0, -2.0]), torch.tensor([-3.0, -1.0]))
        tensor([ 3., -2.])
    """
    if not isinstance(name, str) or not name:
        raise SparsifyError(f"an importance is to be called {name!r}; expected a string that is not empty.")
    if name in IMPORTANCES and name not in _REGISTERED:
        raise SparsifyError(f"{name!r} is an importance of sparsify's own; register yours under another name.")

    def register(function: Callable[..., Tensor]) -> Custom:
        importance = Custom(name, function, uses_gradient)
        IMPORTANCES[name] = lambda: importance
        _REGISTERED.add(name)
        return importance

    return register


_REGISTERED: set[str] = set()
