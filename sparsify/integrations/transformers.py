"""Callback for the Hugging Face Trainer and the trainers derived from it; checkpoints.py describes its checkpoints."""

import gc
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback, trainer
from transformers.trainer_callback import CallbackHandler

from sparsify.api import base_weights, extend, get_engine, summary
from sparsify.delta.hub import public_config
from sparsify.delta.peft_files import LAYER
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import SparsifyError
from sparsify.integrations import checkpoints
from sparsify.strategies.strategy import Increment
from sparsify.stream.publisher import DeltaPublisher, DeltaUpdate
from sparsify.training.engine import Engine
from sparsify.training.optimizer_steps import check_held
from sparsify.training.plan import warn_of_unheld
from sparsify.training.quantized import SAVE, mark_trainable

_TRAINERS = {"DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer"}  # of TRL, that load a reference
_GIVEN = "_sparsify_reference_given"  # attribute of a trainer: whether its caller gave it a reference
_SECOND_MODEL = "the reference is a second model, since {obstacle}. "
_NOT_SYNCED = "sync_ref_model=True would mix parameters that do not correspond: mend that, or leave it out."
_NOT_THE_BASE = "It is not the base if the model is quantized, or was changed between loading and sparsify()."


class SparsifyCallback(TrainerCallback):
    """Trains a sparsified model with the Hugging Face Trainer; no subclass of the Trainer is needed.

    - It finds ``steps`` where ``sparsify`` was not given them. A later Trainer's steps replace found ones.
    - It adds ``unmasked``, ``budget_share``, ``tensor_sparsity`` and ``selection_entropy`` to the logs of the training
      loss, for every reporter of ``report_to``, and to ``trainer.state.log_history``.
    - Checkpoints hold the trained state in place of the model. ``resume_from_checkpoint`` continues bit for bit from a
      model that was built and sparsified in the same way, by the steps that the interrupted run had planned.
      ``trainer.save_model()``, elsewhere, writes an ordinary model, if that has ``save_pretrained``; of a quantized
      one, the packed base and a delta.
      The trainers of sentence-transformers resume only where the callback was in their ``callbacks``, not where it was
      added later.
    - A checkpoint folder that a killed run left incomplete is set aside when the Trainer is made, so that
      ``resume_from_checkpoint=True`` takes the one before it; call ``get_last_checkpoint`` only after that. Make no
      Trainer with this callback on the ``output_dir`` of a running one, not even to evaluate.
    - The reference of TRL's DPO, KTO, GRPO and RLOO trainers is the model's own base, unless they are given a
      ``ref_model``; with ``sync_ref_model`` it follows.
    - With ``push_to_hub`` every upload has the delta too (transformers 5; version 4 has no event for uploads).

    Args:
        extend: a run that is resumed with more steps than it was begun with unmasks by these from there on, as after
            ``sparsify.extend(model, steps=...)``; otherwise it keeps its steps, with a warning.
        publish: called on the first rank with a snapshot when training begins, with an update after each step, and with
            one more at the end of a run with ``load_best_model_at_end``.

    Attributes:
        publisher: of the present or the last run, if it is published.

    Example:
        >>> from transformers import Trainer
        >>> def train(model, args, data):
        ...     trainer = Trainer(model, args, train_dataset=data, callbacks=[SparsifyCallback()])
        ...     trainer.train(resume_from_checkpoint=True)
    """

    def __init__(self, *, extend: bool = False, publish: Callable[[DeltaUpdate], object] | None = None) -> None:
        self._extend, self._publish = extend, publish
        self.publisher: DeltaPublisher | None = None
        self._following: BaseReference | None = None  # a reference that moves with the model

    def on_init_end(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        calls = trainer_calls()
        with args.main_process_first(local=False, desc="looking for incomplete checkpoints"):
            if args.should_save:
                checkpoints.set_aside_incomplete(Path(args.output_dir))
        for call in calls[:1]:
            setattr(call["self"], _GIVEN, any(own.get("ref_model") is not None for own in calls))
            _load_trained_states(call["self"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        """Checks the run, finds its number of steps and makes its checkpoints small."""
        model, trainer = event["model"], next((own["self"] for own in trainer_calls()), None)
        if trainer is not None:
            # before the reporters; the handler iterates by position: callbacks before it move up, none is called twice
            trainer.callback_handler.callbacks.remove(self)
            trainer.callback_handler.callbacks.insert(0, self)
            _load_trained_states(trainer)  # for the best one, where the callback was added later
        engine = get_engine(model)
        _check_resumed(args, state, engine.step)
        if not (args.fsdp or args.deepspeed):  # their optimizers hold other parameters
            check_held(engine, getattr(event["optimizer"], "optimizer", event["optimizer"]))
        if self._extend and state.global_step and (engine.steps or state.max_steps) < state.max_steps:
            extend(model, steps=state.max_steps, optimizer=event["optimizer"])
        if not state.global_step:
            _warn_of_earlier_run(engine, state.max_steps)
        earlier = max(0, engine.step - state.global_step)  # steps of earlier runs
        planned = state.max_steps + (earlier if engine.unmasked < engine.budget else 0)
        if engine.steps is None or (engine.steps == engine.found_steps and not state.global_step):
            engine.policy.steps = engine.found_steps = planned
            engine.extended_at = engine.unmasked
        elif engine.steps not in (state.max_steps, earlier + state.max_steps):
            text = f"sparsify(), or the run that is resumed, has steps={engine.steps:,}, and the Trainer makes "
            text += f"{state.max_steps:,}: entries are unmasked by the former. Leave steps out to use the Trainer's;"
            warnings.warn(f"{text} to resume with more steps, pass SparsifyCallback(extend=True).", stacklevel=2)
        warn_of_unheld(engine, model)
        self._following = use_base(trainer, args, model)
        if hasattr(model, SAVE):
            vars(model)[SAVE] = partial(checkpoints.save_checkpoint, model, args, state)
        if self._publish is not None:
            self.publisher = DeltaPublisher(model)
            if state.is_world_process_zero:
                self._publish(self.publisher.snapshot())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        # a finished run, resumed in the middle of an epoch, makes one more step, which must change nothing; GradScaler
        # needs a gradient, though
        if state.global_step >= state.max_steps and not args.fp16:
            event["model"].zero_grad()

    def on_step_end(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        if args.deepspeed and (engine := get_engine(event["model"])).passes:  # its optimizer is none of torch.optim
            engine.count_step()
        if self._following is not None and state.global_step % args.ref_model_sync_steps == 0:
            self._following.values.lerp_(event["model"].sparse_values.detach(), args.ref_model_mixup_alpha)
        if self._publish is not None and self.publisher is not None:
            update = self.publisher.update()  # on all ranks, which gather what is sharded
            if state.is_world_process_zero:
                self._publish(update)

    def on_log(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        logs = event["logs"]
        if "loss" not in logs:  # of an evaluation, or the final one
            return
        now = summary(event["model"])
        numbers = {"unmasked": now.unmasked, "budget_share": now.unmasked / now.budget}
        numbers |= {"tensor_sparsity": now.tensor_sparsity, "selection_entropy": now.selection_entropy}
        logs.update(numbers)  # for the callbacks after this one
        state.log_history[-1].update(numbers)

    def on_save(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        # a model without save_pretrained has been written with its frozen weights
        if args.should_save and (folder / checkpoints.WEIGHTS).is_file() and not checkpoints.has_trained_state(folder):
            checkpoints.write_trained_state(event["model"], folder, args)

    def on_push_begin(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        # a sharded model's delta would have to be gathered, and this is an event of the first rank's alone
        if state.is_world_process_zero and not get_engine(event["model"]).sharded:
            delta = SparseDelta.from_model(event["model"])
            delta.config = public_config(delta.config)
            delta.save(args.output_dir)

    def on_train_end(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        model, self._following = event["model"], None
        mark_trainable(model)  # and save_pretrained() is what it was
        if not args.load_best_model_at_end:
            return
        best = state.best_model_checkpoint
        if best is not None and checkpoints.has_trained_state(Path(best)):
            # for a PEFT model the Trainer has loaded only the adapter, which has no unmasked entries
            model.load_state_dict(load_file(Path(best, checkpoints.WEIGHTS)), strict=False)
        self.on_step_end(args, state, control, **event)


class AddSparsifyCallback(TrainerCallback):
    """Adds a :class:`SparsifyCallback` to a trainer whose model has a sparse adapter of PEFT, unless it has one."""

    def on_init_end(self, args: Any, state: Any, control: Any, **event: Any) -> None:
        modules = event["model"].modules() if event.get("model") is not None else ()
        if any(getattr(module._modules.get(LAYER), "live", None) is not None for module in modules):
            callbacks = trainer_calls()[0]["self"].callback_handler.callbacks
            if not any(isinstance(callback, SparsifyCallback) for callback in callbacks):
                callbacks.append(SparsifyCallback())  # which this event reaches next


def add_to_trainers() -> None:
    """Has every Trainer that is made from now on look for a sparse adapter."""
    callbacks: list[Any] = trainer.DEFAULT_CALLBACKS
    if AddSparsifyCallback not in callbacks:
        callbacks.append(AddSparsifyCallback)


def _load_trained_states(trainer: Any) -> None:
    """Lets a Trainer, if it is one of sentence-transformers', load checkpoints that hold no whole model."""
    if any(kind.__module__.startswith("sentence_transformers.") for kind in type(trainer).__mro__):
        trainer._load_from_checkpoint = partial(checkpoints.load_checkpoint, trainer)


def trainer_calls() -> list[dict[str, Any]]:
    """The local variables of the Trainer's methods that have led to this call, the innermost first."""
    # not of all: before Python 3.13 a frame holds on to what has been read of it until it ends
    every = [f.f_locals for f, _ in walk_stack(sys._getframe(1)) if f.f_code.co_varnames[:1] == ("self",)]
    own = [getattr(each.get("self"), "__dict__", {}).get("callback_handler") for each in every]
    return [each for each, handler in zip(every, own, strict=True) if isinstance(handler, CallbackHandler)]


def _warn_of_earlier_run(engine: Engine, steps: int) -> None:
    full = engine.unmasked >= engine.budget
    if isinstance(engine.strategy.selection, Increment) and full and 0 < engine.step < steps:
        text = f"all {engine.unmasked:,} entries were unmasked by an earlier run of {engine.step:,} steps; "
        text += f"the Trainer's {steps:,} steps select no others."
        warnings.warn(f"{text} To select over all steps, start from a model that is sparsified anew.", stacklevel=3)


def _check_resumed(args: Any, state: Any, steps_done: int) -> None:
    if not state.global_step:
        return
    folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    if folder.is_dir() and (problem := checkpoints.problem_with(folder)):
        raise SparsifyError(f"`{folder}` {problem}, so training cannot go on from it; resume from the one before it.")
    if not steps_done and not args.fp16:  # under fp16 the first steps may all have been skipped
        raise SparsifyError(
            f"the run was resumed at step {state.global_step:,}, but its checkpoint has no unmasked entries: it was "
            "written without SparsifyCallback. Resume from one that was written with it, or start from its weights."
        )


class BaseReference(nn.Module):
    """A sparsified model with other trained values: zeros, which make it the base, until they follow the model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = (model,)  # no submodule, whose parameters would count twice
        self.values = torch.zeros_like(get_engine(model).values.detach())  # (capacity,)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output in eval mode."""
        (model,) = self._model
        engine, training = get_engine(model), model.training
        with base_weights(model):
            averaged = engine.entries.effective(self.values).split(engine.entries.counts)
            for tensor, values in zip(engine.tensors, averaged, strict=True):
                if values.numel():
                    tensor.write_without_version_bump(values)
            output = model.eval()(*args, **kwargs)
        model.train(training)
        return output


def use_base(trainer: Any, args: Any, model: nn.Module) -> BaseReference | None:
    """Makes the base the reference of TRL's trainer, if it has loaded one; returns one that is to follow the model."""
    loaded, synced = getattr(trainer, "ref_model", None), getattr(args, "sync_ref_model", False)
    if isinstance(loaded, BaseReference):  # of an earlier train()
        return loaded if synced else None
    if loaded is None or not _TRAINERS & {kind.__name__ for kind in type(trainer).__mro__}:
        return None
    given, dense = getattr(trainer, _GIVEN, None), get_engine(model).dense_names
    obstacles = {
        "it was given to the trainer": given,
        "SparsifyCallback was added after the trainer was made: pass it in callbacks=[...]": given is None,
        f"`{next(iter(dense), None)}` of modules_to_save has no base": dense,
        "FSDP or DeepSpeed has sharded it": args.fsdp or args.deepspeed,
    }
    if obstacle := next((text for text, holds in obstacles.items() if holds), None):
        if synced:
            raise SparsifyError(_SECOND_MODEL.format(obstacle=obstacle) + _NOT_SYNCED)
        if not given:
            warnings.warn(_SECOND_MODEL.format(obstacle=obstacle) + _NOT_THE_BASE, stacklevel=3)
        return None
    trainer.ref_model = BaseReference(model)
    for callback in trainer.callback_handler.callbacks:
        if getattr(callback, "ref_model", None) is loaded:
            callback.ref_model = None  # TRL's own, which mixes the parameters
    del loaded
    gc.collect()  # the second model: TRL has put a function on it that refers to it
    return trainer.ref_model if synced else None
