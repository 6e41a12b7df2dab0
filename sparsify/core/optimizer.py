"""The optimizer steps, as training steps see them: one hook after all optimizers of ``torch.optim``."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from sparsify.core.entries import VALUES
from sparsify.core.step import TrainingStep

LISTENING: weakref.WeakSet[TrainingStep] = weakref.WeakSet()  # are told of optimizer steps for as long as they live
_HOOKS: list[Any] = []


def listen(step: TrainingStep) -> None:
    """Tells a training step of optimizer steps from now on."""
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_post_hook(_after_step))
    LISTENING.add(step)


def listening() -> list[TrainingStep]:
    """The training steps that listen, but for those in the middle of a copy, or in one that failed."""
    return [step for step in list(LISTENING) if VALUES in step.entries.root.__dict__.get("_parameters", ())]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that an optimizer trains."""
    groups = getattr(optimizer, "param_groups", ())  # one whose __init__ has failed has none
    return [parameter for group in groups for parameter in group["params"]]


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not LISTENING:
        return
    held = set(map(id, parameters_of(optimizer)))
    steps = [step for step in listening() if id(step.entries.values) in held and step.entries.values.grad is not None]
    found_inf = getattr(optimizer, "found_inf", None)  # GradScaler's word to a fused one to leave the parameters alone
    if not steps or (found_inf is not None and bool(found_inf)):
        return
    for step in steps:
        step.optimizer_stepped(optimizer)
