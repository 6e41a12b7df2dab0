"""What ``sparsify(model, budget)`` does where no strategy is named: what runs on models of the same kind speak for.

The runs behind it are in tutorials/choosing.md. The paper's own setting is ``strategy="id3"``, for all parameters.
"""

import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from sparsify.common.names import plain_model
from sparsify.common.quantized import is_quantized
from sparsify.strategies.strategy import PRESETS, Strategy
from sparsify.strategies.targets import ALL_LINEAR, PEFT_SAVED, Pattern, is_peft, match_modules, with_children

MANY = 0.05  # share of the linear layers; with 12 % ID3 at its usual rate diverges, where random entries do not


def recommend(
    model: nn.Module, budget: Any, schedule: Any, target_modules: Pattern, modules_to_save: list[str] | None
) -> tuple[Strategy, Any, Pattern]:
    """Returns strategy, schedule and target modules for a model; the last two are those that are given, if they are.

    Random entries are for a causal language model that is trained itself, and for a large budget in any other one; ID3
    is for the rest and for new adapters. The candidates are in the linear layers, and in modules that hold several
    matrices in one parameter, as experts, but for a model that has more to train elsewhere, as a convolutional one.
    """
    modules = dict(model.named_modules())
    saved = with_children(match_modules(model, modules_to_save or None, "modules_to_save"), modules)
    saved |= {name for name in modules if PEFT_SAVED in name.split(".")}
    linear = match_modules(model, ALL_LINEAR, "target_modules") | {n for n, m in modules.items() if _stacks(n, m)}
    linear -= saved
    head = getattr(model, "get_output_embeddings", lambda: None)()
    others = [modules[name] for name in modules.keys() - saved - linear]
    other, _ = _count(each for each in others if not isinstance(each, nn.Embedding) and each is not head)
    number, frozen = _count(modules[name] for name in linear)
    has_quantized = any(map(is_quantized, model.parameters()))  # which do not require grad
    is_itself = not is_peft(modules) and (number > frozen or has_quantized)
    candidates = number + (frozen if has_quantized else 0) + (0 if number > other else other)
    is_large = isinstance(budget, int | float) and 0 < MANY * (1 if budget < 1 else candidates) <= budget
    strategy = PRESETS["random" if is_itself and (is_large or _is_language_model(plain_model(model))) else "id3"]
    if target_modules is None and number > other:
        trained = [name for name in sorted(linear) if _count([modules[name]])[0]]
        target_modules = "|".join(map(re.escape, trained))
    return strategy, "early" if schedule is None else schedule, target_modules


def _count(modules: Iterable[nn.Module]) -> tuple[int, int]:
    """How many numbers of the modules' own parameters require grad, and how many do not."""
    parameters = [own for module in modules for own in module.parameters(recurse=False)]
    trainable = sum(own.numel() for own in parameters if own.requires_grad)
    return trainable, sum(own.numel() for own in parameters) - trainable


def _stacks(name: str, module: nn.Module) -> bool:
    """Whether a module has a parameter of several matrices; kernels of convolutions, also parametrized, are none."""
    is_kernel = isinstance(module, _ConvNd) or "parametrizations" in name.split(".")
    shapes = [own.shape for own in module.parameters(recurse=False)]
    return not is_kernel and any(len(shape) == 3 and shape[0] > 1 for shape in shapes)


def _is_language_model(model: Any) -> bool:
    """Whether a model of transformers continues its input, as no encoder with a decoder does."""
    can_generate = hasattr(model, "can_generate") and model.can_generate()
    return can_generate and not getattr(model.config, "is_encoder_decoder", False)
