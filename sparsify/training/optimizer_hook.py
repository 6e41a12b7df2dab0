"""The optimizer steps, as the engines of sparsified models see them: one hook before and one after all of them.

    before    an optimizer that was meant for a sparsified model, but does not hold its flat delta, is refused
    after     the engine whose flat delta the optimizer holds counts the step and writes the weights

Steps may be nested, as SAM's calls that of another optimizer; the innermost one is counted. A step that is interrupted
after it has moved the values is counted when the model is used next.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sparsify.core.interrupts import uninterrupted
from sparsify.errors import SparsifyError
from sparsify.training.flat_delta import VALUES

if TYPE_CHECKING:
    from sparsify.training.engine import Engine


class _Step:
    """A step that has begun."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        self.optimizer, self.has_closure = weakref.ref(optimizer), has_closure
        self.counted: weakref.WeakSet[Engine] = weakref.WeakSet()  # the engines that have counted it, or one within it


class _Steps(threading.local):
    """The steps of this thread that have begun and not ended, the outermost first; those that failed are among them."""

    def __init__(self) -> None:
        self.begun: list[_Step] = []

    def end(self, optimizer: torch.optim.Optimizer) -> _Step | None:
        while self.begun:
            step = self.begun.pop()
            if step.optimizer() is optimizer:
                return step
        return None


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()
_HOOKS: list[Any] = []
_STEPS = _Steps()
_OPTIMIZERS: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # known to hold a flat delta

STEPPED = "was to step after a backward pass of a sparsified model"
UNHELD = (
    "{optimizer} {when}, and neither this optimizer nor any other holds `sparse_values`, the only parameter that "
    "trains there; it holds weights that sparsify() has frozen, which get no gradient, or a flat delta that was "
    "replaced since (load_state_dict(assign=True)). Make it after sparsify(), from all parameters that require grad: "
    "{optimizer}(p for p in model.parameters() if p.requires_grad). With accelerate, sparsify() comes before "
    "prepare(); with the Trainer, an optimizer that was made before is none for optimizers=."
)


def listen(engine: Engine) -> None:
    """Tells an engine of optimizer steps from now on, for as long as it lives."""
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_before_step))
        _HOOKS.append(register_optimizer_step_post_hook(_after_step))
    _ENGINES.add(engine)


def stop_listening(engine: Engine) -> None:
    """Ends what :func:`listen` began."""
    _ENGINES.discard(engine)


def holds(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """Whether an optimizer trains a parameter."""
    return any(held is parameter for held in _parameters(optimizer))


def check_held(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Raises ``SparsifyError`` where the only optimizer does not hold the engine's flat delta."""
    if not holds(optimizer, engine.values):
        raise SparsifyError(UNHELD.format(optimizer=type(optimizer).__name__, when="is to train a sparsified model"))


def has_uncounted_step(engine: Engine) -> bool:
    """Whether a step of the engine's optimizer was interrupted, or is about to be counted.

    A step with a closure is left out: the model runs within it.
    """
    open_steps = [step for step in _STEPS.begun if not step.has_closure and engine not in step.counted]
    optimizers = [optimizer for step in open_steps if (optimizer := step.optimizer()) is not None]
    return any(holds(optimizer, engine.values) for optimizer in optimizers)


def forget_uncounted_steps(engine: Engine) -> None:
    """Drops such steps: they failed before anything had moved."""
    _STEPS.begun = [step for step in _STEPS.begun if step.has_closure or engine in step.counted]


def note_counted(engine: Engine) -> None:
    """Keeps the steps that have begun from being counted again by this engine."""
    for step in _STEPS.begun:
        step.counted.add(engine)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _ENGINES or torch.compiler.is_dynamo_compiling():
        return
    held = {id(parameter) for parameter in _parameters(optimizer)}
    engines = _whole_engines()
    for engine in engines:
        values = engine.values
        is_suspect = engine.backward.passes and id(values) not in held and _has_frozen(engine, held)
        if is_suspect and not any(holds(other, values) for other in _others()):
            raise SparsifyError(UNHELD.format(optimizer=type(optimizer).__name__, when=STEPPED))
    if any(id(engine.values) in held for engine in engines):
        _OPTIMIZERS.add(optimizer)
        has_closure = any(argument is not None for argument in (*args[1:], *kwargs.values()))
        _STEPS.begun.append(_Step(optimizer, has_closure=has_closure))


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _ENGINES:
        return
    with uninterrupted():  # until here the step has begun and not ended, so it is counted later
        step = None if torch.compiler.is_dynamo_compiling() else _STEPS.end(optimizer)
        held = {id(parameter) for parameter in _parameters(optimizer)}
        errors = []
        for engine in _whole_engines():
            values = engine.values
            if id(values) not in held or values.grad is None or _skipped(optimizer):
                continue
            try:
                if step is not None and engine in step.counted:
                    engine.refresh()
                else:
                    engine.optimizer_stepped()
            except SparsifyError as error:  # the other models that this optimizer trains have stepped all the same
                errors.append(error)
    if errors:
        raise errors[0]


def _whole_engines() -> list[Engine]:
    """The engines, but for those in the middle of a copy, or in one that failed."""
    return [engine for engine in list(_ENGINES) if VALUES in engine.root.__dict__.get("_parameters", ())]


def _has_frozen(engine: Engine, ids: set[int]) -> bool:
    """Whether a parameter with one of these ids is a masked tensor's, or a flat delta that was replaced since."""
    replaced = (known() for known in engine.known_values[:-1])
    return any(id(parameter) in ids for parameter in (*replaced, *(tensor.parameter for tensor in engine.tensors)))


def _others() -> Iterator[torch.optim.Optimizer]:
    """All optimizers that exist, the known ones first."""
    yield from list(_OPTIMIZERS)
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.optim.Optimizer):  # isinstance() would wake up lazy objects
            _OPTIMIZERS.add(thing)
            yield thing


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    groups = getattr(optimizer, "param_groups", ())  # one whose __init__ has failed has none
    return (parameter for group in groups for parameter in group["params"])


def _skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimizer was told by GradScaler to leave the parameters alone."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)
