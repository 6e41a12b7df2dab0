"""Compares a model with its base, both in memory or on disk, and takes the entries that differ, or the most changed."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from sparsify.common.names import POSITION, tied_names
from sparsify.common.raw_bits import as_bits, digest, same_values
from sparsify.delta.checkpoint.reader import Checkpoint, open_base
from sparsify.delta.entries import DTYPES, Base, DeltaParts, NamedTensors, TensorDelta, is_resized
from sparsify.delta.patch_plan import check_has_values, own_copy, take
from sparsify.errors import BaseMismatchError, SparsifyError


def diff(base: Base, tuned: Base, budget: int | float | None = None, *, progress: bool = True) -> DeltaParts:
    """Tensors, dense tensors and config of the delta between two models; see :meth:`sparsify.SparseDelta.diff`."""
    is_number = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1
    if budget is not None and not is_number and not (isinstance(budget, float) and 0 < budget < 1):
        expected = "a number of entries, at least 1, a share of all as a float in (0, 1), or None for all of them"
        raise SparsifyError(f"budget={budget!r}; expected {expected}.")
    old, new = open_base(base), open_base(tuned)
    checkpoints = [side for side in (old, new) if isinstance(side, Checkpoint)]
    if running := [side.path for side in checkpoints if any(name.endswith(POSITION) for name in side)]:
        raise SparsifyError(f"`{running[0]}` is of a sparsified model: SparseDelta.from_checkpoint(path) is its delta.")
    if files := [file for side in checkpoints for file in side.path.glob("[0-9]*_*/model.safetensors")]:
        raise SparsifyError(f"`{files[0]}`, of a module of sentence-transformers, is not compared: give loaded models.")
    ties = new.conversion.tied if isinstance(new, Checkpoint) else tied_names(new)
    names = new.plain_names() if isinstance(new, Checkpoint) else [n for n in new if ties.get(n, [n])[0] == n]
    _check_comparable(names, old, ties.values())
    if isinstance(budget, float):
        sizes = [new[name].numel() for name in names if _is_comparable(name, old, new[name])]
        budget = max(1, int(budget * sum(sizes)))
    dense: dict[str, Tensor] = {}
    found: dict[str, tuple[Tensor, Tensor]] = {}  # changed positions by tensor and, with a budget, by how much
    changed, squared = 0, 0.0
    for name in tqdm(names, desc="comparing", unit="tensor", leave=False, disable=None if progress else True):
        if not _is_comparable(name, old, new[name]):
            if name not in old or digest(old[name]) != digest(new[name]):
                dense[name] = own_copy(new[name])
            continue
        indices, change = _changes(name, old[name].detach(), new[name].detach())
        changed += indices.numel()
        squared += float(change.square().sum())
        if budget is not None:
            found = _largest({**found, name: (indices, change.abs())}, budget)
        elif indices.numel():
            found[name] = indices, change[:0]
    if not found and not dense:
        raise SparsifyError("the two models do not differ, so there is no delta between them: is one the other's copy?")
    for names in (old.conversion.tied if isinstance(old, Checkpoint) else tied_names(old)).values():
        first, *others = [name for name in names if name in old and name in new] or [""]
        if not {*names} & {*found, *dense} or not all(same_values(old[first], old[name]) for name in others):
            continue
        if other := next((name for name in others if not same_values(new[first], new[name])), None):
            one = f"`{first}` and `{other}` are one tensor in the base and two in the tuned model"
            raise BaseMismatchError(f"{one}: load the base with these weights untied, or tie the tuned model's.")
    tensors = {}
    for name, (indices, _) in found.items():
        fixed = tuple(new[name].shape), new[name].dtype, "replace", digest(take(old[name], indices))
        tensors[name] = TensorDelta(indices, take(new[name], indices), *fixed)
    held = squared if budget is None else sum(float(sizes.square().sum()) for _, sizes in found.values())
    kept = sum(part.count for part in tensors.values())
    config = {"changed": changed, "kept": kept, "squared_share": held / squared if squared else 1.0}
    return tensors, dense, {"diff": config}


def _largest(changes: dict[str, tuple[Tensor, Tensor]], budget: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The largest of some tensors' changes (positions, sizes); of equal ones, the first."""
    sizes = torch.cat([sizes for _, sizes in changes.values()])
    kept = torch.ones_like(sizes, dtype=torch.bool)
    if (spare := sizes.numel() - budget) > 0:
        least = float(np.partition(sizes.numpy(), spare)[spare])  # quicker than torch's kthvalue
        kept = sizes > least
        ties = (sizes == least).nonzero().reshape(-1)
        kept[ties[: budget - int(kept.sum())]] = True
    masked = zip(changes.items(), kept.split([own.numel() for _, own in changes.values()]), strict=True)
    return {name: (indices[mask], own[mask]) for (name, (indices, own)), mask in masked if bool(mask.any())}


def _check_comparable(names: list[str], old: NamedTensors, ties: Iterable[list[str]]) -> None:
    if wrapped := [name for name in names if ".base_layer." in name and name.replace(".base_layer.", ".") in old]:
        raise BaseMismatchError(f"`{wrapped[0]}` is a layer with PEFT's adapter: merge it, `model.merge_and_unload()`.")
    if names and not any(name in old for name in names):
        remedy = "give the model that was fine-tuned, a checkpoint's `config.json` next to its weights."
        raise BaseMismatchError(f"the base has none of the tuned model's tensors (`{names[0]}`): {remedy}")
    for first, *others in ties:
        for other in others:
            tied, in_both = {first, other}, {first, other} <= old.keys()
            if in_both and not (tied <= {*names} or same_values(old[first], old[other])):  # names: of two values stored
                one = f"`{first}` and `{other}` are one tensor in the tuned model and two in the base"
                raise BaseMismatchError(f"{one}: untie the tuned model's, or take the base that it was tuned from.")


def _is_comparable(name: str, old: NamedTensors, new: Tensor) -> bool:
    """Whether a tensor is compared entry by entry: both have it, in one shape and floating-point dtype."""
    if name not in old:
        return False
    before = old[name]
    check_has_values(name, before)
    check_has_values(name, new)
    if before.shape != new.shape:
        if new.numel() > before.numel() and is_resized(new.shape, before.shape):  # tokens were added
            return False
        shapes = f"shape {tuple(before.shape)} in the base, {tuple(new.shape)} in the tuned model"
        raise BaseMismatchError(f"tensor `{name}` has {shapes}: resize the base's, as by resize_token_embeddings().")
    if before.dtype != new.dtype:
        dtypes = f"{before.dtype} in the base, {new.dtype} in the tuned model"
        raise BaseMismatchError(f"tensor `{name}` is {dtypes}: load both in one dtype.")
    return new.dtype in DTYPES.values()


def _changes(name: str, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Where (k,) two tensors differ in any bit, and by how much (k,), in float64 on the CPU."""
    old, new = (tensor.contiguous().reshape(-1) for tensor in (old.to(new.device), new))
    indices = (as_bits(old) != as_bits(new)).nonzero().reshape(-1)
    change = (new[indices].double() - old[indices].double()).cpu()
    if bad := int((~change.isfinite()).sum()):
        raise SparsifyError(f"tensor `{name}`: {bad} changes are not finite, so one of the two models has diverged.")
    return indices.cpu(), change
