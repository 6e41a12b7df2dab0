"""Whether a base is the one that a delta was trained on: told before, or without, changing anything.

In: a delta's tensors, and a base in memory or in files. Out: a :class:`CheckReport`, or an error that names the tensor
that does not fit. Of a base in files, only the pages that hold changed entries are read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from sparsify.common.names import check_plain
from sparsify.common.raw_bits import digest
from sparsify.delta.checkpoint.fused_layout import Layout
from sparsify.delta.checkpoint.reader import Checkpoint
from sparsify.delta.entries import TensorDelta
from sparsify.delta.format import check_names
from sparsify.delta.patch_plan import (
    check_dtype,
    check_shape,
    check_whole,
    counted,
    find_targets,
    is_proven,
    new_values,
    plan_entries,
)
from sparsify.errors import BaseMismatchError

_IN_FILES = "the checkpoint"


@dataclass(frozen=True)
class CheckReport:
    """What was checked, and fits.

    Attributes:
        tensors: tensors changed at entries.
        entries: changed entries.
        whole: tensors stored whole.
        unchecked: names of tensors whose values could not be checked, since the base has them in another dtype, or not
            quantized as in training.
        missing: names of tensors stored whole that a checkpoint does not have, and a merge adds to it.

    Example:
        >>> print(CheckReport(tensors=2, entries=1_000))
        1,000 entries in 2 tensors: the base holds the values that the delta was trained on.
    """

    tensors: int
    entries: int
    whole: int = 0
    unchecked: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = f"{counted(self.entries, 'entry', 'entries')} in {counted(self.tensors, 'tensor')}"
        verdict = "the base holds the values that the delta was trained on"
        if self.unchecked:
            number = counted(len(self.unchecked), "tensor")
            verdict = (
                f"names and shapes fit; the base has {number} (`{self.unchecked[0]}`) in another dtype than the delta "
                "was trained on, or not quantized as then, so the values there cannot be checked"
            )
        whole = f" {counted(self.whole, 'tensor')} stored whole" if self.whole else ""
        if self.missing:
            whole += f", {len(self.missing)} of them not in the base"
        return f"{what}: {verdict}.{whole + '.' if whole else ''}"


def check_base(
    tensors: Mapping[str, TensorDelta], whole: Mapping[str, Tensor], base: nn.Module | str | os.PathLike[str]
) -> CheckReport:
    """Checks a delta against a base, a model or the path of a checkpoint, as applying or merging would.

    Raises:
        BaseMismatchError: when the base lacks a tensor, or has another shape, dtype or other values at the entries.
        SparsifyError: when there is no checkpoint at the path, a tensor has no place of its own in its files, or the
            model is in sparse training.
    """
    check_names(tensors, whole)
    if not isinstance(base, nn.Module):
        report, _ = check_checkpoint(tensors, whole, Checkpoint(base))
        return report
    check_plain(base)
    targets = find_targets([*tensors, *whole], base, whole)
    edits = {name: plan_entries(name, delta, targets[name]) for name, delta in tensors.items()}
    for name, tensor in whole.items():
        check_whole(name, tensor, targets[name].shape, targets[name].dtype)
    unchecked = [name for name, delta in tensors.items() if not is_proven(delta, edits[name].old)]
    return _report(tensors, whole, unchecked)


def check_checkpoint(
    tensors: Mapping[str, TensorDelta], whole: Mapping[str, Tensor], checkpoint: Checkpoint
) -> tuple[CheckReport, dict[str, Layout]]:
    """Checks a delta against a checkpoint, one tensor at a time.

    Returns:
        What was checked, and where each of the delta's tensors is stored; those stored whole may be nowhere.

    Raises:
        BaseMismatchError, SparsifyError: as :func:`check_base` does.
    """
    unchecked: list[str] = []
    layouts: dict[str, Layout] = {}
    places: dict[tuple[object, ...], str] = {}
    for name, delta in tensors.items():
        layout = layouts[name] = _place(name, delta, checkpoint)
        _check_distinct(name, layout, places)
        trained_values(name, delta, checkpoint, layout)
        proven = checkpoint.dtype(layout) == delta.dtype and delta.quantization is None  # or there was an error
        if not proven and not _proves_base(delta, checkpoint, layout):
            unchecked.append(name)
    for name, tensor in whole.items():
        if name in checkpoint:
            layout = layouts[name] = checkpoint.layout(name)
            _check_distinct(name, layout, places)
            check_whole(name, tensor, layout.shape, checkpoint.dtype(layout), _IN_FILES)
    missing = [name for name in whole if name not in layouts]
    return _report(tensors, whole, unchecked, missing), layouts


def _place(name: str, delta: TensorDelta, checkpoint: Checkpoint) -> Layout:
    """Where a tensor's entries are stored.

    A tensor that is stored under the very name may still be another one than the model's, which transformers renames,
    or have its entries elsewhere. So the name alone counts only where the values prove it.

    Raises:
        BaseMismatchError, SparsifyError: as :meth:`Checkpoint.layout` does.
    """
    layout = checkpoint.layout(name)
    if name not in checkpoint.stored or _proves_base(delta, checkpoint, layout):
        return layout
    return next(iter(checkpoint.converted(name)), layout)


def trained_values(name: str, delta: TensorDelta, checkpoint: Checkpoint, layout: Layout) -> Tensor:
    """The trained values (count,) of one tensor in the checkpoint's dtype; raises where it is not the delta's base."""
    check_shape(name, delta.shape, layout.shape, "Give the base that the delta was trained on.", _IN_FILES)
    check_dtype(name, delta, checkpoint.dtype(layout), _IN_FILES)
    return new_values(name, delta, checkpoint.take(layout, delta.indices), _IN_FILES)


def _proves_base(delta: TensorDelta, checkpoint: Checkpoint, layout: Layout) -> bool:
    """Whether the values at the entries are, by their digest, those that the delta was trained on."""
    if tuple(layout.shape) != delta.shape or checkpoint.dtype(layout) != delta.dtype:
        return False
    return digest(checkpoint.take(layout, delta.indices)) == delta.base_sha256


def _check_distinct(name: str, layout: Layout, places: dict[tuple[object, ...], str]) -> None:
    """Raises where a tensor lies where another one of the delta does."""
    for window in layout.windows:
        first = places.setdefault((window.key, window.offset), name)
        if first != name:
            raise BaseMismatchError(
                f"`{first}` and `{name}` are one tensor in this checkpoint (`{window.key}`) and two in the delta, so "
                "one would overwrite the other: give the base with these weights untied, as it was in training."
            )


def _report(
    tensors: Mapping[str, TensorDelta],
    whole: Mapping[str, Tensor],
    unchecked: list[str],
    missing: list[str] | None = None,
) -> CheckReport:
    entries = sum(delta.count for delta in tensors.values())
    return CheckReport(len(tensors), entries, len(whole), tuple(unchecked), tuple(missing or ()))
