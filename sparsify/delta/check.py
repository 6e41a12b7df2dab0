"""Checks whether a base, in memory or in files, is the one that a delta was trained on, without a change to either."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from sparsify.common.names import check_names
from sparsify.common.raw_bits import digest
from sparsify.delta.checkpoint.fused_layout import Layout
from sparsify.delta.checkpoint.reader import Checkpoint
from sparsify.delta.entries import Base, NamedTensors, TensorDelta, TensorDeltas
from sparsify.delta.patch_plan import check_fits, counted, is_verified, new_values, plan_delta
from sparsify.errors import BaseMismatchError

_IN_FILES = "the checkpoint"


@dataclass(frozen=True)
class CheckReport:
    """The result of a check that found nothing wrong."""

    tensors: int  # number of tensors changed at entries
    entries: int  # number of changed entries
    whole: int = 0  # number of tensors stored whole
    unchecked: tuple[str, ...] = ()  # names of tensors whose values could not be checked: another dtype, not quantized
    missing: tuple[str, ...] = ()  # names of tensors stored whole that a checkpoint lacks; a merge adds them

    def __str__(self) -> str:
        what = f"{counted(self.entries, 'entry', 'entries')} in {counted(self.tensors, 'tensor')}"
        verdict = "the base holds the values that the delta was trained on"
        if self.unchecked:
            number = counted(len(self.unchecked), "tensor")
            verdict = (
                f"names and shapes fit; the base has {number} (`{self.unchecked[0]}`) in another dtype than the delta "
                "was trained on, or not quantized as then, so the values there cannot be checked"
            )
        missing = f", {len(self.missing)} of them not in the base" if self.missing else ""
        whole = f" {counted(self.whole, 'tensor')} stored whole{missing}." if self.whole else ""
        return f"{what}: {verdict}.{whole}"


def check_base(tensors: TensorDeltas, whole: NamedTensors, base: Base) -> CheckReport:
    """Checks a delta against a model or the path of a checkpoint; see :meth:`sparsify.SparseDelta.check`."""
    if not isinstance(base, nn.Module):
        return check_checkpoint(tensors, whole, Checkpoint(base))[0]
    old = {patch.name: patch.old for patch in plan_delta(tensors, whole, base, warn=False)}
    unchecked = tuple(name for name, delta in tensors.items() if not is_verified(delta, old[name]))
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
        check_fits(name, whole[name], layout.shape, checkpoint.dtype(layout), _IN_FILES)
    owners: dict[tuple[str, int], str] = {}  # of stored windows
    for name, window in ((name, window) for name, layout in layouts.items() for window in layout.windows):
        first = owners.setdefault((window.key, window.offset), name)
        if first != name:
            raise BaseMismatchError(
                f"`{first}` and `{name}` are one tensor in this checkpoint (`{window.key}`) and two in the delta: give "
                "the base with these weights untied, as it was in training."
            )
    missing = tuple(name for name in whole if name not in layouts)
    entries = sum(delta.count for delta in tensors.values())
    return CheckReport(len(tensors), entries, len(whole), tuple(unchecked), missing), layouts


def checked_values(name: str, delta: TensorDelta, checkpoint: Checkpoint, layout: Layout) -> tuple[Tensor, Tensor]:
    """The base's and the trained values (count,) of one tensor; raises where the checkpoint is not the delta's base."""
    check_fits(name, delta, layout.shape, checkpoint.dtype(layout), _IN_FILES)
    old = checkpoint.take(layout, delta.indices)
    return old, new_values(name, delta, old, _IN_FILES)


def _find_layout(name: str, delta: TensorDelta, checkpoint: Checkpoint) -> Layout:
    """Where a tensor's entries are stored.

    transformers may rename another tensor to a stored name, which therefore counts only where the values match.
    """
    layout = checkpoint.layout(name)
    if name not in checkpoint.stored:
        return layout
    fits = tuple(layout.shape) == delta.shape and checkpoint.dtype(layout) == delta.dtype
    if fits and digest(checkpoint.take(layout, delta.indices)) == delta.base_sha256:
        return layout
    return next(iter(checkpoint.converted(name)), layout)
