"""The methods that are compared: a table of functions, each of which makes a model train what its method trains.

In: a model and settings. Out: a :class:`Trainee`, ready for its first step. The methods that let ID3 choose can resume
from buffers that ID3 has filled (``filling.py``), all from the same ones; that is no part of their initialisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.api import desparsify, get_unmasker, sparsify
from sparsify.bench.dense_id3 import DenseID3
from sparsify.bench.settings import PLANNED_STEPS, Settings
from sparsify.bench.shapes import SHAPES
from sparsify.errors import SparsifyError
from sparsify.strategies.schedules import Schedule

LORA_RANK = 8
EVERY = 10
FLOOR, FULL = "floor", "full"
SPARSE = ("static", "bitfit", "id3")  # methods with masked weights, and steps that are all alike
State = dict[str, Tensor]


@dataclass
class Trainee:
    """A model, and what of it is trained.

    Attributes:
        model: what runs.
        trained: numbers that are trained once all are unmasked; 0 where nothing is.
        optimizer: of what is trained.
        unmasked: tells how many entries are unmasked, where a method chooses entries; otherwise 0.
        before_step: what the method does between backward and the optimizer's step.
        resume: goes on from the state of filled buffers.
        work: tells in words what the last step looked at to choose entries; nothing where none are chosen.
    """

    model: nn.Module
    trained: int
    optimizer: torch.optim.Optimizer | None = None
    unmasked: Callable[[], int] = lambda: 0
    before_step: Callable[[], None] = lambda: None
    resume: Callable[[State], None] = lambda state: None
    work: Callable[[], str] = lambda: ""


def prepare(model: nn.Module, settings: Settings) -> Trainee:
    """Makes a plain model train what the settings' method trains, by fused AdamW."""
    return METHODS[settings.method](model, settings)


def window_of(method: str) -> int:
    """How many consecutive steps make one measurement: one, or the cycle in which the method's steps differ."""
    return EVERY if method == "id3-every-10" else 1


def is_profiled(settings: Settings) -> bool:
    """Whether there is a sparse part to time: not without masked weights, not where steps differ in a cycle, and not on
    a GPU, which does the work later than it is asked to.
    """
    return settings.method in SPARSE and not settings.is_cuda


def starts_filled(method: str) -> bool:
    """Whether ID3 chooses while the method is measured, so that it starts from filled buffers."""
    return "id3" in method


def check_installed(method: str) -> None:
    """Raises where a method needs what the installed PEFT does not have."""
    if method in PEFT_CONFIGS:
        import peft

        name, version = PEFT_CONFIGS[method]
        if not hasattr(peft, name):
            raise SparsifyError(
                f"method {method!r} needs PEFT {version} or later, and {peft.__version__} is installed: "
                "`pip install -U peft`, or leave the method out."
            )


def _optimizer_of(model: nn.Module, weight_decay: float = 0.01) -> torch.optim.Optimizer:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trainable, lr=1e-4, fused=True, weight_decay=weight_decay)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _floor(model: nn.Module, settings: Settings) -> Trainee:
    """The frozen model's forward, and backward to what its token embedding puts out: less no training can do."""
    model.requires_grad_(False)
    table: Any = model.get_input_embeddings().weight  # type: ignore[operator]
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight is table:  # T5 has it three times
            module.register_forward_hook(_let_gradients_in)
    return Trainee(model, trained=0)


def _let_gradients_in(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.requires_grad_()


def _full(model: nn.Module, settings: Settings) -> Trainee:
    return Trainee(model, _count(model), _optimizer_of(model))


def _static(model: nn.Module, settings: Settings) -> Trainee:
    """PaFi at its whole budget."""
    return _sparsified(sparsify(model, settings.budget, "pafi"))


def _bitfit(model: nn.Module, settings: Settings) -> Trainee:
    return _sparsified(sparsify(model, None, "bitfit"))


def _id3(model: nn.Module, settings: Settings) -> Trainee:
    return _growing(model, settings, Schedule())


def _id3_every(model: nn.Module, settings: Settings) -> Trainee:
    return _growing(model, settings, Schedule(every=EVERY))


def _growing(model: nn.Module, settings: Settings, schedule: Schedule) -> Trainee:
    trainee = _sparsified(sparsify(model, settings.budget, "id3", steps=PLANNED_STEPS, schedule=schedule))
    trainee.resume = lambda state: load_trained(model, settings, state)
    trainee.work = lambda: str(get_unmasker(model).work)
    return trainee


def _sparsified(model: nn.Module) -> Trainee:
    engine = get_unmasker(model)
    return Trainee(model, engine.budget, _optimizer_of(model), unmasked=lambda: engine.unmasked)


def load_trained(model: nn.Module, settings: Settings, state: State) -> None:
    """Puts a sparsified model at the settings' point of its run, with the entries that were unmasked by then."""
    model.load_state_dict(state)
    get_unmasker(model).step = settings.start


def _dense_id3(model: nn.Module, settings: Settings) -> Trainee:
    id3 = DenseID3(dict(model.named_parameters()), settings.budget, PLANNED_STEPS)

    def resume(state: State) -> None:  # through the library and out of it again: its weights, and what is unmasked
        load_trained(sparsify(model, settings.budget, "id3", steps=PLANNED_STEPS), settings, state)
        support = {tensor.name: tensor.indices.clone() for tensor in get_unmasker(model).tensors}
        desparsify(model)
        id3.resume(support, settings.start)

    return Trainee(
        model,
        settings.budget,
        _optimizer_of(model, weight_decay=0.0),
        unmasked=lambda: id3.unmasked,
        before_step=id3.mask_gradients,
        resume=resume,
    )


def _lora(model: nn.Module, settings: Settings) -> Trainee:
    return _by_peft(model, settings, r=LORA_RANK, lora_dropout=0.0)


def _shira(model: nn.Module, settings: Settings) -> Trainee:
    """At the rank that comes nearest to the budget: a layer has its rank times (in + out) entries."""
    sizes = [sum(weight.shape) for weight in _linear_weights(model)]
    return _by_peft(model, settings, r=max(1, round(settings.budget / sum(sizes))), random_seed=settings.seed)


def _supertuning(model: nn.Module, settings: Settings) -> Trainee:
    """At the sparsity that comes nearest to the budget."""
    numel = sum(weight.numel() for weight in _linear_weights(model))
    return _by_peft(model, settings, sparsity=max(0.0, 1 - settings.budget / numel))


def _linear_weights(model: nn.Module) -> list[Tensor]:
    """The weights that PEFT's "all-linear" means: of every linear layer but the head."""
    heads = [getattr(model, "classifier", None), model.get_output_embeddings()]  # type: ignore[operator]
    return [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and not any(module is head for head in heads)
    ]


def _by_peft(model: nn.Module, settings: Settings, **config: Any) -> Trainee:
    """As PEFT does it by default, the task's head included, on all linear layers."""
    import peft

    make, task = getattr(peft, PEFT_CONFIGS[settings.method][0]), SHAPES[settings.shape].task
    tuned = peft.get_peft_model(model, make(target_modules="all-linear", task_type=task, **config))
    return Trainee(tuned, _count(tuned), _optimizer_of(tuned))


PEFT_CONFIGS = {  # and the version of PEFT that they came with
    "lora": ("LoraConfig", "0.17"),
    "shira": ("ShiraConfig", "0.17"),
    "supertuning": ("SupertuningConfig", "0.21"),
}
METHODS: dict[str, Callable[[nn.Module, Settings], Trainee]] = {
    FLOOR: _floor,
    FULL: _full,
    "static": _static,
    "bitfit": _bitfit,
    "id3": _id3,
    "id3-every-10": _id3_every,
    "dense-id3": _dense_id3,
    "lora": _lora,
    "shira": _shira,
    "supertuning": _supertuning,
}
