"""One version of a model in training, and what changed from one to the next: what a stream sends.

The entries of a version are in the order of their tensors' names, and ascending in each tensor. Both ends of a stream
know this order, so that the values of known entries are sent without positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify.common.raw_bits import as_bits, digest, same_values
from sparsify.delta.entries import DeltaParts, TensorDelta


class TrainedEntries(NamedTuple):
    """The unmasked entries of one tensor, with memory of their own on the CPU; fields as in :class:`TensorDelta`.

    ``base`` (count,) in ``dtype`` has the base's values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    quantization: str | None
    indices: Tensor
    base: Tensor
    values: Tensor

    def find(self, before: TrainedEntries) -> Tensor | slice | None:
        """Numbers (k,) of an earlier version's entries; ``None`` unless all are here, of one sort and over one base."""
        if (self[:4], self.values.dtype) != (before[:4], before.values.dtype):
            return None
        if self.indices is before.indices and self.base is before.base:
            return slice(None)
        places = torch.searchsorted(self.indices, before.indices).clamp_(max=self.indices.numel() - 1)
        pairs = zip(self[4:6], before[4:6], strict=True)
        return places if all(same_values(part.index_select(0, places), old) for part, old in pairs) else None

    def delta(self, chosen: Tensor | None = None) -> TensorDelta:
        """The entries, or those ``chosen`` by a mask (count,)."""
        parts = self.indices, self.base, self.values
        indices, base, values = parts if chosen is None else [part[chosen] for part in parts]
        sha = digest(base)
        return TensorDelta(indices, values, self.shape, self.dtype, self.kind, sha, quantization=self.quantization)


class Version(NamedTuple):
    """A model's trained state: entries by tensor, in the order of the names, dense tensors, and a delta's config."""

    tensors: dict[str, TrainedEntries]
    whole: dict[str, Tensor]
    config: dict[str, Any]

    def delta_parts(self) -> DeltaParts:
        """The parts of the :class:`sparsify.SparseDelta` of this version."""
        return {name: entries.delta() for name, entries in self.tensors.items()}, self.whole, self.config


class KnownValues(NamedTuple):
    """Values of one dtype of entries that both ends know: (n,) at ascending ``places`` among these, or all of them."""

    values: Tensor
    places: Tensor | None = None

    def fits(self, count: int) -> bool:
        """Whether they can be those of ``count`` entries."""
        if self.places is None:
            return self.values.numel() == count
        return int(self.places[-1:].sum()) < max(1, count) and self.values.numel() <= count


class Changes(NamedTuple):
    """What turns a version into the next: new entries and dense tensors by name, and values of known entries."""

    tensors: dict[str, TensorDelta]
    whole: dict[str, Tensor]
    known: dict[torch.dtype, KnownValues]


def difference(old: Version, new: Version) -> Changes | None:
    """What changed from one version to another; ``None`` where that is more than new entries, values and tensors."""
    if not (old.whole.keys() <= new.whole.keys() and old.tensors.keys() <= new.tensors.keys()):
        return None
    tensors: dict[str, TensorDelta] = {}
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for name, entries in new.tensors.items():
        before, values = old.tensors.get(name), entries.values
        if before is None:
            tensors[name] = entries.delta()
            continue
        if (known := entries.find(before)) is None:
            return None
        if isinstance(known, Tensor) and known.numel() < values.numel():
            tensors[name] = entries.delta(torch.ones_like(values, dtype=torch.bool).index_fill_(0, known, False))
            values = values.index_select(0, known)
        befores, afters = pairs.setdefault(values.dtype, ([], []))
        befores.append(before.values)
        afters.append(values)
    changed = {dtype: _changed(torch.cat(befores), torch.cat(afters)) for dtype, (befores, afters) in pairs.items()}
    changed = {dtype: values for dtype, values in changed.items() if values.values.numel()}
    return Changes(tensors, changed_whole(old, new), changed)


def changed_whole(old: Version, new: Version) -> dict[str, Tensor]:
    """The dense tensors that are new or have changed."""
    before = old.whole
    return {name: t for name, t in new.whole.items() if name not in before or not same_values(t, before[name])}


def changed_entries(old: Version, new: Version) -> dict[str, TensorDelta]:
    """What brings the entries of an earlier version to those of a later one, by tensor name."""
    found = {}
    for name in sorted(old.tensors.keys() | new.tensors.keys()):
        before, after = old.tensors.get(name), new.tensors.get(name)
        known = None if before is None or after is None else after.find(before)
        if before is None or after is None or known is None:
            found[name] = _after(before, after).delta()
            continue
        changed = torch.ones_like(after.indices, dtype=torch.bool)
        changed[known] = as_bits(after.values[known]) != as_bits(before.values)
        if bool(changed.any()):
            found[name] = after.delta(changed)
    return found


def spread(known: KnownValues, counts: Sequence[int]) -> Iterable[tuple[Tensor | None, Tensor]]:
    """The numbers of the given entries and their values, tensor by tensor; ``None`` for all that a tensor has."""
    if known.places is None:
        return ((None, values) for values in known.values.split(list(counts)))
    starts = torch.tensor([0, *counts], device="cpu").cumsum(0)
    cuts = torch.searchsorted(known.places, starts).tolist()
    parts = zip(cuts, cuts[1:], starts.tolist(), strict=False)
    places = known.places
    return ((places[begin:end] - start, known.values[begin:end]) for begin, end, start in parts)


def _after(before: TrainedEntries | None, after: TrainedEntries | None) -> TrainedEntries:
    """A tensor's entries of a later version, and those of an earlier one that have left, with the base's values."""
    if before is None:
        assert after is not None
        return after
    values = before.base if before.kind == "replace" else torch.zeros_like(before.values)
    reverted = before._replace(values=values)
    if after is None:
        return reverted
    left = torch.isin(before.indices, after.indices, invert=True)
    parts = [torch.cat([own, part[left].to(own.dtype)]) for part, own in zip(reverted[4:], after[4:], strict=True)]
    order = parts[0].argsort()
    return TrainedEntries(*after[:4], *(part[order] for part in parts))


def _changed(old: Tensor, new: Tensor) -> KnownValues:
    """All values (n,), or those whose bits changed and their places, whichever takes fewer bytes."""
    changed = as_bits(old) != as_bits(new)
    number = int(changed.count_nonzero())
    if number * (2 + new.itemsize) >= new.nbytes:  # a place takes two bytes, as a rule
        return KnownValues(new)
    places = changed.nonzero().flatten()
    return KnownValues(new[places], places)
