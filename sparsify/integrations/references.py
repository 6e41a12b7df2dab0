"""The reference of TRL's trainers: the sparsified model itself, with its pretrained values, in place of a second model.

A trainer that was given no reference loads one by the base's name; when training begins, the base takes its place. With
``sync_ref_model`` the reference has a flat delta of its own, which follows the model's.
"""

import gc
import warnings
from typing import Any

import torch
from torch import nn

from sparsify.api import base_weights, get_engine
from sparsify.errors import SparsifyError

_TRAINERS = {"DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer"}  # of TRL, that load a reference
GIVEN = "_sparsify_reference_given"  # attribute of a trainer: whether its caller gave it a reference
_SECOND_MODEL = "the reference is a second model, since {obstacle}. "
_NOT_SYNCED = "sync_ref_model=True would mix parameters that do not correspond: mend that, or leave it out."
_NOT_THE_BASE = "It is not the base if the model is quantized, or was changed between loading and sparsify()."


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
            for tensor, values in zip(engine.tensors, engine.entries.effective(self.values), strict=True):
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
    given, dense = getattr(trainer, GIVEN, None), get_engine(model).dense_names
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
