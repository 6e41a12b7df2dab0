"""The reference of TRL's trainers: the sparsified model itself, with its pretrained values, in place of a second model.

A trainer that was given no reference loads one by the base's name; when training begins, the base takes its place. With
``sync_ref_model`` the reference has a flat delta of its own, which follows the model's.
"""

from __future__ import annotations

import gc
import sys
import warnings
from traceback import walk_stack
from typing import Any

import torch
from torch import nn

from sparsify.api import base_weights, get_engine
from sparsify.errors import SparsifyError

_TRAINERS = {"DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer"}  # of TRL, that load a reference
_GIVEN = "_sparsify_reference_given"  # attribute of a trainer
_NOT_SYNCED = (
    "sync_ref_model=True would mix the parameters of another model with those of the sparsified one, and they do not "
    "correspond. A reference can follow if it is the model's own base; here {obstacle}. Mend that, or leave "
    "sync_ref_model out."
)
_SECOND_MODEL = (
    "the reference is a second model that was loaded by the base's name, since {obstacle}. It is not the base if the "
    "model is quantized, or was changed between loading and sparsify()."
)


class BaseReference(nn.Module):
    """A sparsified model with other trained values: zeros, which make it the base, until they follow the model's.

    Args:
        model: the sparsified model.
    """

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
            for tensor, values in zip(engine.tensors, engine.entries.effective(self.values), strict=True):
                if values.numel():
                    tensor.write_without_version_bump(values)
            try:
                return model.eval()(*args, **kwargs)
            finally:
                model.train(training)


def note_given() -> None:
    """Notes whether the trainer that is being made, further up the stack, was given a reference."""
    trainer, calls = _find_trainer()
    if trainer is not None:
        setattr(trainer, _GIVEN, next((own["ref_model"] is not None for own in calls if "ref_model" in own), False))


def use_base(model: nn.Module, args: Any) -> BaseReference | None:
    """Makes the base the reference of the trainer, with these ``args``, that is further up the stack, if it loaded one.

    Returns:
        The reference, if it is to follow the model.

    Raises:
        SparsifyError: when another reference is to follow the model.
    """
    trainer, _ = _find_trainer()
    loaded, synced = getattr(trainer, "ref_model", None), getattr(args, "sync_ref_model", False)
    if loaded is None or isinstance(loaded, BaseReference):  # of an earlier train()
        return loaded if synced else None
    given, dense, obstacle = getattr(trainer, _GIVEN, None), get_engine(model).dense_names, ""
    if given:
        obstacle = "it was given to the trainer"
    elif given is None:
        obstacle = "SparsifyCallback was added after the trainer was made: pass it in callbacks=[...]"
    elif dense:
        obstacle = f"`{dense[0]}` of modules_to_save has no base"
    elif args.fsdp or args.deepspeed:
        obstacle = "FSDP or DeepSpeed has sharded it"
    if obstacle and synced:
        raise SparsifyError(_NOT_SYNCED.format(obstacle=obstacle))
    if obstacle:
        if not given:
            warnings.warn(_SECOND_MODEL.format(obstacle=obstacle), stacklevel=3)
        return None
    trainer.ref_model = BaseReference(model)
    for callback in trainer.callback_handler.callbacks:
        if getattr(callback, "ref_model", None) is loaded:
            callback.ref_model = None  # TRL's own, which mixes the parameters
    del loaded
    gc.collect()  # the second model: TRL has put a function on it that refers to it
    return trainer.ref_model if synced else None


def _find_trainer() -> tuple[Any, list[dict[str, Any]]]:
    """TRL's trainer that calls this, if any, and the local variables of its methods, the innermost first."""
    every = [frame.f_locals for frame, _ in walk_stack(sys._getframe(1))]
    calls = [own for own in every if _TRAINERS & {kind.__name__ for kind in type(own.get("self")).__mro__}]
    return (calls[0]["self"] if calls else None), calls
