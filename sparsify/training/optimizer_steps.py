"""Optimizer steps that have begun, and optimizers that were made in the wrong order.

    before a step   an optimizer that was meant for a sparsified model, but does not hold its flat delta, is refused
    after it        the training step counts it (``core/optimizer.py``), unless a step within it was counted already
    instead of it   the gradient is dropped, as that of a batch that a loop skips: ``zero_grad()`` and no ``step()``

Steps may be nested, as SAM's calls that of another optimizer; the innermost one is counted. A step that is interrupted
after it has moved the values is counted when the model is used next.
"""

import warnings
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sparsify.common.names import listed
from sparsify.core.optimizer import listen, listening, parameters_of
from sparsify.core.step import TrainingStep
from sparsify.errors import SparsifyError
from sparsify.training.distributed import living
from sparsify.training.entries import SparseValues
from sparsify.training.forward import Running
from sparsify.training.plan import warn_of_unheld
from sparsify.training.weights import check_trained

# the gradient at the end of a step's last backward pass, its version, whether it was not zero (), and how often the
# weights had been written then
_Gradients = weakref.WeakKeyDictionary[TrainingStep, tuple[weakref.ref[Tensor], int, Tensor, int]]


class _Step:
    def __init__(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        self.optimizer, self.has_closure = weakref.ref(optimizer), has_closure
        self.counted: weakref.WeakSet[TrainingStep] = weakref.WeakSet()  # those that have counted it, or one within it
        self.gradients: _Gradients = weakref.WeakKeyDictionary()  # that were noted before it
        self.others: list[TrainingStep] = []  # it trains other parameters of their models, as those of another adapter


_HOOKS: list[Any] = []
_STEPS = Running()  # a _Step each
_OPTIMIZERS: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # found so far
_KNOWN: weakref.WeakKeyDictionary[TrainingStep, list[weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()
_GRADIENTS: _Gradients = weakref.WeakKeyDictionary()
_TRAINED: weakref.WeakKeyDictionary[TrainingStep, int] = weakref.WeakKeyDictionary()  # parameters in the last step

SORTED = (
    "the entries were loaded from an adapter, which does not keep their order, and the optimizer's state is of another "
    "one: take a new optimizer. A Trainer's checkpoint, and trained_state(model) in a loop of your own, have the order."
)
STEPPED = "was to step after a backward pass of a sparsified model"
DROPPED = (
    "a gradient was dropped before an optimizer step (zero_grad()): what its backward pass had unmasked is masked "
    "again. To combine gradients of several passes, take them by torch.autograd.grad(loss, model.sparse_values)."
)
UNHELD = (
    "{optimizer} {when}, and no optimizer holds `sparse_values`, the only parameter that trains there; it holds frozen "
    "weights, which get no gradient, or a flat delta from before desparsify() or load_state_dict(assign=True). Make it "
    "after sparsify(): {optimizer}(p for p in model.parameters() if p.requires_grad). With accelerate, sparsify() "
    "comes before prepare(); with the Trainer, an optimizer that was made before is none for optimizers=."
)
UNCOUNTED = (
    "the flat delta was moved three times after a backward pass, and no step of torch.optim was seen: an optimizer of "
    "another kind trains it, as DeepSpeed's. Call optimizer_stepped(model) after each of its steps: without it, only "
    "the entries of the first step are trained. SparsifyCallback does it under the Trainer."
)
_MOVES = 3  # without a counted step; SAM makes one or two
FROZEN = (
    "`sparse_values` does not require grad: all parameters were frozen after sparsify(), as by get_peft_model(), "
    "prepare_model_for_kbit_training(), and trainers that are given a peft_config. Call sparsify() after these, or "
    "model.sparse_values.requires_grad_(True). To train other parts alone, give the optimizer only them."
)


def watch(step: TrainingStep) -> None:
    """Tells a training step of optimizer steps, and of those that begin, from now on."""
    listen(step)  # the hook that counts steps is first: it asks for those that have begun
    if not _HOOKS:
        _HOOKS.extend((register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step)))


def note_values(step: TrainingStep) -> None:
    """Remembers the flat delta as it is now, in case it is replaced."""
    known = _KNOWN.setdefault(step, [])
    if not known or known[-1]() is not step.entries.values:
        known.append(weakref.ref(step.entries.values))


def note_gradient(step: TrainingStep, writes: int) -> None:
    """Remembers the flat delta's gradient; that of ``torch.autograd.grad`` is the user's, and none is there."""
    if (grad := step.entries.values.grad) is not None:
        _GRADIENTS[step] = weakref.ref(grad), grad._version, grad.any(), writes


def adds_to_gradient(root: Tensor) -> bool:
    """Whether the running backward pass adds to the gradient of the flat delta under a root anchor."""
    node: Any = root.grad_fn
    with suppress(RuntimeError):  # which torch.autograd.grad() raises there, and it adds to none
        return torch._C._will_engine_execute_node(node.next_functions[0][0])
    return False


def was_dropped(step: TrainingStep, writes: int) -> bool:
    """Whether the gradient that was noted is gone or zero, and no step has begun, nor were the weights written."""
    if step not in _GRADIENTS:
        return False
    known, version, was_not_zero, written = _GRADIENTS[step]
    grad = step.entries.values.grad
    if written != writes or grad is None:
        return written == writes
    is_noted = grad._version == version and known() is grad
    return not is_noted and bool(was_not_zero) and not bool(grad.any())


def holds(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    return any(held is parameter for held in parameters_of(optimizer))


def check_held(step: TrainingStep, optimizer: torch.optim.Optimizer) -> None:
    """Raises ``SparsifyError`` where the only optimizer does not train the flat delta."""
    if not step.entries.values.requires_grad:
        raise SparsifyError(FROZEN)
    if not holds(optimizer, step.entries.values):
        raise SparsifyError(UNHELD.format(optimizer=type(optimizer).__name__, when="is to train a sparsified model"))


def was_counted(step: TrainingStep, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's present step, or one within it, has been counted."""
    own = [each for each in _STEPS.running if each.optimizer() is optimizer]
    return bool(own) and step in own[-1].counted


def has_uncounted_step(step: TrainingStep) -> bool:
    """Whether a step, without a closure in which the model runs, was interrupted or is about to be counted."""
    uncounted = (each.optimizer() for each in _STEPS.running if not (each.has_closure or step in each.counted))
    return any(optimizer is not None and holds(optimizer, step.entries.values) for optimizer in uncounted)


def warn_of_uncounted(moves: int) -> None:
    """Warns once of a flat delta that moves after backward passes, but for the closure of a step that has begun."""
    if moves == _MOVES and not _STEPS.running:
        warnings.warn(UNCOUNTED, stacklevel=5)


def forget_uncounted_steps(step: TrainingStep) -> None:
    """Drops such steps: they failed before anything had moved."""
    _STEPS.running = [each for each in _STEPS.running if each.has_closure or step in each.counted]


def note_counted(step: TrainingStep) -> None:
    """Keeps the steps that have begun from being counted again."""
    for each in _STEPS.running:
        each.counted.add(step)


def warn_of_unreached(step: TrainingStep) -> None:
    """Warns in the first step of tensors that got no gradient."""
    if step.reached is None or step.entries.step:
        return
    expected = [own for own in step.tensors if own not in step.frozen and (not step.policy.static or own.count)]
    if names := [tensor.name for tensor in expected if tensor not in step.reached]:
        found = f"{len(names)} of {len(expected)} tensors got no gradient in the first step and were not trained in it"
        reason = "they ran under no_grad(), as in reentrant checkpointing (pass use_reentrant=False)"
        text = f"If its loss needs none (layer drop, experts), all is well; else {reason}, or outside their modules."
        warnings.warn(f"{found}: {listed(names)}. {text}", stacklevel=2)


def warn_of_late(step: Any, optimizer: torch.optim.Optimizer) -> None:
    """Warns of what trains and is in no delta, whenever the optimizer trains another number of parameters."""
    trained = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
    if _TRAINED.get(step) != len(trained):
        _TRAINED[step] = len(trained)
        warn_of_unheld(step, step.root, stacklevel=5)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    steps: list[Any] = [step for step in listening() if hasattr(step, "exporter")]  # engines, no bare training steps
    if not steps or torch.compiler.is_dynamo_compiling():
        return
    held, trains = set(map(id, parameters := parameters_of(optimizer))), False
    has_closure = any(argument is not None for argument in (*args[1:], *kwargs.values()))
    begun = _Step(optimizer, has_closure=has_closure)
    for step in steps:
        values = step.entries.values
        if id(values) in held:
            trains = True
            step.weights.adopt_touched()
            if not values.requires_grad and all(each.grad is None for each in parameters):
                raise SparsifyError(FROZEN)
            if step.was_sorted and optimizer.state.get(values):
                raise SparsifyError(SORTED)
            step.was_sorted = False
            if values.grad is not None:
                check_trained(step, "optimizer.step()")
            elif any(each.grad is not None for each in parameters):
                begun.others.append(step)
            if (noted := _GRADIENTS.pop(step, None)) is not None:
                begun.gradients[step] = noted
        elif step.passes:
            replaced = (known() for known in _KNOWN.get(step, [])[:-1])
            live = {id(own.entries.values) for own in steps}
            left = (own for own in parameters if isinstance(own, SparseValues) and id(own) not in live)  # desparsify()
            frozen = (*replaced, *left, *(tensor.parameter for tensor in step.tensors))
            if any(id(each) in held for each in frozen) and not any(holds(other, values) for other in _others()):
                raise SparsifyError(UNHELD.format(optimizer=type(optimizer).__name__, when=STEPPED))
    if trains:
        _OPTIMIZERS.add(optimizer)
        _STEPS.running.append(begun)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    while _STEPS.running and not torch.compiler.is_dynamo_compiling():
        ended = _STEPS.running.pop()
        for step, noted in ended.gradients.items():
            if step not in ended.counted:  # GradScaler had a fused optimizer leave the parameters alone
                _GRADIENTS.setdefault(step, noted)
        if ended.optimizer() is optimizer:
            for step in ended.others:  # now that what it trains has moved
                warn_of_late(step, optimizer)
            return


def _others() -> Iterator[torch.optim.Optimizer]:
    """All optimizers that exist, the known ones first; finding the others takes a while, and is done once."""
    yield from list(_OPTIMIZERS)
    for each in living(torch.optim.Optimizer):
        _OPTIMIZERS.add(each)
        yield each
