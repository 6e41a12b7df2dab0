"""Compares a model with its base entry by entry, and takes the entries that differ, or the most changed of them.

In: a base and a model tuned from it, in memory or as a checkpoint, read a tensor at a time. Out: a delta's parts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from sparsify.common.raw_bits import as_bits, digest, same_values
from sparsify.delta.checkpoint.reader import Checkpoint, open_base
from sparsify.delta.entries import DTYPES, Base, DeltaParts, NamedTensors, TensorDelta
from sparsify.delta.patch_plan import check_has_values, own_copy
from sparsify.errors import BaseMismatchError, SparsifyError


def diff(base: Base, tuned: Base, budget: int | None = None, *, progress: bool = True) -> DeltaParts:
    """Tensors, dense tensors and config of the delta between two models; see :meth:`sparsify.SparseDelta.diff`."""
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise SparsifyError(f"budget={budget!r}; expected a number of entries, at least 1, or None for all of them.")
    old, new = open_base(base), open_base(tuned)
    names = _distinct(new)
    _check_comparable(names, old, new)
    dense: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}  # changed positions by tensor
    largest = _Largest(budget) if budget is not None else None
    changed, squared = 0, 0.0
    for name in tqdm(names, desc="comparing", unit="tensor", leave=False, disable=None if progress else True):
        if not _is_comparable(name, old, new[name]):
            if name not in old or digest(old[name]) != digest(new[name]):
                dense[name] = own_copy(new[name])
            continue
        indices, change = _changes(name, old[name].detach(), new[name].detach())
        changed += indices.numel()
        squared += float(change.square().sum())
        if largest is not None:
            largest.offer(name, indices, change.abs())
        elif indices.numel():
            found[name] = indices
    if largest is not None:
        found = largest.by_tensor()
    if not found and not dense:
        raise SparsifyError("the two models do not differ, so there is no delta between them: is one the other's copy?")
    _check_ties(old, found)
    tensors = {name: _replacement(indices, old[name], new[name]) for name, indices in found.items()}
    kept = sum(part.count for part in tensors.values())
    held = sum(_squared(tensors[name], old[name]) for name in tensors)
    return (
        tensors,
        dense,
        {"diff": {"changed": changed, "kept": kept, "squared_share": held / squared if squared else 1.0}},
    )


class _Largest:
    """The entries with the largest scores of those offered; of equal ones, the first offered."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.names: list[str] = []
        self.owner = torch.empty(0, dtype=torch.int64)  # position in names
        self.indices = torch.empty(0, dtype=torch.int64)
        self.scores = torch.empty(0, dtype=torch.float64)

    def offer(self, name: str, indices: Tensor, scores: Tensor) -> None:
        self.owner = torch.cat([self.owner, torch.full_like(indices, len(self.names))])
        self.names.append(name)
        self.indices = torch.cat([self.indices, indices])
        self.scores = torch.cat([self.scores, scores])
        if self.scores.numel() > self.budget:
            spare = self.scores.numel() - self.budget
            least = float(np.partition(self.scores.numpy(), spare)[spare])  # quicker than torch's kthvalue
            kept = self.scores > least
            ties = (self.scores == least).nonzero().reshape(-1)
            kept[ties[: self.budget - int(kept.sum())]] = True
            self.owner, self.indices, self.scores = self.owner[kept], self.indices[kept], self.scores[kept]

    def by_tensor(self) -> dict[str, Tensor]:
        """The indices (any,) of every tensor that has some, in ascending order."""
        return {self.names[int(owner)]: self.indices[self.owner == owner] for owner in self.owner.unique()}


def _distinct(tensors: NamedTensors) -> list[str]:
    """The names, one for each tensor; those of a checkpoint as the model has them at run time."""
    if not isinstance(tensors, dict):
        return tensors.plain_names() if isinstance(tensors, Checkpoint) else list(tensors)
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return [name for name, tensor in tensors.items() if first[id(tensor)] == name]


def _check_comparable(names: list[str], old: NamedTensors, new: NamedTensors) -> None:
    """Raises where names do not match tensors: layers wrapped by PEFT, no common name, or ties in one model only."""
    if wrapped := [name for name in names if ".base_layer." in name and name.replace(".base_layer.", ".") in old]:
        raise BaseMismatchError(
            f"`{wrapped[0]}` is a layer that PEFT has put an adapter on, so the tuned model has its change beside the "
            "weights: merge it first (`model.merge_and_unload()`)."
        )
    if names and not any(name in old for name in names):
        raise BaseMismatchError(
            f"the base has none of the tuned model's tensors (`{names[0]}`): give the model that was fine-tuned. A "
            "checkpoint is taken for what its `config.json` says, which has to be next to the weights."
        )
    for first, *others in _ties(new):
        for other in others:
            if first in old and other in old and not same_values(old[first], old[other]):
                raise BaseMismatchError(
                    f"`{first}` and `{other}` are one tensor in the tuned model and two in the base: untie the tuned "
                    "model's (give each a copy), or take the base that it was tuned from."
                )


def _check_ties(old: NamedTensors, found: NamedTensors) -> None:
    """Raises where two changed tensors are one in the base, so that no delta could be put onto it."""
    for names in _ties(old):
        if len(changed := [name for name in names if name in found]) > 1:
            raise BaseMismatchError(
                f"`{changed[0]}` and `{changed[1]}` are one tensor in the base and two in the tuned model: load the "
                "base with these weights untied, or tie the tuned model's."
            )


def _ties(tensors: NamedTensors) -> list[list[str]]:
    """The names of each tensor that a model has under several; none for a checkpoint."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in tensors.items() if isinstance(tensors, dict) else ():
        names_of.setdefault(id(tensor), []).append(name)
    return [names for names in names_of.values() if len(names) > 1]


def _is_comparable(name: str, old: NamedTensors, new: Tensor) -> bool:
    """Whether a tensor is compared entry by entry: both have it, in one shape and floating-point dtype."""
    if name not in old:
        return False
    before = old[name]
    check_has_values(name, before)
    check_has_values(name, new)
    if before.shape != new.shape:
        raise BaseMismatchError(
            f"tensor `{name}` has shape {tuple(before.shape)} in the base, {tuple(new.shape)} in the tuned model: a "
            "delta cannot resize it. Resize the base's first (`resize_token_embeddings`, say)."
        )
    if before.dtype != new.dtype:
        raise BaseMismatchError(
            f"tensor `{name}` is {before.dtype} in the base, {new.dtype} in the tuned model: load both in one dtype."
        )
    return new.dtype in DTYPES.values()


def _changes(name: str, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Where (k,) two tensors differ in any bit, and by how much (k,), in float64 on the CPU."""
    old, new = (tensor.contiguous().reshape(-1) for tensor in (old.to(new.device), new))
    indices = (as_bits(old) != as_bits(new)).nonzero().reshape(-1)
    change = (new[indices].double() - old[indices].double()).cpu()
    if bad := int((~change.isfinite()).sum()):
        raise SparsifyError(f"tensor `{name}`: {bad} changes are not finite, so one of the two models has diverged.")
    return indices.cpu(), change


def _replacement(indices: Tensor, old: Tensor, new: Tensor) -> TensorDelta:
    base, values = (t.detach().take(indices.to(t.device)).cpu() for t in (old, new))
    return TensorDelta(indices, values, tuple(new.shape), new.dtype, "replace", digest(base))


def _squared(part: TensorDelta, old: Tensor) -> float:
    base = old.detach().take(part.indices.to(old.device)).cpu()
    return float((part.values.double() - base.double()).square().sum())
