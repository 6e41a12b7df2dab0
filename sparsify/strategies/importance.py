"""Importances beyond the core's: of the weights alone, Fisher information, SNIP, and a user's own function."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsify.core.importance import D3, Importance, with_slack
from sparsify.errors import SparsifyError


@dataclass(frozen=True)
class Magnitude(Importance):
    """Smallest weights first: -abs(weight) (PaFi, Liao et al. 2023).

    Args:
        largest: largest weights first: abs(weight).

    Example:
        >>> Magnitude().score(torch.tensor([0.5, -0.25]), None)
        tensor([-0.5000, -0.2500])
    """

    largest: bool = False
    name = "magnitude"
    uses_gradient = False

    def score(self, weight: Tensor, grad: None) -> Tensor:
        return weight.abs() if self.largest else -weight.abs()


@dataclass(frozen=True)
class Random(Importance):
    """Entries drawn uniformly by the seed, without a score of each."""

    name = "random"
    uses_gradient = False


@dataclass(frozen=True)
class Bias(Importance):
    """Only parameters named ``bias``, all with the same score (BitFit, Ben Zaken et al. 2022).

    Example:
        >>> Bias().covers("encoder.layer.0.output.dense.bias"), Bias().covers("encoder.layer.0.output.dense.weight")
        (True, False)
    """

    name = "bias"
    uses_gradient = False

    def score(self, weight: Tensor, grad: None) -> Tensor:
        return torch.ones_like(weight)

    def covers(self, parameter_name: str) -> bool:
        return parameter_name.rsplit(".", 1)[-1] == "bias"


@dataclass(frozen=True)
class Fisher(Importance):
    """The diagonal of the empirical Fisher information: grad^2, summed over single examples (Sung et al. 2021).

    With :class:`sparsify.Static` the sum is over calibration examples at their true labels, before training. Any other
    selection squares the gradient of each step's batch.

    Args:
        num_samples: calibration examples, at least 1.

    Example:
        >>> Fisher().score(torch.tensor([0.0, 1.0]), torch.tensor([-3.0, 4.0]))
        tensor([ 9., 16.])
    """

    num_samples: int = 1024
    name = "fisher"
    monotone = True

    def __post_init__(self) -> None:
        if type(self.num_samples) is not int or self.num_samples < 1:
            raise SparsifyError(f"Fisher got num_samples={self.num_samples!r}; expected an int of at least 1.")

    def score(self, weight: Tensor, grad: Tensor) -> Tensor:
        return grad.square()

    def least_gradient(self, threshold: Tensor, weight: Tensor) -> Tensor:
        return with_slack(threshold).sqrt().expand(weight.shape[0])


@dataclass(frozen=True)
class GSNR(Importance):
    """Signal-to-noise ratio of the gradient: its mean over the batches of a calibration by its root mean square.

    This is the part of the learning rate by which Adam moves an entry. For :class:`sparsify.Static`; at least two
    batches, and some 32 to tell signal from noise.

    Source: Liu et al. 2020, "Understanding why neural networks generalize well through GSNR of parameters".
    """

    name = "gsnr"

    def score(self, weight: Tensor, grad: Tensor) -> Tensor:
        return grad  # the calibration has the ratio, not a gradient


@dataclass(frozen=True)
class SNIP(Importance):
    """Connection sensitivity: abs(weight x grad), the first-order change of the loss without the entry.

    An entry that is zero scores zero and is never unmasked. In a new LoRA, whose ``B`` is zero, no entry scores above
    zero unless it was made with ``init_lora_weights=False``.

    Example:
        >>> SNIP().score(torch.tensor([0.5, 0.0]), torch.tensor([-3.0, 4.0]))
        tensor([1.5000, 0.0000])

    Source: Lee et al. 2019, "SNIP: Single-shot network pruning based on connection sensitivity". The paper divides the
    scores by their sum, which does not change their order.
    """

    name = "snip"
    monotone = True

    def score(self, weight: Tensor, grad: Tensor) -> Tensor:
        return (weight * grad).abs()

    def least_gradient(self, threshold: Tensor, weight: Tensor) -> Tensor:
        largest = torch.linalg.vector_norm(weight, torch.inf, dim=1).to(threshold.dtype)
        return (with_slack(threshold) / largest).nan_to_num(nan=0.0, posinf=torch.inf)


@dataclass(frozen=True)
class Custom(Importance):
    """A user's function as an importance. Nothing is known about it, so that it has no bound."""

    name: str
    function: Callable[..., Tensor] = field(repr=False, compare=False)
    uses_gradient: bool = field(default=True, compare=False)

    def score(self, weight: Tensor, grad: Any) -> Tensor:
        scores = self.function(weight, grad) if self.uses_gradient else self.function(weight)
        if not isinstance(scores, Tensor) or scores.shape != weight.shape:
            made = f"made {getattr(scores, 'shape', scores)} of a block of shape {tuple(weight.shape)}; expected"
            raise SparsifyError(f"the importance {self.name!r} {made} a score for every entry, in that shape.")
        return scores if scores.is_floating_point() else scores.to(weight.dtype)


IMPORTANCES: dict[str, Any] = {kind.name: kind for kind in (D3, Fisher, GSNR, SNIP, Magnitude, Random, Bias)}


def register_importance(name: str, *, uses_gradient: bool = True) -> Callable[[Callable[..., Tensor]], Custom]:
    """Makes a pure function an importance, for any selection.

    Args:
        name: the importance's name in a delta's config.
        uses_gradient: whether the function takes (weight, grad) or the weight alone.

    Returns:
        A decorator. The function gets blocks of weights and gradients of one shape, in float32 or float64, and
        returns their scores in that shape. It works entry by entry: scores must not depend on block boundaries. With
        the gradient, only entries that score above 0 are unmasked. Non-finite scores are ignored; where no score is
        finite, an error (before training) or a warning (in training) names the importance.

    Raises:
        SparsifyError: when the name is that of a built-in importance.

    Example:
        >>> @register_importance("movement")
        ... def movement(weight, grad):
        ...     return -weight * grad  # above 0 where a descent step takes the weight away from zero
        >>> movement.score(torch.tensor([1.0, -2.0]), torch.tensor([-3.0, -1.0]))
        tensor([ 3., -2.])
    """
    if not isinstance(name, str) or not name:
        raise SparsifyError(f"name={name!r}; expected a string that is not empty.")
    if isinstance(IMPORTANCES.get(name), type):
        raise SparsifyError(f"{name!r} is a built-in importance; register yours under another name.")

    def register(function: Callable[..., Tensor]) -> Custom:
        importance = Custom(name, function, uses_gradient)
        IMPORTANCES[name] = lambda: importance
        return importance

    return register
