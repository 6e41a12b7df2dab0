"""Exports a model in training: a delta of what it has learned, or a stream of its versions.

In: an engine. Out: a :class:`sparsify.stream.version.Version`: the unmasked entries by tensor, with the values that the
weights have now, the tensors that have to be stored whole, and a delta's config.
"""

import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.adapters.extensions import record_extensions
from sparsify.common.names import ENGINE, persistent_buffers, plain_model, plain_name
from sparsify.common.raw_bits import digest
from sparsify.common.shards import full_values, is_fully_sharded, reshard
from sparsify.core.devices import put
from sparsify.core.entries import VALUES
from sparsify.core.tensor import MaskedTensor
from sparsify.delta.entries import DTYPES, DeltaParts, TensorDelta
from sparsify.delta.format import ENTRIES_IN_WHOLE_KEY, stored_name
from sparsify.delta.patch_plan import own_copy
from sparsify.errors import SparsifyError
from sparsify.masked.quantized import QuantizedTensor
from sparsify.masked.tensor import ModelTensor
from sparsify.strategies.strategy import Prune
from sparsify.stream.version import TrainedEntries, Version
from sparsify.training.engine import Engine
from sparsify.training.plan import warn_of_unheld
from sparsify.training.weights import check_trained

UNKNOWN_VALUES = (
    "`sparse_values` has values for entries that this model does not know. It was copied or averaged from another "
    "model, whose buffers were not: for own, other in zip(ema.buffers(), model.buffers()): own.copy_(other). Or noise "
    "was added to all of its gradient: add it to the first unmasked numbers alone."
)
AVERAGED_BASE = (
    "`sparse_base` was written to, and is no longer bit-equal to the base: an average of equal numbers is rounded. In "
    "an EMA of your own average `sparse_values` alone, and copy the buffers: own.copy_(other)."
)
NOT_FINITE = (
    "`sparse_values` is not finite: the loss or its gradient overflowed, and the optimizer stepped by it. Go on from "
    "an earlier state, and clip gradients, scale the loss (GradScaler), or lower the learning rate."
)
CAST = (
    "the model was cast from {before} to {now} after sparsify(), as by a Trainer's bf16_full_eval: the delta is of the "
    "base in that dtype, and trained values are rounded to it. Make the delta before evaluate(), or from a checkpoint."
)
_LIBRARIES = ("sparsify", "torch", "safetensors", "transformers", "peft")  # a delta's config has their versions


class Exporter:
    """A function that gives the present version of a model, which ``model`` is or wraps, for the user's ``call``."""

    def __init__(self, engine: Engine, model: nn.Module, call: str = "SparseDelta.from_model()") -> None:
        self._engine, self._call = engine, call
        self._key: object = None  # as long as it is the same, so are the entries and the config
        self._entries: dict[ModelTensor, TrainedEntries] = {}  # those exported as entries, with the base's values
        self._config: dict[str, Any] = {}
        warn_of_unheld(engine, model, stacklevel=4)
        known = engine.weights.base_digests
        if cast := [t for t in engine.tensors if t.name in known and known[t.name][0] != t.dtype]:
            warnings.warn(CAST.format(before=known[cast[0].name][0], now=cast[0].dtype), stacklevel=3)

    def delta(self, budget: int | None = None) -> DeltaParts:
        """The parts of a :class:`sparsify.SparseDelta`, of the first ``budget`` entries or all."""
        engine = self._engine
        engine.catch_up(by_value=True)
        trained = [t for t in engine.tensors if t.count and engine.entries.base_was_written]
        if any(engine.weights.has_other_base(tensor) for tensor in trained):
            raise SparsifyError(f"{self._call}: {AVERAGED_BASE}")
        version = self(budget)
        return {name: _delta(name, own) for name, own in version.tensors.items()}, version.whole, version.config

    @torch.no_grad()
    def __call__(self, budget: int | None = None) -> Version:
        """Exports the first ``budget`` entries in order of unmasking, by default all, and what is stored whole."""
        engine = self._engine
        if vars(engine.root).get(ENGINE) is not engine:
            raise SparsifyError(f"{self._call}: the model was desparsified since; make a new DeltaPublisher.")
        prepare(engine, self._call)
        if budget is None:
            budget = engine.unmasked
        elif isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget <= engine.unmasked:
            raise SparsifyError(f"budget={budget!r}; expected an int, 1 to {engine.unmasked:,}, the entries so far.")
        parameters = dict(engine.root.named_parameters())
        there = {id(parameter) for parameter in parameters.values()}  # PEFT's adapters may have been deleted
        masked = [tensor for tensor in engine.tensors if id(tensor.parameter) in there]
        names = stored_whole(engine)
        as_whole = [tensor for tensor in masked if tensor.name in names]
        self._find_entries([tensor for tensor in masked if tensor.name not in names], as_whole, budget)
        whole = {n: full_values(parameters[n]) for n in (*engine.dense_names, *engine.new_names) if n in parameters}
        whole |= changed_buffers(engine) | {tensor.name: _as_of(tensor, budget) for tensor in as_whole}
        whole = {stored_name(name, self._config): own_copy(tensor) for name, tensor in whole.items()}
        return Version(dict(sorted(self._export(budget).items())), whole, {**self._config, "steps_done": engine.step})

    def _find_entries(self, masked: Sequence[ModelTensor], as_whole: Iterable[ModelTensor], budget: int) -> None:
        """Copies the entries where they are others than at the last call."""
        engine = self._engine
        dtypes = [(tensor.number, tensor.dtype) for tensor in masked]
        key = engine.entries.generation, engine.unmasked, engine.steps, budget, dtypes
        if key == self._key:
            return
        slots, ids = engine.entries.by_tensor
        flat = [own_copy(part) for part in (slots, ids, engine.entries.base.index_select(0, slots))]
        parts = list(zip(*(part.split(engine.entries.counts) for part in flat), strict=True))
        self._entries = {}
        for tensor in masked:
            among_first = parts[tensor.number][0] < budget
            ids, base = (part[among_first] for part in parts[tensor.number][1:])
            indices = ids - tensor.offset
            if indices.numel():
                if isinstance(tensor, QuantizedTensor):
                    tensor.check_not_cast()
                base, kind = base.to(tensor.dtype), "replace" if tensor.scheme is None else "add"
                sort = tuple(tensor.shape_now), tensor.dtype, kind, tensor.scheme
                self._entries[tensor] = TrainedEntries(*sort, indices, base, base)
        in_whole = sum(int((tensor.slots < budget).sum()) for tensor in as_whole)
        versions = {name: str(sys.modules[name].__version__) for name in _LIBRARIES if name in sys.modules}
        self._config = {**describe(engine), "budget": budget, "steps": engine.steps, "versions": versions}
        self._config |= {ENTRIES_IN_WHOLE_KEY: in_whole} if in_whole else {}
        self._key = key

    def _export(self, budget: int) -> dict[str, TrainedEntries]:
        engine = self._engine
        # without asking the other ranks, and faster than reading all weights
        are_sums = engine.weights.are_sums or engine.sharded
        sums = engine.entries.effective().split(engine.entries.counts) if are_sums else None
        values = []
        for tensor in self._entries:
            if tensor.is_quantized:
                own = tensor.delta
            else:
                own = tensor.take(tensor.indices) if sums is None else sums[tensor.number].to(tensor.dtype)
            values.append(own if budget == engine.unmasked else own[tensor.slots.to(own.device) < budget])
        found: dict[str, TrainedEntries] = {}
        for (tensor, entries), own in zip(self._entries.items(), _on_host(values), strict=True):
            name, entries = plain_name(tensor.name), entries._replace(values=own)
            if not own.isfinite().all():
                _delta(name, entries)
            if name in found:
                raise SparsifyError(f"two trained tensors are called `{name}`: rename one of the modules.")
            found[name] = entries
        return found


def _delta(name: str, entries: TrainedEntries) -> TensorDelta:
    try:
        return entries.delta()
    except SparsifyError as error:
        raise SparsifyError(f"tensor `{name}` cannot go into a delta: {error}") from error


def _on_host(parts: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors (k,) to the CPU, all of a dtype and device at once."""
    found: dict[int, Tensor] = {}
    for sort in {(part.dtype, part.device) for part in parts}:
        group = {n: part for n, part in enumerate(parts) if (part.dtype, part.device) == sort}
        copies = own_copy(torch.cat(list(group.values()))).split([part.numel() for part in group.values()])
        found.update(zip(group, copies, strict=True))
    return [found[number] for number in range(len(parts))]


def _as_of(tensor: MaskedTensor, budget: int) -> Tensor:
    """The trained tensor, with its base values at all but the first ``budget`` entries of the model."""
    later = tensor.slots >= budget
    weight = full_values(tensor.parameter).clone(memory_format=torch.contiguous_format)
    return put(weight, tensor.indices[later], tensor.base[later].to(weight.dtype))


def stored_whole(engine: Engine) -> dict[str, None]:
    """Names of the parameters that a delta stores whole: the dense ones, new ones, and those with pruned zeros."""
    selection = engine.strategy.selection
    pruned = [t.name for t in engine.tensors if isinstance(selection, Prune) and selection.removes_from(t.shape_now)]
    return dict.fromkeys((*engine.dense_names, *engine.new_names, *pruned))


def prepare(engine: Engine, call: str) -> None:
    """Brings the trained weights in place for ``call``; raises where the flat delta makes no sense."""
    check_trained(engine, call)
    engine.refresh()
    free = engine.values.detach()[engine.unmasked :]
    if bool(free.any()):
        raise SparsifyError(f"{call}: {UNKNOWN_VALUES if bool(free.isfinite().all()) else NOT_FINITE}")
    reshard(engine.root)


def changed_buffers(engine: Engine) -> dict[str, Tensor]:
    """The buffers that training changed (BatchNorm's statistics), by their names in the model."""
    known, buffers = engine.buffer_digests, persistent_buffers(engine.root)
    return {name: buffer for name, buffer in buffers.items() if name in known and known[name] != digest(buffer)}


def describe(engine: Engine) -> dict[str, Any]:
    """The part of a delta's config that stays the same in training, and in all copies of the model."""
    model = plain_model(engine.root)
    model_config = getattr(model, "config", None)
    base = getattr(model_config, "_name_or_path", None) or None  # a folder's relative path could be taken for an id
    not_the_bases = {*engine.new_names, *engine.dense_names, VALUES}
    of_base = (parameter for name, parameter in engine.root.named_parameters() if name not in not_the_bases)
    return {
        "base_model_name_or_path": str(engine.folder / base) if base and (engine.folder / base).is_dir() else base,
        "base_model_revision": getattr(model_config, "_commit_hash", None),
        "base_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in of_base if p.is_floating_point()}),
        "architecture": type(model).__name__.removeprefix("FSDP" if is_fully_sharded(model) else ""),
        "model_config": _head_config(model_config) if engine.dense_names or engine.new_names else {},
        "strategy": engine.strategy.to_dict(),
        "schedule": asdict(engine.policy.schedule),
        **record_extensions(engine.root, (*not_the_bases, *(tensor.name for tensor in engine.tensors))),
    }


def record_of(engine: Engine) -> dict[str, Any]:
    """What :meth:`sparsify.SparseDelta.from_checkpoint` needs besides the entries, in JSON types."""
    parameters = dict(engine.root.named_parameters())
    there = {id(parameter) for parameter in parameters.values()}  # PEFT's adapters may have been deleted
    names = {dtype: name.ljust(4) for name, dtype in DTYPES.items()}
    held = [(t, names.get(t.dtype) if id(t.parameter) in there else None) for t in engine.tensors]
    return {
        "config": describe(engine),
        "tensors": [(t.name, list(t.shape), dtype, t.scheme if dtype else None) for t, dtype in held],
        "whole": [name for name in stored_whole(engine) if name in parameters],
        "buffers": dict(engine.buffer_digests),
    }


def _head_config(model_config: Any) -> dict[str, Any]:
    """Settings of a transformers model's new head, which the base's own config lacks."""
    labels = getattr(model_config, "id2label", None)
    if not isinstance(labels, dict) or not labels:
        return {}
    head: dict[str, Any] = {"num_labels": len(labels)}
    if any(label != f"LABEL_{index}" for index, label in labels.items()):
        head["id2label"] = {str(index): str(label) for index, label in labels.items()}
    if problem_type := getattr(model_config, "problem_type", None):
        head["problem_type"] = str(problem_type)
    return head
