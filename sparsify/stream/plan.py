"""Plans what a stream's message writes into a follower's model, all of it checked before the first write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from sparsify.delta.entries import TensorDelta
from sparsify.delta.patch_plan import (
    PatchPlan,
    PlannedWrite,
    find_targets,
    plan_delta,
    plan_dense,
    plan_entries,
    trained_values,
)
from sparsify.errors import DeltaFormatError
from sparsify.stream.version import Changes, KnownValues, spread

SAMPLE = 1024  # values that are compared where an update replaces all


class EntryType(NamedTuple):
    """What all entries of a tensor have in common, in whatever version."""

    dtype: torch.dtype  # of the tensor in training
    kind: str
    quantization: str | None
    sent_dtype: torch.dtype  # of the values in messages


def _type_of(part: TensorDelta) -> EntryType:
    return EntryType(part.dtype, part.kind, part.quantization, part.values.dtype)


class Held(NamedTuple):
    """What a follower holds: the writes from the base to its version, by tensor name."""

    entries: dict[str, PlannedWrite]  # in the order of the names
    types: dict[str, EntryType]  # of these
    whole: dict[str, PlannedWrite]  # of dense tensors

    @property
    def plan(self) -> PatchPlan:
        return [*self.entries.values(), *self.whole.values()]

    def is_all_sent_again(self, changes: Changes) -> bool:
        """Whether an update has new values for all of it."""
        sent = {dtype for dtype, known in changes.known.items() if known.places is None}
        return self.whole.keys() <= changes.whole.keys() and {t.sent_dtype for t in self.types.values()} <= sent


def plan_snapshot(changes: Changes, model: nn.Module) -> Held:
    """Plans a whole version on the base; raises where the model is not the base."""
    plan = {write.name: write for write in plan_delta(changes.tensors, changes.whole, model)}
    types = {name: _type_of(part) for name, part in changes.tensors.items()}
    return Held({name: plan[name] for name in sorted(types)}, types, {name: plan[name] for name in changes.whole})


def plan_update(changes: Changes, held: Held, model: nn.Module) -> tuple[PatchPlan, Held]:
    """Plans an update on the version before; raises where it does not fit what is held, or the model."""
    entries, types, whole = dict(held.entries), dict(held.types), dict(held.whole)
    steps = [step for dtype, known in changes.known.items() for step in _known_values(known, dtype, entries, types)]
    names = [*changes.tensors, *changes.whole]
    # with all that is held, of which a new tensor must not be an alias
    targets = find_targets([*entries, *whole, *names], model, {*whole, *changes.whole}) if names else {}
    for name, part in changes.tensors.items():
        _check(name not in whole, f"it has entries of `{name}`, which is stored whole")
        steps.append(plan_entries(name, part, targets[name]))
        fits = types.setdefault(name, _type_of(part)) == _type_of(part)
        entries[name] = _merged(entries[name], steps[-1], fits) if name in entries else steps[-1]
    for name, tensor in changes.whole.items():
        _check(name not in entries, f"it has all of `{name}`, of which entries are trained")
        before = held.whole.get(name)
        steps.append(plan_dense(name, tensor, targets[name], None if before is None else before.new))
        whole[name] = steps[-1] if before is None else steps[-1]._replace(old=before.old)
    if held.is_all_sent_again(changes):
        # The version does not depend on what is replaced. A sample tells whether another model is below.
        steps = [*_sample(steps), *(step._replace(checked=False) for step in steps)]
    return steps, Held(dict(sorted(entries.items())), types, whole)


def _known_values(
    known: KnownValues, dtype: torch.dtype, entries: dict[str, PlannedWrite], types: Mapping[str, EntryType]
) -> Iterator[PlannedWrite]:
    """Writes of new values of known entries, all sent in one dtype, which the ``entries`` then hold."""
    group = {name: write for name, write in entries.items() if types[name].sent_dtype == dtype}
    counts = [write.new.numel() for write in group.values()]
    _check(known.fits(sum(counts)), f"its {known.values.numel():,} values are not of the {sum(counts):,} known entries")
    for (name, write), (places, values) in zip(group.items(), spread(known, counts), strict=True):
        if not values.numel():
            continue
        indices, base, old = write.entries if places is None else (part[places] for part in write.entries)
        new = trained_values(name, types[name].kind, values, base)
        entries[name] = write._replace(new=new if places is None else write.new.index_put((places,), new))
        yield PlannedWrite(name, write.shape, indices, old, new)


def _merged(known: PlannedWrite, more: PlannedWrite, fits: bool) -> PlannedWrite:
    """The write of known and of new entries of one tensor, in ascending order."""
    parts = [torch.cat(pair) for pair in zip(known.entries, more.entries, strict=True)]
    order = parts[0].argsort()
    indices, old, new = (part[order] for part in parts)
    twice = bool((indices[1:] == indices[:-1]).any())
    _check(fits and known.shape == more.shape and not twice, f"it has other entries of `{known.name}`")
    return known._replace(indices=indices, old=old, new=new)


def _sample(plan: PatchPlan) -> PatchPlan:
    """A part of the write with the most entries; of one tensor, since a GPU is waited for."""
    writes = [write for write in plan if write.indices is not None]
    if not writes:
        return []
    largest = max(writes, key=lambda write: write.new.numel())
    indices, old, new = (part[:SAMPLE] for part in largest.entries)
    return [largest._replace(indices=indices, old=old, new=new)]


def _check(fits: bool, problem: str) -> None:
    """Raises where a message makes no sense after the version before it."""
    if not fits:
        unfit = "this update does not go with the version that the model holds"
        raise DeltaFormatError(f"{unfit}: {problem}. Nothing was changed: ask for `snapshot()`.")
