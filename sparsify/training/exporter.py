"""Exports a model in training again and again, for a stream of its versions.

In: an engine. Out: a :class:`sparsify.stream.version.Version` of the state as it is now, to the bit what
``SparseDelta.from_model`` takes. Entries are copied to the host and merged into the sorted ones once, when they are
new; each call takes the values anew, for all tensors of a dtype at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsify.common.names import ENGINE, plain_name
from sparsify.common.raw_bits import all_finite
from sparsify.core.devices import send
from sparsify.core.tensor import MaskedTensor
from sparsify.delta.entries import merge
from sparsify.delta.patch_plan import own_copy
from sparsify.errors import SparsifyError
from sparsify.stream.version import TrainedEntries as Entries
from sparsify.stream.version import Version
from sparsify.training.engine import Engine
from sparsify.training.export import (
    as_of,
    dense_tensors,
    describe_run,
    entries_of,
    is_stored_whole,
    prepare,
    trained_tensors,
    warn_of_unheld,
)

CALL = "DeltaPublisher.update()"


class _Group(NamedTuple):
    """The tensors that are exported in one dtype, all of them quantized or none, and their entries."""

    dtype: torch.dtype
    is_quantized: bool
    tensors: dict[str, MaskedTensor]
    entries: dict[str, Entries]  # by plain name, with the base's values
    slots: Tensor  # (n,) of all of these entries, on the flat delta's device
    base: Tensor  # (n,) there, in the dtype of base + delta


class _Known(NamedTuple):
    """The entries at the last call."""

    key: object = None  # as long as it is the same, entries are only added
    counts: Sequence[int] = ()  # by tensor
    groups: Sequence[_Group] = ()
    config: Mapping[str, Any] = MappingProxyType({})


class Exporter:
    """A function of no arguments that returns the model's present version.

    Args:
        engine: of a sparsified model.
        model: the model, or what wraps it, which is searched for parameters that train and that no delta holds.
    """

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self._engine, self._known = engine, _Known()
        twice = [name for name, count in Counter(plain_name(t.name) for t in engine.tensors).items() if count > 1]
        if twice:
            raise SparsifyError(f"two trained tensors are called `{twice[0]}`: rename one of the modules.")
        warn_of_unheld(engine, model, stacklevel=5)

    @torch.no_grad()
    def __call__(self) -> Version:
        engine = self._engine
        if vars(engine.root).get(ENGINE) is not engine:
            raise SparsifyError(
                f"{CALL}: the model was desparsified since its publisher was made, so that nothing of it changes any "
                "more. If it was sparsified again, make a new DeltaPublisher."
            )
        prepare(engine, CALL)
        parameters = dict(engine.root.named_parameters())
        parts = trained_tensors(engine, parameters)
        stored_whole = {name: part for name, part in parts.items() if is_stored_whole(engine, name, part)}
        self._find_entries({name: part for name, part in parts.items() if name not in stored_whole})
        tensors = {name: entries for group in self._known.groups for name, entries in self._export(group).items()}
        whole = dense_tensors(engine, parameters)
        whole |= {plain_name(name): as_of(part, engine.unmasked) for name, part in stored_whole.items()}
        config = {**self._known.config, "steps_done": engine.step}
        whole = {name: own_copy(tensor) for name, tensor in whole.items()}
        return Version(dict(sorted(tensors.items())), whole, config, engine.unmasked, engine.entries.generation)

    def _find_entries(self, parts: Mapping[str, Any]) -> None:
        """Takes in the entries that were added since the last call; all of them where they were replaced."""
        engine, known = self._engine, self._known
        dtypes = {name: part.dtype for name, part in parts.items()}
        key = engine.entries.generation, engine.values.device, engine.values.dtype, dtypes, engine.steps
        counts = [tensor.count for tensor in engine.tensors]
        if key != known.key:
            known = _Known(key, [0] * len(counts))
        elif counts == known.counts:
            return
        entries = {name: one for group in known.groups for name, one in group.entries.items()}
        for tensor, more in self._new_entries(known.counts, counts):
            if tensor.name in parts:
                name = plain_name(tensor.name)
                entries[name] = _merged(entries[name], more) if name in entries else more
        groups: dict[tuple[torch.dtype, bool], dict[str, MaskedTensor]] = {}
        for name, part in parts.items():
            if part.count:
                dtype = engine.values.dtype if part.is_quantized else part.dtype
                groups.setdefault((dtype, part.is_quantized), {})[plain_name(name)] = part
        found = [self._group(*sort, tensors, entries) for sort, tensors in groups.items()]
        in_whole = engine.unmasked - sum(group.slots.numel() for group in found)
        self._known = _Known(key, counts, found, describe_run(engine, engine.unmasked, in_whole))

    def _new_entries(self, before: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[MaskedTensor, Entries]]:
        """The entries by which the tensors' counts have grown, with the base's values, in ascending order."""
        entries, first = self._engine.entries, sum(before)
        ids, order = own_copy(entries.ids[first:]).sort()
        base = own_copy(entries.base[first:])[order]
        sizes = [count - old for count, old in zip(counts, before, strict=True)]
        parts = ids.split(sizes), (order + first).split(sizes), base.split(sizes)
        for tensor, own, slots, values in zip(self._engine.tensors, *parts, strict=True):
            if own.numel():
                values, kind = values.to(tensor.dtype), "add" if tensor.is_quantized else "replace"
                fixed = tuple(tensor.shape_now), tensor.dtype, kind, tensor.scheme
                yield tensor, Entries(*fixed, own - tensor.offset, slots, values, values)

    def _group(
        self, dtype: torch.dtype, is_quantized: bool, tensors: dict[str, MaskedTensor], entries: Mapping[str, Entries]
    ) -> _Group:
        engine, own = self._engine, {name: entries[name] for name in tensors}
        slots = send(torch.cat([each.slots for each in own.values()]), engine.values.device)
        # not the entries' own, which are rounded where only some of the model's modules were cast
        base = engine.entries.base.to(slots.device).index_select(0, slots)
        wide = torch.promote_types(base.dtype, engine.values.dtype)
        return _Group(dtype, is_quantized, tensors, own, slots, base.to(wide))

    def _export(self, group: _Group) -> dict[str, Entries]:
        """The entries of a group with their present values; raises where one is not finite."""
        values = self._values(group)
        parts = values.split([entries.indices.numel() for entries in group.entries.values()])
        found = {n: e._replace(values=own) for (n, e), own in zip(group.entries.items(), parts, strict=True)}
        if not all_finite(values):
            for name, entries in found.items():
                try:
                    entries.delta()
                except SparsifyError as error:
                    raise SparsifyError(f"tensor `{name}` cannot go into a delta: {error}") from error
        return found

    def _values(self, group: _Group) -> Tensor:
        """(n,) the present values of a group's entries, or their changes if it is quantized, on the CPU."""
        engine = self._engine
        if not (group.is_quantized or engine.weights.are_sums or engine.sharded):
            return torch.cat([own_copy(entries_of(t, engine.unmasked)[1]) for t in group.tensors.values()])
        delta = engine.values.detach().index_select(0, group.slots)
        return (delta if group.is_quantized else group.base + delta).to(group.dtype).cpu()


def _merged(known: Entries, new: Entries) -> Entries:
    """One tensor's entries; what they have for values are the base's."""
    indices, slots, base = merge((known.indices, known.slots, known.base), (new.indices, new.slots, new.base))
    return known._replace(indices=indices, slots=slots, base=base, values=base)
