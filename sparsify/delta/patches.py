"""A delta as patches of a checkpoint's tensors, the form in which inference engines take changed weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.common.names import check_names
from sparsify.delta.check import check_checkpoint, checked_values
from sparsify.delta.checkpoint.fused_layout import Layout
from sparsify.delta.checkpoint.reader import Checkpoint
from sparsify.delta.entries import NamedTensors, StrPath, TensorDelta, TensorDeltas
from sparsify.delta.patch_plan import check_not_drawn
from sparsify.errors import SparsifyError


class WeightPatch(NamedTuple):
    """New values for some entries of one tensor of a checkpoint, or for all of them.

    The fields are those of vLLM's ``CheckpointWeightPatch``, in its order: ``CheckpointWeightPatch(*patch)`` is one.
    """

    name: str  # in the checkpoint, as are shape and dtype
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor  # (count,) the new values
    indices: Tensor | None = None  # (count,) int64, flat row-major, strictly increasing; None where values are for all


def make_patches(
    tensors: TensorDeltas, whole: NamedTensors, checkpoint: StrPath | None = None
) -> Iterator[WeightPatch]:
    """Patches that turn a delta's base into the trained model; see :meth:`sparsify.SparseDelta.patches`."""
    check_names(tensors, whole)
    check_not_drawn(tensors, "a stream of patches")
    opened, places = None, {}
    if checkpoint is not None:
        opened = Checkpoint(checkpoint)
        _, layouts = check_checkpoint(tensors, whole, opened)
        places = {name: opened.copies(name, layout) for name, layout in layouts.items()}
    elif added := [name for name, delta in tensors.items() if delta.kind == "add"]:
        remedy = "give the base's checkpoint, `patches(checkpoint)`."
        raise SparsifyError(f"tensor `{added[0]}` is stored as differences, and a patch holds values: {remedy}")
    parts: dict[str, TensorDelta | Tensor] = {**tensors, **whole}
    return chain.from_iterable(patches_of(name, part, opened, places.get(name, [])) for name, part in parts.items())


def patches_of(
    name: str, part: TensorDelta | Tensor, checkpoint: Checkpoint | None, places: Sequence[Layout]
) -> Iterator[WeightPatch]:
    """Patches of one tensor's entries, or of a dense tensor, in each of the places where a checkpoint stores it.

    Where there is none, the patch is of the tensor as the model has it at run time.
    """
    if checkpoint is None or not places:
        values, indices = (part.detach().flatten(), None) if isinstance(part, Tensor) else (part.values, part.indices)
        yield WeightPatch(name, tuple(part.shape), part.dtype, values, indices)
        return
    if isinstance(part, TensorDelta):
        _, values = checked_values(name, part, checkpoint, places[0])
        for found in (found for layout in places for found in layout.locate(part.indices)):
            shape = checkpoint.stored[found.key].shape
            yield WeightPatch(found.key, shape, values.dtype, values[found.entries], found.indices)
        return
    dtype = checkpoint.dtype(places[0])
    for window in (window for layout in places for window in layout.windows):
        stored = torch.empty(checkpoint.stored[window.key].shape, dtype=dtype)
        window.view(stored).copy_(part.detach()[window.box])
        indices = None
        if window.place.numel() < stored.numel():
            indices = window.view(torch.arange(stored.numel())).flatten().sort().values
        values = stored.flatten() if indices is None else stored.take(indices)
        yield WeightPatch(window.key, tuple(stored.shape), dtype, values, indices)
