"""One adapter: a projection down to a few dimensions, a non-linearity, a projection up, added to the hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor, nn

from sparsify.errors import SparsifyError

_LEAST_FACTOR = 2**-10  # a larger bottleneck than 1024 times the hidden size is a mistake, or an attack
# AdapterHub's settings for two published kinds: whether the attention has an adapter, in addition to the feed-forward
# network's, and whether an adapter sees the sum of a sublayer's output and its residual, or the output
KINDS: dict[str, dict[str, Any]] = {
    "houlsby": {"mh_adapter": True, "original_ln_before": False, "non_linearity": "swish"},
    "pfeiffer": {"mh_adapter": False, "original_ln_before": True, "non_linearity": "relu"},
}
_NON_LINEARITIES = {"swish": nn.SiLU, "relu": nn.ReLU}


@dataclass(frozen=True)
class AdapterConfig:
    """Kind (``"pfeiffer"`` or ``"houlsby"``), size and name of a model's adapters, as for :func:`add_adapters`.

    ``target_modules`` are full names of the modules whose output is adapted, where the user named them.
    """

    kind: str = "pfeiffer"
    reduction_factor: float = 16
    name: str = "default"
    target_modules: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise SparsifyError(f"kind={self.kind!r:.100} is no kind of adapter; expected {' or '.join(KINDS)}.")
        factor, name, modules = self.reduction_factor, self.name, self.target_modules
        if isinstance(factor, bool) or not isinstance(factor, Real) or not _LEAST_FACTOR <= factor < math.inf:
            raise SparsifyError(f"reduction_factor={factor!r:.100}; expected a number of at least 1/1024, such as 16.")
        if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict(), name):
            expected = "a word without dots that is no method of a dict, such as 'default'."
            raise SparsifyError(f"adapter_name={name!r:.100} cannot be part of a parameter's name; expected {expected}")
        is_list = isinstance(modules, (list, tuple)) and all(isinstance(module, str) for module in modules)
        if modules is not None and not is_list:
            raise SparsifyError(f"target_modules={modules!r:.100}; expected a list of module names.")


class Adapter(nn.Module):
    """A bottleneck adapter for hidden states of one ``width``: ``up(f(down(x)))``, which its hooks add to them."""

    def __init__(self, width: int, config: AdapterConfig) -> None:
        super().__init__()
        self.config = config
        bottleneck = max(1, int(width // config.reduction_factor))
        down = nn.Linear(width, bottleneck)
        self.adapter_down = nn.Sequential(down, _NON_LINEARITIES[KINDS[config.kind]["non_linearity"]]())
        self.adapter_up = nn.Linear(bottleneck, width)
        for projection in (down, self.adapter_up):
            nn.init.normal_(projection.weight, std=0.02)  # AdapterHub's init_weights="bert"
            nn.init.zeros_(projection.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the change of ``hidden`` (..., width), in the dtype of that."""
        change: Tensor = self.adapter_up(self.adapter_down(hidden.to(self.adapter_up.weight.dtype)))
        return change.to(hidden.dtype)

    def adapt_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook: replaces the output x of a module, or the first of its outputs, by ``x + adapter(x)``."""
        if isinstance(output, Tensor):
            return output + self(output)
        return (output[0] + self(output[0]), *output[1:])

    def adapt_before_norm(self, norm: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Forward pre-hook of a norm: replaces its input x by ``x + adapter(norm(x))``."""
        return (args[0] + self(norm.forward(args[0])), *args[1:])
