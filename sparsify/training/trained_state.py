"""The trained state: what a sparsified model has that its base has not, and how it goes back onto one.

Out: a state dict of O(budget): the flat delta, the position and the index buffers; parameters that are trained dense,
that were pruned, or that the base does not have; buffers that training changed. In: ``load_state_dict`` of the same
model, sparsified anew on the same base, takes it without the frozen weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparsify.errors import BaseMismatchError
from sparsify.masked.index_buffers import BASE, COUNTS, INDICES, PER_ENTRY, SLOTS
from sparsify.training.engine import STATE, Engine
from sparsify.training.export import changed_buffers, is_pruned


def trained_state_of(
    engine: Engine, model: nn.Module, state_dict: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """What of a model's state dict its base does not have.

    Args:
        engine: of the sparsified model.
        model: that model, or one that holds it; what lies outside of it is kept as a whole.
        state_dict: where the values are taken from; ``None``: the model's own.
    """
    state_dict = model.state_dict() if state_dict is None else state_dict
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is engine.root)
    needed = _needed(engine) | set(changed_buffers(engine))
    first_names = {
        name for name, _ in (*model.named_parameters(), *model.named_buffers())
    }  # a tied tensor is kept once
    kept = {
        name: value.detach()
        for name, value in state_dict.items()
        if name in first_names and (not name.startswith(prefix) or name[len(prefix) :] in needed)
    }
    total = int(kept[prefix + COUNTS].sum())
    # torch.save() of a part of a buffer would write all of it
    kept.update({prefix + name: kept[prefix + name][:total].clone() for name in PER_ENTRY})
    if max(engine.capacity, *(tensor.numel for tensor in engine.tensors)) < 2**31:
        kept.update({prefix + name: kept[prefix + name].int() for name in (INDICES, SLOTS)})
    return kept


def placeholder(engine: Engine) -> dict[str, Tensor]:
    """An empty tensor in place of a weight that was left out, by its name.

    A file that has it is refused by whoever takes it for a whole model, since its shape is wrong; transformers, for
    one, would draw the weights that are missing at random.
    """
    needed = _needed(engine)
    names = [name for name, _ in engine.root.named_parameters() if name not in needed]
    return {name: torch.empty(0) for name in names[:1]}


class PartialLoad:
    """A state dict that is a trained state, on its way into a model.

    Args:
        engine: of the model.
        state_dict: of which the placeholders are taken away.
        prefix: of the model's names in it.
    """

    def __init__(self, engine: Engine, state_dict: dict[str, Tensor], prefix: str) -> None:
        self._prefix = prefix
        self._needed = _needed(engine)
        for name in _frozen_names(engine, self._needed):
            state_dict.pop(prefix + name, None)

    def without_frozen(self, missing: list[str]) -> list[str]:
        """Of the names that a state dict lacks those that a trained state should have."""
        start = len(self._prefix)
        return [name for name in missing if not name.startswith(self._prefix) or name[start:] in self._needed]


def is_trained_state(engine: Engine, state_dict: Mapping[str, Tensor], prefix: str) -> bool:
    """Whether a state dict has what is trained, and no frozen weight."""
    frozen = _frozen_names(engine, _needed(engine))
    return all(prefix + name in state_dict for name in STATE) and not any(
        prefix + name in state_dict and state_dict[prefix + name].numel() for name in frozen
    )


def check_same_base(engine: Engine, stored: Mapping[str, Tensor]) -> None:
    """Raises where a trained state belongs to another base than the model, whose weights are the base's at this moment.

    Args:
        engine: of the model.
        stored: the index buffers of the trained state, checked.
    """
    needed, counts = _needed(engine), stored[COUNTS].tolist()
    indices, base = (stored[name][: sum(counts)].split(counts) for name in (INDICES, BASE))
    parts = zip(engine.tensors, indices, base, strict=True)
    for tensor, indices, base in parts:
        if tensor.name in needed or not indices.numel():
            continue  # it comes with the trained state
        here = tensor.take(indices.to(tensor.parameter.device, torch.int64)).cpu()
        dtype = torch.promote_types(here.dtype, base.dtype)
        if not torch.equal(here.to(dtype), base.cpu().to(dtype)):
            raise BaseMismatchError(
                f"`{tensor.name}` has other pretrained values than the model that this checkpoint was trained from; "
                "build the model from the same base, in the same dtype, and sparsify it likewise. Nothing was loaded."
            )


def _needed(engine: Engine) -> set[str]:
    """Names of what a trained state has in any case, as the root calls it."""
    names = {*STATE, *engine.dense_names, *engine.fresh_names}
    pruned = {tensor.name for tensor in engine.tensors if is_pruned(engine.strategy, tensor)}
    masked = {tensor.name for tensor in engine.tensors}
    return (
        names
        | pruned
        | {name for name, parameter in engine.root.named_parameters() if parameter.requires_grad and name not in masked}
    )


def _frozen_names(engine: Engine, needed: set[str]) -> list[str]:
    return [name for name, _ in engine.root.named_parameters(remove_duplicate=False) if name not in needed]
