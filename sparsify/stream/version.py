"""One version of a model in training, and what changed from one to the next: what a stream sends.

The entries of a version are in the order of their tensors' names, and ascending in each tensor. Both ends of a stream
know this order, so that the values of known entries are sent without positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify.common.raw_bits import as_bits, digest, same_values
from sparsify.delta.entries import TensorDelta


class TrainedEntries(NamedTuple):
    """The unmasked entries of one tensor, with memory of their own on the CPU; fields as in :class:`TensorDelta`.

    ``base`` (count,) has the base's values: at the sending end in ``dtype``, at the receiving one in its own base's.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    quantization: str | None
    indices: Tensor
    base: Tensor
    values: Tensor

    @property
    def sort(self) -> tuple[object, ...]:
        """What all entries of a tensor have in common, in whatever version."""
        return (*self[:4], self.values.dtype)

    def find(self, before: TrainedEntries) -> Tensor | slice | None:
        """Numbers (k,) of an earlier version's entries; ``None`` unless all are here, of one sort and over one base."""
        if self.sort != before.sort:
            return None
        if self.indices is before.indices and self.base is before.base:
            return slice(None)
        places = torch.searchsorted(self.indices, before.indices).clamp_(max=self.indices.numel() - 1)
        pairs = zip(self[4:6], before[4:6], strict=True)
        return places if all(same_values(part.index_select(0, places), old) for part, old in pairs) else None

    def at(self, places: Tensor) -> TrainedEntries:
        """The entries with some numbers (k,), or those that a mask (count,) chooses."""
        return self._replace(indices=self.indices[places], base=self.base[places], values=self.values[places])

    def joined(self, more: TrainedEntries) -> TrainedEntries:
        """These entries and more of the same tensor, in ascending order."""
        parts = [torch.cat([own, part.to(own.dtype)]) for own, part in zip(self[4:], more[4:], strict=True)]
        order = parts[0].argsort()
        return TrainedEntries(*self[:4], *(part[order] for part in parts))

    def reverted(self) -> TrainedEntries:
        """The entries with values that leave the base as it is."""
        return self._replace(values=self.base if self.kind == "replace" else torch.zeros_like(self.values))

    def delta(self) -> TensorDelta:
        return TensorDelta(self.indices, self.values, *self[:3], digest(self.base), quantization=self.quantization)


class KnownValues(NamedTuple):
    """Values of one dtype of entries that both ends know: (n,) at ascending ``places`` among these, or all of them."""

    values: Tensor
    places: Tensor | None = None


class Changes(NamedTuple):
    """What turns a version into the next: new entries and dense tensors by name, and values of known entries.

    A snapshot turns the base into a version: its ``known`` is ``None``.
    """

    tensors: dict[str, TensorDelta]
    whole: dict[str, Tensor]
    known: dict[torch.dtype, KnownValues] | None


class Version(NamedTuple):
    """A model's trained state: entries by tensor, in the order of the names, dense tensors, and a delta's config."""

    tensors: dict[str, TrainedEntries]
    whole: dict[str, Tensor]
    config: dict[str, Any]

    def snapshot(self) -> Changes:
        return Changes({name: entries.delta() for name, entries in self.tensors.items()}, self.whole, None)


def difference(old: Version, new: Version) -> Changes | None:
    """What changed from one version to another; ``None`` where that is more than new entries, values and tensors."""
    if not (old.whole.keys() <= new.whole.keys() and old.tensors.keys() <= new.tensors.keys()):
        return None
    tensors: dict[str, TensorDelta] = {}
    pairs: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for name, entries in new.tensors.items():
        before, values = old.tensors.get(name), entries.values
        if before is None:
            tensors[name] = entries.delta()
            continue
        if (known := entries.find(before)) is None:
            return None
        if isinstance(known, Tensor) and known.numel() < values.numel():
            is_new = torch.ones_like(values, dtype=torch.bool).index_fill_(0, known, False)
            tensors[name] = entries.at(is_new).delta()
            values = values.index_select(0, known)
        pairs.setdefault(values.dtype, []).append((before.values, values))
    changed = {dtype: _changed(*map(torch.cat, zip(*found, strict=True))) for dtype, found in pairs.items()}
    sent = {dtype: values for dtype, values in changed.items() if values.values.numel()}
    return Changes(tensors, changed_whole(old, new), sent)


def changed_whole(old: Version, new: Version) -> dict[str, Tensor]:
    """The dense tensors that are new or have changed."""
    before = old.whole
    return {name: t for name, t in new.whole.items() if name not in before or not same_values(t, before[name])}


def changed_entries(old: Version, new: Version) -> dict[str, TensorDelta]:
    """What brings the entries of an earlier version to those of a later one, by tensor name."""
    found = {name: part.reverted().delta() for name, part in old.tensors.items() if name not in new.tensors}
    for name, after in new.tensors.items():
        before = old.tensors.get(name)
        if before is None:
            found[name] = after.delta()
        elif (known := after.find(before)) is None:  # entries have left, or changed their base or dtype
            left = before.at(torch.isin(before.indices, after.indices, invert=True))
            found[name] = after.joined(left.reverted()).delta()
        else:
            changed = torch.ones_like(after.indices, dtype=torch.bool)
            changed[known] = as_bits(after.values[known]) != as_bits(before.values)
            if bool(changed.any()):
                found[name] = after.at(changed).delta()
    return dict(sorted(found.items()))


def _changed(old: Tensor, new: Tensor) -> KnownValues:
    """All values (n,), or those whose bits changed and their places, whichever takes fewer bytes."""
    changed = as_bits(old) != as_bits(new)
    number = int(changed.count_nonzero())
    if number * (2 + new.itemsize) >= new.nbytes:  # a place takes two bytes, as a rule
        return KnownValues(new)
    places = changed.nonzero().flatten()
    return KnownValues(new[places], places)
