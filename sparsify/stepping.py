"""Who is told that an optimizer has stepped: one hook on all of ``torch.optim``, and the engines that listen to it."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class Listener(Protocol):
    """What listens."""

    @property
    def values(self) -> Tensor:
        """The parameter that an optimizer has to hold to be of interest."""

    def optimizer_stepped(self) -> None:
        """An optimizer has moved the parameter."""


_LISTENERS: weakref.WeakSet[Listener] = weakref.WeakSet()
_HOOK: list[Any] = []


def listen(listener: Listener) -> None:
    """From now on the listener is told of steps, for as long as it lives."""
    if not _HOOK:
        _HOOK.append(register_optimizer_step_post_hook(_after_step))
    _LISTENERS.add(listener)


def stop_listening(listener: Listener) -> None:
    """The listener is told of no step any more."""
    _LISTENERS.discard(listener)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _LISTENERS:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for listener in list(_LISTENERS):
        values = listener.values
        if id(values) in held and values.grad is not None and not _skipped(optimizer):
            listener.optimizer_stepped()


def _skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimizer was told by GradScaler to leave the parameters alone."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)
