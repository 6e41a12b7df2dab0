"""The methods that are compared: a table of functions, each of which makes a model train what its method trains.

Methods in which ID3 selects resume from filled buffers, all from the same ones (``worker.make_state``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsify import D3, Schedule, desparsify, get_engine, sparsify

from .models import SHAPES
from .settings import PLANNED_STEPS, Settings

LORA_RANK = 8
FLOOR, FULL = "floor", "full"
State = dict[str, Tensor]


@dataclass
class Trainee:
    """A model, and what of it is trained."""

    model: nn.Module
    trained: int  # numbers, once all are unmasked
    optimizer: torch.optim.Optimizer | None = None
    unmasked: Callable[[], int] = lambda: 0  # entries, where the method selects entries
    before_step: Callable[[], None] = lambda: None  # between backward and the optimizer's step
    resume: Callable[[State], object] = lambda state: None  # from the state of filled buffers


@dataclass(frozen=True)
class Method:
    """A row of the table of methods."""

    prepare: Callable[[nn.Module, Settings], Trainee]
    starts_filled: bool = False  # whether ID3 selects while it is measured
    has_sparse_part: bool = False  # to be timed: masked steps, all alike
    uses_peft: bool = False


def _trainee(model: nn.Module, weight_decay: float = 0.01, **more: Any) -> Trainee:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True, weight_decay=weight_decay)
    more = {"trained": sum(parameter.numel() for parameter in parameters), **more}
    return Trainee(model, optimizer=optimizer, **more)


def _floor(model: nn.Module, settings: Settings) -> Trainee:
    """Forward of the frozen model, and backward to the token embedding's output: a lower bound of any training step."""
    model.requires_grad_(False)
    table: Any = model.get_input_embeddings().weight  # type: ignore[operator]
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight is table:  # T5 has it three times
            module.register_forward_hook(lambda module, args, output: output.requires_grad_())
    return Trainee(model, trained=0)


def _sparsified(model: nn.Module, *arguments: Any, **options: Any) -> Trainee:
    engine = get_engine(sparsify(model, *arguments, **options))
    return _trainee(model, unmasked=lambda: engine.unmasked, resume=model.load_state_dict)


class DenseID3:
    """ID3 as it is usually implemented: bool masks, dense gradients, one ``torch.topk`` over all scores.

    Between backward and the optimizer's step :meth:`mask_gradients` unmasks the best masked entries, as many as the
    schedule says, and zeroes the gradient of the others. Weight decay would move them, so the optimizer has none.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], budget: int, steps: int) -> None:
        self.parameters = dict(parameters)
        self.masks = {name: torch.zeros_like(parameter, dtype=torch.bool) for name, parameter in parameters.items()}
        self.budget, self.steps = budget, steps
        self.step = self.unmasked = 0

    @torch.no_grad()
    def mask_gradients(self) -> None:
        used = [(p, p.grad, self.masks[name]) for name, p in self.parameters.items() if p.grad is not None]
        wanted = Schedule().quota(self.step, self.steps, self.budget, self.unmasked)
        if wanted:
            scores = [D3().score(p, grad).masked_fill_(mask, -torch.inf).flatten() for p, grad, mask in used]
            best = torch.topk(torch.cat(scores), wanted, sorted=False).indices
            for _, _, mask in used:
                mask.view(-1)[best[(best >= 0) & (best < mask.numel())]] = True
                best = best - mask.numel()
        for _, grad, mask in used:
            grad *= mask
        self.step, self.unmasked = self.step + 1, self.unmasked + wanted


def _dense_id3(model: nn.Module, settings: Settings) -> Trainee:
    id3 = DenseID3(dict(model.named_parameters()), settings.budget, PLANNED_STEPS)

    def resume(state: State) -> None:  # by way of the library: the trained weights, and the unmasked entries
        sparsify(model, settings.budget, "id3", steps=PLANNED_STEPS).load_state_dict(state)
        for tensor in get_engine(model).tensors:
            id3.masks[tensor.name].view(-1)[tensor.indices] = True
        id3.unmasked, id3.step = get_engine(model).unmasked, settings.start
        desparsify(model)

    more = {"unmasked": lambda: id3.unmasked, "before_step": id3.mask_gradients, "resume": resume}
    return _trainee(model, weight_decay=0.0, trained=settings.budget, **more)


def _lora(model: nn.Module, settings: Settings, autocast: bool = True) -> Trainee:
    return _by_peft("LoraConfig", model, settings, r=LORA_RANK, lora_dropout=0.0, autocast=autocast)


def _shira(model: nn.Module, settings: Settings) -> Trainee:
    """At the rank that comes nearest to the budget: a layer has rank x (in + out) entries."""
    sizes = [sum(weight.shape) for weight in _linear_weights(model)]
    return _by_peft("ShiraConfig", model, settings, r=max(1, round(settings.budget / sum(sizes))), random_seed=0)


def _linear_weights(model: nn.Module) -> list[Tensor]:
    """The weights that PEFT's "all-linear" stands for: of every linear layer but the head."""
    heads = [getattr(model, "classifier", None), model.get_output_embeddings()]  # type: ignore[operator]
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return [layer.weight for layer in layers if not any(layer is head for head in heads)]


def _by_peft(name: str, model: nn.Module, settings: Settings, *, autocast: bool = True, **config: Any) -> Trainee:
    """PEFT's defaults on all linear layers, the task's head included; adapters in float32 with ``autocast``."""
    import peft

    config = {"target_modules": "all-linear", "task_type": SHAPES[settings.shape].task, **config}
    return _trainee(peft.get_peft_model(model, getattr(peft, name)(**config), autocast_adapter_dtype=autocast))


METHODS = {
    FLOOR: Method(_floor),
    FULL: Method(lambda model, settings: _trainee(model)),
    "static": Method(lambda model, settings: _sparsified(model, settings.budget, "pafi"), has_sparse_part=True),
    "random": Method(
        lambda model, settings: _sparsified(model, settings.budget, "random", target_modules="all-linear"),
        has_sparse_part=True,
    ),
    "id3": Method(
        lambda model, settings: _sparsified(model, settings.budget, "id3", steps=PLANNED_STEPS),
        starts_filled=True,
        has_sparse_part=True,
    ),
    "dense-id3": Method(_dense_id3, starts_filled=True),
    "lora": Method(_lora, uses_peft=True),
    "lora-short": Method(lambda model, settings: _lora(model, settings, autocast=False), uses_peft=True),
    "shira": Method(_shira, uses_peft=True),
}
