"""Plans what a stream's message writes into a follower's model, all of it checked before the first write.

In: a message, the model, and what the follower holds of the version before. Out: the patches to the message's version,
and what is held then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparsify.delta.entries import TensorDelta, merge
from sparsify.delta.patch_plan import (
    PatchPlan,
    TensorPatch,
    find_targets,
    plan_delta,
    plan_dense,
    plan_entries,
    trained_values,
    warn_of_casts,
)
from sparsify.errors import DeltaFormatError
from sparsify.stream.messages import Message
from sparsify.stream.version import KnownValues, spread

SAMPLE = 1024  # values that are compared where an update replaces all


class HeldEntries(NamedTuple):
    """The entries of one tensor that a follower knows: (count,) each, values in the model's dtype."""

    indices: Tensor
    base: Tensor
    values: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the tensor in training
    kind: str
    quantization: str | None
    sent_dtype: torch.dtype  # of the values in messages

    @classmethod
    def of(cls, part: TensorDelta, patch: TensorPatch) -> HeldEntries:
        """The entries of a message's part, as they were planned."""
        fields = part.shape, part.dtype, part.kind, part.quantization, part.values.dtype
        return cls(part.indices, patch.old, patch.new, *fields)

    def and_also(self, name: str, more: HeldEntries) -> HeldEntries:
        """These and new entries of the same tensor, in ascending order."""
        indices, base, values = merge(self[:3], more[:3])
        twice = bool((indices[1:] == indices[:-1]).any())
        _check(self[3:] == more[3:] and not twice, f"it has other entries of `{name}`")
        return self._replace(indices=indices, base=base, values=values)


class Held(NamedTuple):
    """What a follower holds: entries by tensor name, in the order of the names, and patches of dense tensors."""

    entries: dict[str, HeldEntries]
    whole: dict[str, TensorPatch]

    @property
    def plan(self) -> PatchPlan:
        """The patches from the base."""
        entries = (TensorPatch(name, e.shape, e.indices, e.base, e.values) for name, e in self.entries.items())
        return [*entries, *self.whole.values()]

    def is_all_sent_again(self, message: Message) -> bool:
        """Whether an update has new values for all of it."""
        sent = {dtype for dtype, known in message.known.items() if known.places is None}
        return self.whole.keys() <= message.whole.keys() and {e.sent_dtype for e in self.entries.values()} <= sent


def plan_snapshot(message: Message, model: nn.Module) -> Held:
    """Plans a whole version on the base; raises where the model is not the base."""
    plan = {patch.name: patch for patch in plan_delta(message.tensors, message.whole, model)}
    parts: dict[str, TensorDelta | Tensor] = {**message.tensors, **message.whole}
    warn_of_casts((name, parts[name].dtype, patch.old.dtype) for name, patch in plan.items())
    entries = {name: HeldEntries.of(part, plan[name]) for name, part in sorted(message.tensors.items())}
    return Held(entries, {name: plan[name] for name in message.whole})


def plan_update(message: Message, held: Held, model: nn.Module) -> tuple[PatchPlan, Held]:
    """Plans an update on the version before; raises where it does not fit what is held, or the model."""
    entries, whole = dict(held.entries), dict(held.whole)
    steps = [step for dtype, known in message.known.items() for step in _known_values(known, dtype, entries)]
    names = [*message.tensors, *message.whole]
    # with all that is held, of which a new tensor must not be an alias
    targets = find_targets([*entries, *whole, *names], model, {*whole, *message.whole}) if names else {}
    for name, part in message.tensors.items():
        _check(name not in whole, f"it has entries of `{name}`, which is stored whole")
        steps.append(plan_entries(name, part, targets[name]))
        new = HeldEntries.of(part, steps[-1])
        entries[name] = entries[name].and_also(name, new) if name in entries else new
    for name, tensor in message.whole.items():
        _check(name not in entries, f"it has all of `{name}`, of which entries are trained")
        before = held.whole.get(name)
        steps.append(plan_dense(name, tensor, targets[name], None if before is None else before.new))
        whole[name] = steps[-1] if before is None else steps[-1]._replace(old=before.old)
    if held.is_all_sent_again(message):
        # The version does not depend on what is replaced. A sample tells whether another model is below.
        steps = [*_sample(steps), *(step._replace(checked=False) for step in steps)]
    return steps, Held(dict(sorted(entries.items())), whole)


def _known_values(known: KnownValues, dtype: torch.dtype, entries: dict[str, HeldEntries]) -> Iterator[TensorPatch]:
    """Patches to new values of known entries, all sent in one dtype, which the ``entries`` then hold."""
    group = {name: each for name, each in entries.items() if each.sent_dtype == dtype}
    counts = [each.values.numel() for each in group.values()]
    _check(known.fits(sum(counts)), f"its {known.values.numel():,} values are not of the {sum(counts):,} known entries")
    for (name, each), (places, values) in zip(group.items(), spread(known, counts), strict=True):
        if not values.numel():
            continue
        indices, base, old = each[:3] if places is None else (part[places] for part in each[:3])
        new = trained_values(name, each.kind, values, base)
        entries[name] = each._replace(values=new if places is None else each.values.index_put((places,), new))
        yield TensorPatch(name, each.shape, indices, old, new)


def _sample(plan: PatchPlan) -> PatchPlan:
    """A part of the patch with the most entries; of one tensor, since a GPU is waited for."""
    patches = [(patch.indices[:SAMPLE], patch) for patch in plan if patch.indices is not None]
    if not patches:
        return []
    indices, largest = max(patches, key=lambda pair: pair[1].new.numel())
    return [largest._replace(indices=indices, old=largest.old[:SAMPLE], new=largest.new[:SAMPLE])]


def _check(fits: bool, problem: str) -> None:
    """Raises where a message makes no sense after the version before it."""
    if not fits:
        raise DeltaFormatError(
            f"this update does not go with the version that the model holds: {problem}. Nothing was changed: ask for "
            "`snapshot()`."
        )
