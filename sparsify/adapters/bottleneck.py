"""One adapter: a projection down to a few dimensions, a non-linearity, a projection up, added to the hidden states.

In: the hidden states of a layer, by a forward hook. Out: the adapted hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsify.errors import SparsifyError

INITIAL_STD = 0.02  # of AdapterHub's init_weights="bert"
_LEAST_FACTOR = 2**-10  # a larger bottleneck than 1024 times the hidden size is a mistake, or an attack


class Kind(NamedTuple):
    """A published way to place adapters in a layer, by AdapterHub's settings for it.

    Attributes:
        mh_adapter: whether the attention has an adapter in addition to the feed-forward network's.
        original_ln_before: whether the adapter's input is the sublayer's output with the residual added (and
            normalised, where a norm follows in the layer), or the sublayer's output alone.
        non_linearity: the activation in the bottleneck.
    """

    mh_adapter: bool
    original_ln_before: bool
    non_linearity: str


KINDS = {"houlsby": Kind(True, False, "swish"), "pfeiffer": Kind(False, True, "relu")}
_NON_LINEARITIES = {"swish": nn.SiLU, "relu": nn.ReLU}


@dataclass(frozen=True)
class AdapterConfig:
    """Kind, size, name and, if given, places of a model's adapters.

    Attributes:
        kind: ``"pfeiffer"`` or ``"houlsby"``.
        reduction_factor: hidden size divided by the bottleneck's size.
        name: of the adapters; a part of their parameters' names.
        target_modules: full names of the modules whose output is adapted, where the user named them.

    Raises:
        SparsifyError: for an unknown kind, or a factor, name or names of modules that are not valid.

    Example:
        >>> AdapterConfig("houlsby", 16).bottleneck(768)
        48
    """

    kind: str = "pfeiffer"
    reduction_factor: float = 16
    name: str = "default"
    target_modules: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise SparsifyError(f"kind={self.kind!r:.100} is no kind of adapter; expected {' or '.join(KINDS)}.")
        factor = self.reduction_factor
        if isinstance(factor, bool) or not isinstance(factor, Real) or not _LEAST_FACTOR <= factor < math.inf:
            raise SparsifyError(
                f"reduction_factor={factor!r:.100}; expected a number of at least 1/1024: a factor of 16 makes the "
                "bottleneck a sixteenth of the hidden size."
            )
        name, reserved = self.name, nn.ModuleDict()
        if not isinstance(name, str) or not name or "." in name or hasattr(reserved, name):
            raise SparsifyError(
                f"adapter_name={name!r:.100} cannot be part of a parameter's name; expected a word without dots that "
                "is no method of a dict, such as 'default'."
            )
        named = self.target_modules
        if named is not None and not (
            isinstance(named, (list, tuple)) and all(isinstance(module, str) for module in named)
        ):
            raise SparsifyError(f"target_modules={named!r:.100}; expected a list of module names.")

    def bottleneck(self, width: int) -> int:
        """Returns the bottleneck's size for hidden states of ``width`` dimensions: at least one."""
        return max(1, int(width // self.reduction_factor))


class Adapter(nn.Module):
    """A bottleneck adapter: ``up(f(down(x)))``, which its hooks add to the hidden states.

    Initial weights are AdapterHub's: normal with a standard deviation of 0.02, biases zero.

    Args:
        width: size of the hidden states.
        config: kind and reduction factor.

    Attributes:
        adapter_down: ``nn.Sequential`` of a linear layer (width -> bottleneck) and the non-linearity.
        adapter_up: linear layer (bottleneck -> width).

    Example:
        >>> adapter = Adapter(32, AdapterConfig("pfeiffer", reduction_factor=16))
        >>> [(name, tuple(parameter.shape)) for name, parameter in adapter.named_parameters()][:2]
        [('adapter_down.0.weight', (2, 32)), ('adapter_down.0.bias', (2,))]
    """

    def __init__(self, width: int, config: AdapterConfig) -> None:
        super().__init__()
        self.config = config
        bottleneck = config.bottleneck(width)
        down = nn.Linear(width, bottleneck)
        self.adapter_down = nn.Sequential(down, _NON_LINEARITIES[KINDS[config.kind].non_linearity]())
        self.adapter_up = nn.Linear(bottleneck, width)
        for projection in (down, self.adapter_up):
            nn.init.normal_(projection.weight, std=INITIAL_STD)
            nn.init.zeros_(projection.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the change of ``hidden`` (..., width), in the dtype of that."""
        change: Tensor = self.adapter_up(self.adapter_down(hidden.to(self.adapter_up.weight.dtype)))
        return change.to(hidden.dtype)

    def adapt_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook: replaces the output x of a module, or the first of its outputs, by ``x + adapter(x)``."""
        if isinstance(output, torch.Tensor):
            return output + self(output)
        return (output[0] + self(output[0]), *output[1:])

    def adapt_before_norm(self, norm: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Forward pre-hook of a norm: replaces its input x by ``x + adapter(norm(x))``."""
        return (args[0] + self(norm.forward(args[0])), *args[1:])
