"""A delta as patches of a checkpoint's tensors, the form in which inference engines take changed weights.

In: a delta's tensors and, where names or layouts differ from the model's at run time, the checkpoint that the engine
loaded. Out: a stream of :class:`WeightPatch`, each in the checkpoint's coordinates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.delta.check import check_checkpoint, checked_values
from sparsify.delta.checkpoint.fused_layout import Layout
from sparsify.delta.checkpoint.reader import Checkpoint
from sparsify.delta.entries import NamedTensors, StrPath, TensorDelta, TensorDeltas
from sparsify.delta.metadata import check_names
from sparsify.delta.patch_plan import check_not_drawn
from sparsify.errors import BaseMismatchError, SparsifyError


class WeightPatch(NamedTuple):
    """New values for some entries of one tensor of a checkpoint, or for all of them.

    The fields are those of vLLM's ``CheckpointWeightPatch``, in its order: ``CheckpointWeightPatch(*patch)`` is one.

    Attributes:
        name: the tensor's name in the checkpoint.
        shape: its shape there.
        dtype: its dtype there.
        values: (count,) in that dtype: the new values.
        indices: (count,) int64, flat row-major positions, strictly increasing; None where all values are given.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    indices: Tensor | None = None


def make_patches(
    tensors: TensorDeltas, whole: NamedTensors, checkpoint: StrPath | None = None
) -> Iterator[WeightPatch]:
    """Patches that turn a delta's base into the trained model; see :meth:`sparsify.SparseDelta.patches`.

    With a checkpoint, a tensor that is stored in pieces, or under two names, comes as several patches.
    """
    check_names(tensors, whole)
    check_not_drawn(tensors, "a stream of patches")
    if checkpoint is not None:
        opened = Checkpoint(checkpoint)
        _, layouts = check_checkpoint(tensors, whole, opened)
        return _checkpoint_patches(tensors, whole, opened, layouts)
    if added := [name for name, delta in tensors.items() if delta.kind == "add"]:
        remedy = "give the base's checkpoint, `patches(checkpoint)`."
        raise SparsifyError(f"tensor `{added[0]}` is stored as differences, and a patch holds values: {remedy}")
    return _runtime_patches(tensors, whole)


def entry_patches(
    name: str, delta: TensorDelta, checkpoint: Checkpoint, places: Iterable[Layout]
) -> Iterator[WeightPatch]:
    """Patches of one tensor's entries in each of the places where a checkpoint stores it."""
    first, *others = places
    _, values = checked_values(name, delta, checkpoint, first)
    for layout in (first, *others):
        for part in layout.locate(delta.indices):
            shape = checkpoint.stored[part.key].shape
            yield WeightPatch(part.key, shape, values.dtype, values[part.entries], part.indices)


def _runtime_patches(tensors: TensorDeltas, whole: NamedTensors) -> Iterator[WeightPatch]:
    for name, delta in tensors.items():
        yield WeightPatch(name, delta.shape, delta.dtype, delta.values, delta.indices)
    for name, tensor in whole.items():
        yield WeightPatch(name, tuple(tensor.shape), tensor.dtype, tensor.detach().reshape(-1))


def _checkpoint_patches(
    tensors: TensorDeltas, whole: NamedTensors, checkpoint: Checkpoint, layouts: Mapping[str, Layout]
) -> Iterator[WeightPatch]:
    for name, delta in tensors.items():
        yield from entry_patches(name, delta, checkpoint, checkpoint.copies(name, layouts[name]))
    for name, tensor in whole.items():
        if name in layouts:
            yield from _dense_patches(name, tensor, checkpoint, layouts[name])
        else:
            yield from _runtime_patches({}, {name: tensor})


def _dense_patches(name: str, tensor: Tensor, checkpoint: Checkpoint, first: Layout) -> Iterator[WeightPatch]:
    """Patches of the stored tensors that a dense tensor is made of."""
    for layout in checkpoint.copies(name, first):
        for key in layout.keys:
            windows = [window for window in layout.windows if window.key == key]
            stored = checkpoint.read(key)
            if sum(window.size.numel() for window in windows) != stored.numel():
                raise BaseMismatchError(
                    f"tensor `{name}` is stored whole in the delta and is a part of `{key}` in the checkpoint, which "
                    "one patch cannot replace: use `merge`, or load the model, `apply`, and `save_pretrained`."
                )
            values = torch.empty_like(stored)
            for window in windows:
                window.view(values).copy_(tensor[window.box])
            yield WeightPatch(key, tuple(stored.shape), stored.dtype, values.reshape(-1))
