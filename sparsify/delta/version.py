"""One version of a model in training, and what changed from one to the next: what a stream sends.

    Version 6, Version 7  --difference-->  Changes: new entries, values of known entries, dense tensors

The entries of a version are in the order of their tensors' names, and ascending in each tensor. Both ends of a stream
know this order, so that the values of known entries are sent without positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify.common.raw_bits import as_bits, digest
from sparsify.delta.entries import TensorDelta


class Entries(NamedTuple):
    """The unmasked entries of one tensor, with memory of their own on the CPU; fields as in :class:`TensorDelta`.

    Attributes:
        base: (count,) in ``dtype``: the base's values.
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
        """What two versions of a tensor have in common."""
        return self[:4]

    def delta(self, chosen: Tensor | None = None) -> TensorDelta:
        """The entries, or those ``chosen`` by a mask (count,) or ascending numbers (n,)."""
        shape, dtype, kind, quantization, *parts = self
        indices, base, values = parts if chosen is None else [part[chosen] for part in parts]
        return TensorDelta(indices, values, shape, dtype, kind, digest(base), quantization=quantization)


class Version(NamedTuple):
    """A model's trained state: entries by tensor name, in the order of the names; dense tensors; a delta's config."""

    tensors: dict[str, Entries]
    whole: dict[str, Tensor]
    config: dict[str, Any]

    def delta_parts(self) -> tuple[dict[str, TensorDelta], dict[str, Tensor], dict[str, Any]]:
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
    if not (old.tensors.keys() <= new.tensors.keys() and old.whole.keys() <= new.whole.keys()):
        return None
    fresh: dict[str, TensorDelta] = {}
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for name, entries in new.tensors.items():
        if (before := old.tensors.get(name)) is None:
            fresh[name] = entries.delta()
            continue
        values = entries.values
        if entries.indices is not before.indices or entries.base is not before.base:
            places = _places(before, entries)
            if places is None:
                return None
            values, is_new = values[places], torch.ones_like(entries.indices, dtype=torch.bool)
            is_new[places] = False
            if places.numel() < is_new.numel():
                fresh[name] = entries.delta(is_new)
        if entries.sort != before.sort:
            return None
        befores, afters = pairs.setdefault(values.dtype, ([], []))
        befores.append(before.values)
        afters.append(values)
    known = {dtype: _changed(torch.cat(befores), torch.cat(afters)) for dtype, (befores, afters) in pairs.items()}
    return Changes(
        fresh, changed_whole(old, new), {dtype: changed for dtype, changed in known.items() if changed.values.numel()}
    )


def changed_whole(old: Version, new: Version) -> dict[str, Tensor]:
    """The dense tensors that are new or have changed."""
    return {name: tensor for name, tensor in new.whole.items() if not same_tensor(tensor, old.whole.get(name))}


def changed_entries(old: Version, new: Version) -> dict[str, TensorDelta]:
    """What brings the entries of an earlier version to those of a later one, by tensor name."""
    found = {}
    for name in sorted(old.tensors.keys() | new.tensors.keys()):
        before, after = old.tensors.get(name), new.tensors.get(name)
        if before is None or after is None:
            found[name] = (after or _reverted(before)).delta()  # type: ignore[arg-type]
        elif (places := _places(before, after)) is None:
            found[name] = _with_reverted(after, _reverted(before)).delta()
        else:
            changed = torch.ones_like(after.indices, dtype=torch.bool)
            changed[places] = as_bits(after.values[places]) != as_bits(before.values)
            if bool(changed.any()):
                found[name] = after.delta(changed)
    return found


def spread(known: KnownValues, counts: Sequence[int]) -> Iterable[tuple[Tensor | None, Tensor]]:
    """The numbers of the given entries and their values, tensor by tensor; ``None`` for all that a tensor has."""
    if known.places is None:
        return ((None, values) for values in known.values.split(list(counts)))
    starts = torch.tensor([0, *counts]).cumsum(0)
    cuts = torch.searchsorted(known.places, starts).tolist()
    parts = zip(cuts, cuts[1:], starts.tolist(), strict=False)
    places = known.places
    return ((places[begin:end] - start, known.values[begin:end]) for begin, end, start in parts)


def _places(before: Entries, after: Entries) -> Tensor | None:
    """(count,) the numbers of a tensor's earlier entries among its later ones; ``None`` where one or its base left."""
    if before.indices.numel() > after.indices.numel():
        return None
    places = torch.searchsorted(after.indices, before.indices).clamp_(max=after.indices.numel() - 1)
    there = torch.equal(after.indices[places], before.indices)
    same_base = there and before.dtype == after.dtype and same_tensor(after.base[places], before.base)
    return places if same_base else None


def _reverted(entries: Entries) -> Entries:
    """The entries with the base's values."""
    values = entries.base if entries.kind == "replace" else torch.zeros_like(entries.values)
    return entries._replace(values=values)


def _with_reverted(entries: Entries, reverted: Entries) -> Entries:
    """Entries and, where they have none, reverted ones."""
    left = torch.isin(reverted.indices, entries.indices, invert=True)
    indices, order = torch.cat([entries.indices, reverted.indices[left]]).sort()
    base, values = (
        torch.cat([own, other[left].to(own.dtype)])[order]
        for own, other in ((entries.base, reverted.base), (entries.values, reverted.values))
    )
    return entries._replace(indices=indices, base=base, values=values)


def _changed(old: Tensor, new: Tensor) -> KnownValues:
    """All values (n,), or those whose bits changed and their places, whichever takes fewer bytes."""
    changed = as_bits(old) != as_bits(new)
    number = int(changed.count_nonzero())
    if number * (2 + new.itemsize) >= new.nbytes:  # a place takes two bytes, as a rule
        return KnownValues(new)
    places = changed.nonzero().flatten()
    return KnownValues(new[places], places)


def same_tensor(tensor: Tensor, other: Tensor | None) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit."""
    if other is None or (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(as_bits(tensor), as_bits(other))
