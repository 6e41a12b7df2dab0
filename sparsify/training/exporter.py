"""Exports a model in training again and again, for a stream of its versions.

In: an engine. Out: a :class:`sparsify.delta.version.Version` of the state as it is now, to the bit what
``SparseDelta.from_model`` takes; only tensors that are drawn from a seed there are stored whole here. Entries are
sorted, and their positions and base values copied, only after entries were added; each call takes the values anew, for
all tensors of a dtype at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsify.common.names import plain_name
from sparsify.common.raw_bits import all_finite
from sparsify.delta.patch_plan import own_copy
from sparsify.delta.version import Entries, Version
from sparsify.errors import SparsifyError
from sparsify.masked.tensor import MaskedTensor
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

if TYPE_CHECKING:
    from sparsify.training.engine import Engine

CALL = "DeltaPublisher.update()"


class _Group(NamedTuple):
    """The tensors that are exported in one dtype, all of them quantized or none, and their entries in order."""

    dtype: torch.dtype
    packed: bool
    tensors: dict[str, MaskedTensor]
    entries: dict[str, Entries]  # of an earlier version, by plain name
    slots: Tensor  # (n,) of all of these entries, on the flat delta's device
    base: Tensor  # (n,) there, in the dtype of base + delta


class Exporter:
    """A function of no arguments that returns the model's present version.

    Args:
        engine: of a sparsified model.
        model: the model, or what wraps it, which is searched for parameters that train and that no delta holds.
    """

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self._engine = engine
        self._key: object = None
        self._groups: list[_Group] = []
        self._config: dict[str, Any] = {}
        twice = [name for name, count in Counter(plain_name(t.name) for t in engine.tensors).items() if count > 1]
        if twice:
            raise SparsifyError(f"two trained tensors are called `{twice[0]}`: rename one of the modules.")
        warn_of_unheld(engine, model, stacklevel=5)

    @torch.no_grad()
    def __call__(self) -> Version:
        engine = self._engine
        prepare(engine, CALL)
        parameters = dict(engine.root.named_parameters())
        parts = trained_tensors(engine, parameters)
        stored_whole = {name: part for name, part in parts.items() if is_stored_whole(engine, name, part)}
        self._find_entries({name: part for name, part in parts.items() if name not in stored_whole})
        tensors = {name: entries for group in self._groups for name, entries in self._export(group).items()}
        whole = dense_tensors(engine, parameters)
        whole |= {plain_name(name): as_of(part, engine.unmasked) for name, part in stored_whole.items()}
        config = {**self._config, "steps_done": engine.step}
        return Version(
            dict(sorted(tensors.items())), {name: own_copy(tensor) for name, tensor in whole.items()}, config
        )

    def _find_entries(self, parts: Mapping[str, Any]) -> None:
        """Sorts the entries into groups again if they may have changed."""
        engine = self._engine
        dtypes = tuple((name, part.dtype) for name, part in parts.items())
        key = engine.buffers.generation, engine.values.device, engine.values.dtype, dtypes
        if key == self._key:
            return
        groups: dict[tuple[torch.dtype, bool], dict[str, MaskedTensor]] = {}
        for name, part in parts.items():
            if part.count:
                dtype = engine.values.dtype if part.packed else part.dtype
                groups.setdefault((dtype, part.packed), {})[plain_name(name)] = part
        self._groups = [self._group(*sort, tensors) for sort, tensors in groups.items()]
        in_whole = engine.unmasked - sum(group.slots.numel() for group in self._groups)
        self._config = describe_run(engine, engine.unmasked, in_whole)
        self._key = key

    def _group(self, dtype: torch.dtype, packed: bool, tensors: dict[str, MaskedTensor]) -> _Group:
        buffers, device = self._engine.buffers, self._engine.values.device
        orders, sorted_indices = [], []
        for tensor in tensors.values():
            indices, order = buffers.indices(tensor.number).sort()
            orders.append(order)
            sorted_indices.append(indices)
        numbers = [tensor.number for tensor in tensors.values()]
        pairs = list(zip(numbers, orders, strict=True))
        slots = torch.cat([buffers.slots(number)[order] for number, order in pairs])
        base = torch.cat([buffers.base(number)[order] for number, order in pairs])
        counts = [tensor.count for tensor in tensors.values()]
        host = own_copy(torch.cat(sorted_indices)).split(counts), own_copy(base).split(counts)
        entries = {}
        for (name, tensor), indices, old in zip(tensors.items(), *host, strict=True):
            kind, old = "add" if packed else "replace", old.to(tensor.dtype)
            entries[name] = Entries(tuple(tensor.shape_now), tensor.dtype, kind, tensor.scheme, indices, old, old)
        wide = torch.promote_types(base.dtype, self._engine.values.dtype)
        return _Group(dtype, packed, tensors, entries, slots.to(device), base.to(device, wide))

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
        if not (group.packed or engine.weights.are_sums or engine.sharded):
            return torch.cat([own_copy(entries_of(t, engine.unmasked)[1]) for t in group.tensors.values()])
        delta = engine.values.detach().index_select(0, group.slots)
        return own_copy((delta if group.packed else group.base + delta).to(group.dtype))
