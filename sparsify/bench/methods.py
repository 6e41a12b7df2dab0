"""The methods that are compared: a table of functions, each of which makes a model train what its method trains.

Methods in which ID3 selects resume from filled buffers, all from the same ones (``worker.make_state``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.api import desparsify, get_unmasker, sparsify
from sparsify.bench.settings import PLANNED_STEPS, Settings
from sparsify.bench.shapes import SHAPES
from sparsify.errors import SparsifyError
from sparsify.strategies.importance import D3
from sparsify.strategies.schedules import Schedule

LORA_RANK = 8
EVERY = 10
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
    resume: Callable[[State], None] = lambda state: None  # from the state of filled buffers


def window_of(method: str) -> int:
    """How many consecutive steps make one measurement: one, or the cycle in which the method's steps differ."""
    return EVERY if method == "id3-every-10" else 1


def is_profiled(settings: Settings) -> bool:
    """Whether there is a sparse part to time: in masked steps that are all alike, and not on an asynchronous GPU."""
    return settings.method in ("static", "bitfit", "id3") and not settings.is_cuda


def starts_filled(method: str) -> bool:
    """Whether ID3 selects while the method is measured, so that it starts from filled buffers."""
    return "id3" in method


def check_installed(method: str) -> None:
    """Raises where the installed PEFT lacks a method."""
    if method in PEFT_CONFIGS:
        import peft

        name, version = PEFT_CONFIGS[method]
        if not hasattr(peft, name):
            raise SparsifyError(
                f"method {method!r} needs PEFT {version} or later, and {peft.__version__} is installed: "
                "`pip install -U peft`, or leave the method out."
            )


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


def _sparsified(model: nn.Module, **more: Any) -> Trainee:
    engine = get_unmasker(model)
    return _trainee(model, unmasked=lambda: engine.unmasked, **more)


def _id3(model: nn.Module, settings: Settings, every: int = 1) -> Trainee:
    sparsify(model, settings.budget, "id3", steps=PLANNED_STEPS, schedule=Schedule(every=every))
    return _sparsified(model, resume=lambda state: _load_filled(model, settings, state))


def _load_filled(model: nn.Module, settings: Settings, state: State) -> None:
    model.load_state_dict(state)
    get_unmasker(model).step = settings.start


class DenseID3:
    """ID3 as it is usually implemented: bool masks, dense gradients, one ``torch.topk`` over all scores.

    Between backward and the optimizer's step :meth:`mask_gradients` unmasks the best masked entries, as many as the
    schedule says, and zeroes the gradient of the others. Weight decay would move them, so the optimizer has none.

    Example:
        >>> weight = nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))
        >>> id3 = DenseID3({"weight": weight}, budget=2, steps=2)
        >>> weight.grad = torch.tensor([1.0, 8.0, 3.0])
        >>> id3.mask_gradients()
        >>> weight.grad
        tensor([0., 8., 0.])
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], budget: int, steps: int) -> None:
        self.parameters = dict(parameters)
        self.masks = {name: torch.zeros_like(parameter, dtype=torch.bool) for name, parameter in parameters.items()}
        self.budget, self.steps = budget, steps
        self.step = self.unmasked = 0

    def resume(self, support: Mapping[str, Tensor], step: int) -> None:
        """Continues after ``step`` optimizer steps, with the flat indices (n,) of each tensor unmasked."""
        for name, indices in support.items():
            self.masks[name].view(-1)[indices.to(self.masks[name].device)] = True
        self.unmasked, self.step = sum(int(mask.count_nonzero()) for mask in self.masks.values()), step

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
        _load_filled(sparsify(model, settings.budget, "id3", steps=PLANNED_STEPS), settings, state)
        support = {tensor.name: tensor.indices.clone() for tensor in get_unmasker(model).tensors}
        desparsify(model)
        id3.resume(support, settings.start)

    more = {"unmasked": lambda: id3.unmasked, "before_step": id3.mask_gradients, "resume": resume}
    return _trainee(model, weight_decay=0.0, trained=settings.budget, **more)


def _shira(model: nn.Module, settings: Settings) -> Trainee:
    """At the rank that comes nearest to the budget: a layer has rank x (in + out) entries."""
    sizes = [sum(weight.shape) for weight in _linear_weights(model)]
    return _by_peft(model, settings, r=max(1, round(settings.budget / sum(sizes))), random_seed=settings.seed)


def _supertuning(model: nn.Module, settings: Settings) -> Trainee:
    """At the sparsity that comes nearest to the budget."""
    numel = sum(weight.numel() for weight in _linear_weights(model))
    return _by_peft(model, settings, sparsity=max(0.0, 1 - settings.budget / numel))


def _linear_weights(model: nn.Module) -> list[Tensor]:
    """The weights that PEFT's "all-linear" stands for: of every linear layer but the head."""
    heads = [getattr(model, "classifier", None), model.get_output_embeddings()]  # type: ignore[operator]
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return [layer.weight for layer in layers if not any(layer is head for head in heads)]


def _by_peft(model: nn.Module, settings: Settings, **config: Any) -> Trainee:
    """PEFT's defaults on all linear layers, the task's head included."""
    import peft

    make, task = getattr(peft, PEFT_CONFIGS[settings.method][0]), SHAPES[settings.shape].task
    return _trainee(peft.get_peft_model(model, make(target_modules="all-linear", task_type=task, **config)))


PEFT_CONFIGS = {  # and the version of PEFT that has it first
    "lora": ("LoraConfig", "0.17"),
    "shira": ("ShiraConfig", "0.17"),
    "supertuning": ("SupertuningConfig", "0.21"),
}
METHODS: dict[str, Callable[[nn.Module, Settings], Trainee]] = {
    FLOOR: _floor,
    FULL: lambda model, settings: _trainee(model),
    "static": lambda model, settings: _sparsified(sparsify(model, settings.budget, "pafi")),
    "bitfit": lambda model, settings: _sparsified(sparsify(model, None, "bitfit")),
    "id3": _id3,
    "id3-every-10": lambda model, settings: _id3(model, settings, every=EVERY),
    "dense-id3": _dense_id3,
    "lora": lambda model, settings: _by_peft(model, settings, r=LORA_RANK, lora_dropout=0.0),
    "shira": _shira,
    "supertuning": _supertuning,
}
