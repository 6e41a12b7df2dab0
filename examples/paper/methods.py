"""Methods: what of the model is trained, as rows of one table.

A method is a strategy, an adapter (LoRA or Pfeiffer's), or both: the strategy then selects among the adapter's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import peft
from torch import nn

from examples.paper.settings import Settings
from sparsify import D3, Increment, Magnitude, Schedule, Static, Strategy, sparsify
from sparsify.adapters import add_adapters
from sparsify.strategies.strategy import PRESETS

REDUCTION_FACTOR = 2  # of Pfeiffer's adapters, the paper's
SKIPPED = ("o_proj", "gate_proj")  # linear layers of LLaMA and Qwen that the paper's LoRA leaves out


@dataclass(frozen=True)
class Method:
    """What is trained.

    Args:
        strategy: of the run's settings; ``None``: the adapter or model is trained whole.
        adapter: ``"lora"``, ``"pfeiffer"`` or none.
        rank: of the LoRA; ``None``: the one whose size is nearest to the budget.
        alpha: of the LoRA; ``None``: its rank.
        skipped: linear layers without a LoRA.
        share: of the adapter's numbers, instead of a budget.
        takes_budget: whether the budget decides how many numbers are trained.
        rates: which of a suite's learning rates are for this method.
    """

    strategy: Callable[[Settings], Strategy] | None = None
    adapter: str | None = None
    rank: int | None = None
    alpha: int | None = None
    skipped: tuple[str, ...] = ()
    share: float | None = None
    takes_budget: bool = True
    rates: str = "selective"

    def normalise(self, settings: Settings) -> Settings:
        """The settings without those that this method does not depend on."""
        unused: dict[str, Any] = {} if self.takes_budget else {"budget": None}
        if self.strategy is None or self.adapter or not self.takes_budget:
            unused["candidates"] = None
        strategy = self.strategy(settings) if self.strategy else None
        if strategy is None or not isinstance(strategy.selection, Increment):
            unused |= {"shape": None, "until": None, "every": 1}
        if self.strategy not in (_id3, _d3_static, _d3_repeat):
            unused |= {"exp": None, "eps": None}
        if strategy is None or self.adapter == "lora":  # PEFT keeps the head dense
            unused["head"] = "dense"
        elif settings.head == "budget":
            unused["head_rate"] = None
        return replace(settings, **unused)


def _preset(name: str) -> Callable[[Settings], Strategy]:
    return lambda settings: PRESETS[name]


def _d3(settings: Settings) -> D3:
    return D3(exp=2 if settings.exp is None else settings.exp, eps=1 if settings.eps is None else settings.eps)


def _id3(settings: Settings) -> Strategy:
    return Strategy(_d3(settings), Increment())


def _d3_static(settings: Settings) -> Strategy:
    return Strategy(_d3(settings), Static())


def _d3_repeat(settings: Settings) -> Strategy:
    return Strategy(_d3(settings), PRESETS["d3-repeat"].selection)


def _static_gradient(settings: Settings) -> Strategy:
    """The largest gradients, the same density in every tensor: Liu et al. 2024, arXiv 2412.13488."""
    return Strategy(D3(exp=0, eps=1), Static(allocation="uniform"))


METHODS = {
    "id3": Method(_id3),
    "pafi": Method(_preset("pafi")),
    "fish": Method(_preset("fish")),
    "fish-spread": Method(lambda settings: Strategy(PRESETS["fish"].importance, Static("spread"))),
    "gsnr": Method(_preset("gsnr")),
    "bitfit": Method(_preset("bitfit"), takes_budget=False),
    "random": Method(_preset("random")),
    "magnitude-increment": Method(lambda settings: Strategy(Magnitude(), Increment())),
    "static-gradient": Method(_static_gradient),
    "d3-static": Method(_d3_static),
    "d3-repeat": Method(_d3_repeat),
    "lora": Method(adapter="lora"),  # at as many trained numbers
    "lora-8": Method(adapter="lora", rank=8, takes_budget=False),
    "id3+lora": Method(_id3, "lora", rank=8),
    "pafi+lora": Method(_preset("pafi"), "lora", rank=8),
    # mathematical reasoning: the numbers of a LoRA of rank 2
    "lora-2": Method(adapter="lora", rank=2, alpha=16, skipped=SKIPPED, takes_budget=False),
    "lora-32": Method(adapter="lora", rank=32, alpha=64, skipped=SKIPPED, takes_budget=False),
    "id3+lora-32": Method(_id3, "lora", 32, 64, SKIPPED, share=2 / 32, takes_budget=False),
    "pafi+lora-32": Method(_preset("pafi"), "lora", 32, 64, SKIPPED, share=2 / 32, takes_budget=False),
    "pfeiffer": Method(adapter="pfeiffer", takes_budget=False),
    "id3+pfeiffer": Method(_id3, "pfeiffer"),
    "full": Method(takes_budget=False, rates="full"),
}


def prepare(
    model: nn.Module, settings: Settings, head: list[str], task_type: str, steps: int, calibration: Iterable[Any]
) -> nn.Module:
    """Leaves trainable what the method trains, and the new head with it; returns the model to train.

    Args:
        head: the model's new modules.
        task_type: PEFT's.
        steps: of the optimizer.
        calibration: batches for strategies that select by gradients before training.
    """
    method = METHODS[settings.method]
    if method.adapter == "lora":
        model = _add_lora(model, method, method.rank or _rank(model, head, settings.budget), head, task_type)
    elif method.adapter == "pfeiffer":
        model = add_adapters(model, "pfeiffer", REDUCTION_FACTOR)
    if method.strategy is None:
        return model
    strategy = method.strategy(settings)
    return sparsify(
        model,
        method.share or settings.budget,
        strategy,
        steps=steps,
        schedule=Schedule(settings.shape or "uniform", until=settings.until or 1.0, every=settings.every),
        target_modules="all-linear" if settings.candidates == "linear" else None,
        modules_to_save=(head or None) if settings.head == "dense" and method.adapter != "lora" else None,
        calibration=calibration if strategy.calibrates else None,
        seed=settings.seed,
    )


def linear_layers(model: nn.Module, head: list[str]) -> dict[str, nn.Linear]:
    """The model's linear layers by name, without the head, which a pooler and a language model's output belong to."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not {*head, "pooler", "lm_head"} & set(name.split("."))
    }


def _rank(model: nn.Module, head: list[str], budget: int | None) -> int:
    """The rank of a LoRA on every linear layer that trains about as many numbers as the budget, at least 1."""
    size = sum(layer.in_features + layer.out_features for layer in linear_layers(model, head).values())
    return max(1, round((budget or 0) / size))


def _add_lora(model: nn.Module, method: Method, rank: int, head: list[str], task_type: str) -> nn.Module:
    """PEFT's LoRA on every linear layer that is not skipped, by default at the paper's scale: alpha = rank."""
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            task_type=task_type,
            r=rank,
            lora_alpha=method.alpha or rank,
            target_modules=list(linear_layers(model, [*head, *method.skipped])),
            modules_to_save=head or None,
        ),
    )
