"""Exports a model in training again and again, for a stream of its versions.

In: an engine. Out: a :class:`sparsify.stream.version.Version` of the state as it is now, to the bit what
``SparseDelta.from_model`` takes. Positions and base values are copied to the host once, when entries are new; each call
takes the values anew, for all tensors of a dtype at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsify.common.names import ENGINE, plain_name
from sparsify.common.raw_bits import all_finite
from sparsify.core.tensor import MaskedTensor
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


class _Part(NamedTuple):
    """A tensor, its entries with the base's values, and their slots (k,) in the flat delta, on the ids' device."""

    tensor: MaskedTensor
    entries: Entries
    slots: Tensor


class Exporter:
    """A function of no arguments that returns the model's present version.

    Args:
        engine: of a sparsified model.
        model: the model, or what wraps it, which is searched for parameters that train and that no delta holds.
    """

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self._engine = engine
        self._key: object = None  # as long as it is the same, so are the entries
        self._groups: dict[tuple[torch.dtype, bool], dict[str, _Part]] = {}  # by exported dtype, and if quantized
        self._flat: dict[tuple[torch.dtype, bool], tuple[Tensor, Tensor]] = {}  # their slots and base, (n,) each
        self._config: dict[str, Any] = {}
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
        groups = self._groups.items()
        tensors = {name: own for sort, parts in groups for name, own in self._export(parts, *sort).items()}
        whole = dense_tensors(engine, parameters)
        whole |= {plain_name(name): as_of(part, engine.unmasked) for name, part in stored_whole.items()}
        config = {**self._config, "steps_done": engine.step}
        whole = {name: own_copy(tensor) for name, tensor in whole.items()}
        return Version(dict(sorted(tensors.items())), whole, config)

    def _find_entries(self, parts: Mapping[str, Any]) -> None:
        """Takes in the entries where they are others than at the last call."""
        engine = self._engine
        dtypes = {name: part.dtype for name, part in parts.items()}
        state = engine.entries.generation, engine.unmasked, engine.steps
        key = *state, engine.values.device, engine.values.dtype, dtypes
        if key == self._key:
            return
        slots, indices = engine.entries.by_tensor()
        base = engine.entries.base.index_select(0, slots)
        flat = slots, own_copy(indices), own_copy(base)
        groups: dict[tuple[torch.dtype, bool], dict[str, _Part]] = {}
        for tensor, *own in zip(engine.tensors, *(part.split(engine.entries.counts) for part in flat), strict=True):
            if tensor.count and tensor.name in parts:
                dtype = engine.values.dtype if tensor.is_quantized else tensor.dtype
                values, kind = own[2].to(tensor.dtype), "add" if tensor.is_quantized else "replace"
                entries = Entries(tuple(tensor.shape_now), tensor.dtype, kind, tensor.scheme, own[1], values, values)
                group = groups.setdefault((dtype, tensor.is_quantized), {})
                group[plain_name(tensor.name)] = _Part(tensor, entries, own[0])
        in_whole = engine.unmasked - sum(part.slots.numel() for group in groups.values() for part in group.values())
        self._key, self._groups = key, groups
        every = {sort: torch.cat([part.slots for part in group.values()]) for sort, group in groups.items()}
        # not the entries' own base, which is rounded where only some of the model's modules were cast
        self._flat = {sort: (slots, engine.entries.base.index_select(0, slots)) for sort, slots in every.items()}
        self._config = describe_run(engine, engine.unmasked, in_whole)

    def _export(self, parts: Mapping[str, _Part], dtype: torch.dtype, is_quantized: bool) -> dict[str, Entries]:
        """The entries of a group with their present values; raises where one is not finite."""
        values = self._values(parts, dtype, is_quantized)
        split = values.split([part.slots.numel() for part in parts.values()])
        found = {n: part.entries._replace(values=own) for (n, part), own in zip(parts.items(), split, strict=True)}
        if not all_finite(values):
            for name, entries in found.items():
                try:
                    entries.delta()
                except SparsifyError as error:
                    raise SparsifyError(f"tensor `{name}` cannot go into a delta: {error}") from error
        return found

    def _values(self, parts: Mapping[str, _Part], dtype: torch.dtype, is_quantized: bool) -> Tensor:
        """(n,) the present values of a group's entries, or their changes if it is quantized, on the CPU."""
        engine = self._engine
        if not (is_quantized or engine.weights.are_sums or engine.sharded):
            return torch.cat([own_copy(entries_of(part.tensor, engine.unmasked)[1]) for part in parts.values()])
        slots, base = self._flat[dtype, is_quantized]
        values = engine.values.detach().index_select(0, slots.to(engine.values.device))
        if not is_quantized:
            values = base.to(values.device, torch.promote_types(base.dtype, values.dtype)) + values
        return values.to(dtype).cpu()
