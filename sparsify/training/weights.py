"""The effective values: base + delta in the weights, before anything reads them.

after a step, or a load            :meth:`~EffectiveWeights.write`: O(budget)
before a forward, a state dict     :meth:`~EffectiveWeights.refresh`, in case the flat delta was written to by anything
                                   but an optimizer step
``with base_weights(model)``       the pretrained values, for a while
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from sparsify.common.devices import runs_ahead, upload
from sparsify.common.interrupts import uninterrupted
from sparsify.common.shards import is_shard, reshard
from sparsify.errors import SparsifyError
from sparsify.kernels.scatter import scatter
from sparsify.masked.tensor import MaskedTensor
from sparsify.training.sharding import check_root, read_base

if TYPE_CHECKING:
    from sparsify.training.engine import Engine

Model = TypeVar("Model", bound=nn.Module)

OFFLOADED = (
    "`{name}` is on the meta device: it was offloaded after sparsify(), as accelerate's cpu_offload(), disk_offload() "
    "and dispatch_model() do, and its trained values would be lost. Take that back "
    "(accelerate.hooks.remove_hook_from_submodules(model)); offload before sparsify(), and only what is not trained."
)


class BaseWeights(AbstractContextManager[Model]):
    """A model whose weights are the pretrained ones inside a ``with`` block, however the block ends."""

    _trained: list[Tensor] | None = None
    _entered = 0

    def __init__(self, weights: EffectiveWeights, model: Model) -> None:
        self._weights = weights
        self._model = model

    def __enter__(self) -> Model:
        try:
            with uninterrupted():
                if not self._weights.are_base:
                    self._trained = self._weights.make_base()
                self._entered += 1
        except BaseException:
            self._leave()
            raise
        return self._model

    def __exit__(self, *error: object) -> None:
        outer = self._entered - 1
        try:
            self._leave(outer)
        except KeyboardInterrupt:  # before it had begun, or after it had ended
            self._leave(outer)
            raise

    def __del__(self) -> None:
        if self._trained is not None:  # an interrupt came between the block and its exit
            self._leave()

    def _leave(self, entered: int = 0) -> None:
        with uninterrupted():
            self._entered = entered
            if self._trained is not None and not entered:
                self._weights.make_trained(self._trained)
                self._trained = None


class EffectiveWeights:
    """The weights of an engine's model at its unmasked entries."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.are_base = False  # whether they are the pretrained ones for now
        self._written: Tensor | None = None  # the flat delta that they were written from
        self._written_dtype: torch.dtype | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_written": None, "are_base": False}  # a copy writes them before they are used

    @property
    def are_in_step(self) -> bool:
        """Whether the flat delta and the weights' dtype are those that they were written from.

        The values themselves are compared: a version counter misses writes through ``.data``.
        """
        written, values = self._written, self._engine.values.detach()
        return (
            written is not None
            and (written.device, written.dtype) == (values.device, values.dtype)
            and (self._written_dtype == self._engine.tensors[0].dtype or self._engine.sharded)
            and torch.equal(written, values)
        )

    @torch.no_grad()
    def write(self, *, but: Set[MaskedTensor] = frozenset()) -> None:
        """Writes base + delta into the weights, except into those of some tensors."""
        engine, buffers = self._engine, self._engine.buffers
        check_root(engine)
        self.reshard()
        self._written = None  # an interrupted write is repeated
        values, base = engine.values.detach(), buffers.base()
        effective = base.to(torch.promote_types(base.dtype, values.dtype)) + values[buffers.slots()]
        # an optimizer step that is compiled traces this, and an address means nothing to a graph
        traced = torch.compiler.is_dynamo_compiling()
        if not but and not traced and all(_can_scatter(tensor, effective.device) for tensor in engine.tensors):
            weights, counts = zip(*((tensor.parameter, tensor.count) for tensor in engine.tensors), strict=True)
            scatter(weights, counts, buffers.indices(), effective)
        else:
            for tensor, own in zip(engine.tensors, buffers.split(effective), strict=True):
                if own.numel() and tensor not in but:
                    tensor.write(own)
        self._written, self._written_dtype = values.clone(), engine.tensors[0].dtype

    def refresh(self) -> None:
        """Writes the weights if they are not in step with the flat delta."""
        if not self.are_base and not self.are_in_step:
            self.write()

    def mark_stale(self) -> None:
        """Has them written before they are used next, whether the flat delta changes or not."""
        self._written = None

    def append(self, ids: Tensor) -> None:
        """Adds entries (n,), global ids in order of unmasking, to the index buffers, with the weights as their base."""
        engine = self._engine
        tensors, buffers, values = engine.tensors, engine.buffers, engine.values.detach()
        first = buffers.total  # of the free slots
        ids, order = ids.sort()
        slots = first + order
        ends = upload([tensor.offset + tensor.numel for tensor in tensors], ids.device)
        sizes = torch.searchsorted(ids, ends).diff(prepend=ids.new_zeros(1)).tolist()
        indices = [own - tensor.offset for tensor, own in zip(tensors, ids.split(sizes), strict=True)]
        if engine.sharded:
            buffers.append(sizes, torch.cat(indices), slots, values.new_zeros(ids.numel()))
            torch.autograd.Variable._execution_engine.queue_callback(partial(read_base, engine, first))
            return
        base = [
            tensor.take(own.to(tensor.parameter.device)).to(values)
            for tensor, own in zip(tensors, indices, strict=True)
            if own.numel()
        ]
        buffers.append(sizes, torch.cat(indices), slots, torch.cat(base) if base else values[:0])

    def freeze(self) -> None:
        """Sets ``requires_grad`` to False again, which PEFT sets to True as it switches adapters."""
        for tensor in self._engine.tensors:
            parameter = tensor.parameter
            if parameter.is_meta:
                raise SparsifyError(OFFLOADED.format(name=tensor.name))
            if parameter.requires_grad and parameter.is_leaf:
                parameter.requires_grad_(False)

    def write_base(self) -> None:
        """Writes the pretrained values into the weights."""
        self.reshard()
        for tensor in self._engine.tensors:
            if tensor.count:
                tensor.write_base()

    def make_base(self) -> list[Tensor]:
        """Makes them the pretrained ones, without harm to earlier graphs; returns the trained ones, by tensor."""
        self.refresh()
        self.reshard()
        trained = [tensor.own_effective for tensor in self._engine.tensors]
        self.are_base = True
        self.write_base()
        return trained

    def make_trained(self, trained: list[Tensor]) -> None:
        """Makes them the trained ones again."""
        self.reshard()
        for tensor, values in zip(self._engine.tensors, trained, strict=True):
            tensor.write_unseen(values)
        self.are_base = False

    def reshard(self) -> None:
        """Returns gathered weights to their shards, where they may be read and written."""
        if self._engine.sharded:
            reshard(self._engine.root)

    def check_trained(self, call: str) -> None:
        """Raises where they are the pretrained ones for now, and ``call`` needs the trained ones."""
        if self.are_base:
            raise SparsifyError(f"{call} inside base_weights(): the weights are the pretrained ones; leave it first.")


def _can_scatter(tensor: MaskedTensor, device: torch.device) -> bool:
    """Whether a weight can be written to together with others, by its address."""
    parameter = tensor.parameter
    return (
        runs_ahead(device)
        and parameter.device == device
        and parameter.is_contiguous()
        and not tensor.packed
        and not is_shard(parameter)
    )
