"""Layers of other libraries that cannot be trained at some of their entries, and why.

They set their trained weights by themselves while they train, or go by gradients that a masked weight never has. In: a
module. Out: what an error says of it. Classes are known by name, so that their libraries need not be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# full name of a class -> whether a module of it is meant, and what the error says
_PROBLEMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "peft.tuners.adalora.layer.AdaLoraLayer": (
        lambda module: True,
        "is AdaLoRA's, which allots its ranks by the gradient of every entry, and adds a penalty on all entries; LoRA "
        "does neither",
    ),
    "peft.tuners.adamss.layer.AdamssLayer": (
        lambda module: bool(module.exp_avg_ipt_A),
        "is AdaMSS's, which picks its subspaces by the gradient of every entry; with use_asa=False it does not",
    ),
    "peft.tuners.cpt.model.CPTEmbedding": (
        lambda module: True,
        "is CPT's, which projects its weight in every forward and so moves every entry; prompt tuning does not",
    ),
    "peft.tuners.oft.layer.OFTRotationModule": (
        lambda module: bool(module.coft),
        "is constrained OFT's, which projects its weight in every forward and so moves every entry; with coft=False it "
        "does not",
    ),
}


def foreign_problem(module: nn.Module) -> str | None:
    """What is wrong with masking the parameters of a module, or of those within it; ``None`` where nothing is known.

    Example:
        >>> foreign_problem(nn.Linear(2, 2)) is None
        True
    """
    for kind in type(module).__mro__:
        is_meant, problem = _PROBLEMS.get(f"{kind.__module__}.{kind.__qualname__}", (None, ""))
        if is_meant is not None and is_meant(module):
            return problem
    return None
