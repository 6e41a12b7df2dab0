"""Finds a delta's entries in its base, checks the values there, and makes patches of a checkpoint's tensors of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparsify.common.names import check_names
from sparsify.common.raw_bits import digest
from sparsify.delta.checkpoint.fused_layout import Layout
from sparsify.delta.checkpoint.reader import Checkpoint
from sparsify.delta.entries import Base, NamedTensors, StrPath, TensorDelta, TensorDeltas, is_resized
from sparsify.delta.patch_plan import check_fits, check_not_drawn, counted, is_verified, new_values, plan_delta
from sparsify.errors import BaseMismatchError, SparsifyError

_IN_FILES = "the checkpoint"


@dataclass(frozen=True)
class CheckReport:
    """The result of a check that found nothing wrong."""

    tensors: int  # number of tensors changed at entries
    entries: int  # number of changed entries
    whole: int = 0  # number of tensors stored whole
    unchecked: tuple[str, ...] = ()  # names of tensors whose values could not be checked: another dtype, not quantized
    missing: tuple[str, ...] = ()  # names of tensors stored whole that a checkpoint lacks; a merge adds them

    @property
    def verified(self) -> bool:
        """Whether the base's values were compared with those of the training, at all entries, and there are some."""
        return self.entries > 0 and not self.unchecked

    def __str__(self) -> str:
        what = f"{counted(self.entries, 'entry', 'entries')} in {counted(self.tensors, 'tensor')}"
        verdict = "the base holds the values that the delta was trained on"
        if not self.entries:
            verdict = "names and shapes fit, and nothing else ties the delta to this base"
        if self.unchecked:
            number = counted(len(self.unchecked), "tensor")
            verdict = (
                f"names and shapes fit; the base has {number} (`{self.unchecked[0]}`) in another dtype than the delta "
            )
            verdict += "was trained on, or not quantized as then, so the values there cannot be checked"
        missing = f", {len(self.missing)} of them not in the base" if self.missing else ""
        whole = f" {counted(self.whole, 'tensor')} stored whole{missing}." if self.whole else ""
        return f"{what}: {verdict}.{whole}"


class WeightPatch(NamedTuple):
    """New values for some entries of one tensor of a checkpoint, or for all of them.

    The fields are those of vLLM's ``CheckpointWeightPatch``, in its order: ``CheckpointWeightPatch(*patch)`` is one.
    """

    name: str  # in the checkpoint, as are shape and dtype
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor  # (count,) the new values
    indices: Tensor | None = None  # (count,) int64, flat row-major, strictly increasing; None where values are for all


def check_base(tensors: TensorDeltas, whole: NamedTensors, base: Base) -> CheckReport:
    """Checks a delta against a model or the path of a checkpoint; see :meth:`sparsify.SparseDelta.check`."""
    if not isinstance(base, nn.Module):
        return check_checkpoint(tensors, whole, Checkpoint(base))[0]
    writes = zip(tensors.values(), plan_delta(tensors, whole, base, warn=False), strict=False)
    unchecked = tuple(write.name for delta, write in writes if not is_verified(delta, write.old))
    return CheckReport(len(tensors), sum(delta.count for delta in tensors.values()), len(whole), unchecked)


def check_checkpoint(
    tensors: TensorDeltas, whole: NamedTensors, checkpoint: Checkpoint
) -> tuple[CheckReport, dict[str, Layout]]:
    """Checks a delta against a checkpoint, of which only the pages with entries are read; also gives the layouts."""
    check_names(tensors, whole)
    unchecked: list[str] = []
    layouts: dict[str, Layout] = {}
    for name, delta in tensors.items():
        layouts[name] = _find_layout(name, delta, checkpoint)
        if not is_verified(delta, checked_values(name, delta, checkpoint, layouts[name])[0]):
            unchecked.append(name)
    for name in (name for name in whole if name in checkpoint):
        layout = layouts[name] = checkpoint.layout(name)
        shape = whole[name].shape if is_resized(whole[name].shape, layout.shape) else layout.shape  # a merge resizes
        check_fits(name, whole[name], shape, checkpoint.dtype(layout), _IN_FILES)
    owners: dict[tuple[object, ...], str] = {}  # of stored windows
    for name, window in ((name, window) for name, layout in layouts.items() for window in layout.windows):
        first = owners.setdefault((window.key, window.place.storage_offset()), name)
        if first != name:
            one = f"`{first}` and `{name}` are one tensor in this checkpoint (`{window.key}`) and two in the delta"
            raise BaseMismatchError(f"{one}: give the base with these weights untied, as it was in training.")
    missing = tuple(name for name in whole if name not in layouts)
    entries = sum(delta.count for delta in tensors.values())
    return CheckReport(len(tensors), entries, len(whole), tuple(unchecked), missing), layouts


def checked_values(name: str, delta: TensorDelta, checkpoint: Checkpoint, layout: Layout) -> tuple[Tensor, Tensor]:
    """The base's and the trained values (count,) of one tensor; raises where the checkpoint is not the delta's base."""
    check_fits(name, delta, layout.shape, checkpoint.dtype(layout), _IN_FILES)
    old = checkpoint.take(layout, delta.indices)
    return old, new_values(name, delta, old, _IN_FILES)


def _find_layout(name: str, delta: TensorDelta, checkpoint: Checkpoint) -> Layout:
    layout = checkpoint.layout(name)
    # transformers may rename another tensor to a stored name, which therefore counts only where the values match
    if name not in checkpoint.stored:
        return layout
    fits = tuple(layout.shape) == delta.shape and checkpoint.dtype(layout) == delta.dtype
    if fits and digest(checkpoint.take(layout, delta.indices)) == delta.base_sha256:
        return layout
    return next(iter(checkpoint.conversion.find(name)), layout)


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
        for name in whole.keys() & layouts.keys():  # an engine keeps its shapes
            check_fits(name, whole[name], layouts[name].shape, opened.dtype(layouts[name]), _IN_FILES)
        places = {name: opened.copies(name, layout) for name, layout in layouts.items()}
    elif added := [name for name, delta in tensors.items() if delta.kind == "add"]:
        remedy = "give the base's checkpoint, `patches(checkpoint)`."
        raise SparsifyError(f"tensor `{added[0]}` is stored as differences, and a patch holds values: {remedy}")
    parts: dict[str, TensorDelta | Tensor] = {**tensors, **whole}
    return chain.from_iterable(patches_of(name, part, opened, places.get(name, [])) for name, part in parts.items())


def patches_of(
    name: str, part: TensorDelta | Tensor, checkpoint: Checkpoint | None, places: Sequence[Layout]
) -> Iterator[WeightPatch]:
    """Patches of a tensor in each of the places where a checkpoint stores it, or of the model's where there is none."""
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
