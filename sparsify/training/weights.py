"""The effective values: base + delta in the weights, before anything reads them.

after a step, or a load            :meth:`~EffectiveWeights.write`: O(budget)
before a forward, a state dict     :meth:`~EffectiveWeights.refresh`, in case the flat delta was written to by anything
                                   but an optimizer step
``with base_weights(model)``       the pretrained values, for a while
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from sparsify.common.shards import is_shard, reshard
from sparsify.core.devices import runs_ahead, upload
from sparsify.core.interrupts import uninterrupted
from sparsify.core.tensor import MaskedTensor, count_by_tensor
from sparsify.errors import SparsifyError
from sparsify.kernels import has_triton
from sparsify.kernels.scatter import scatter
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
        self.are_sums = False  # whether all of them are base + delta, rounded, to the bit
        self._written: Tensor | None = None  # the flat delta that they were written from
        self._written_dtype: torch.dtype | None = None
        self._version = 0  # of the flat delta then
        self._addresses: list[int] | None = None  # of the weights, where they were written by these

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
        engine = self._engine
        check_root(engine)
        self.reshard()
        self._written = None  # an interrupted write is repeated
        # an optimizer step that is compiled traces this, and an address means nothing to a graph
        traced = torch.compiler.is_dynamo_compiling()
        values = engine.values.detach()
        if not but and not traced and runs_ahead(values.device) and all(map(_can_scatter, engine.tensors)):
            self._scatter(seen=True)
            self._addresses = self._addresses_now()
        else:
            for tensor, own in zip(engine.tensors, engine.buffers.split(self._effective()), strict=True):
                if own.numel() and tensor not in but:
                    tensor.write(own)
            self._addresses = None
        self.are_sums = not but
        self._written, self._written_dtype = values.clone(), engine.tensors[0].dtype
        self._version = values._version

    def refresh(self) -> None:
        """Writes the weights if they are not in step with the flat delta, or where that is faster than to compare."""
        if self.are_base:
            return
        if self._may_write_again():
            self._scatter(seen=False)
        elif not self.are_in_step:
            self.write()

    def _effective(self) -> Tensor:
        """Base + delta of all entries (k,)."""
        base, values = self._engine.buffers.base(), self._engine.values.detach()
        deltas = values.index_select(0, self._engine.buffers.slots().to(values.device))  # faster than values[slots]
        return base.to(torch.promote_types(base.dtype, values.dtype)) + deltas

    @torch.no_grad()
    def _scatter(self, *, seen: bool) -> None:
        """Writes them into all weights in one launch; whether autograd's version counters see it."""
        tensors, indices = self._engine.tensors, self._engine.buffers.indices()
        scatter([tensor.parameter for tensor in tensors], [t.count for t in tensors], indices, self._effective(), seen)

    def _may_write_again(self) -> bool:
        """Whether the weights were last written by address, and nothing shows that they or the flat delta have changed.

        A flat delta that was written to through ``.data`` shows in its values alone, for which the host would wait.
        """
        written, values = self._written, self._engine.values.detach()
        return (
            written is not None
            and self._addresses is not None
            and (written.device, written.dtype, self._version) == (values.device, values.dtype, values._version)
            and self._addresses == self._addresses_now()
        )

    def _addresses_now(self) -> list[int]:
        return [tensor.parameter.data_ptr() for tensor in self._engine.tensors]

    def mark_stale(self) -> None:
        """Has them written before they are used next, whether the flat delta changes or not."""
        self._written = None

    def append(self, ids: Tensor, weights: Tensor | None = None, sizes: Sequence[int] | None = None) -> None:
        """Adds entries to the index buffers.

        Args:
            ids: (n,) int64 global ids, in order of unmasking.
            weights: (n,) what the weights hold there: their base values; read where they are not known.
            sizes: how many of them each tensor has; counted, and waited for, where it is not known.
        """
        engine = self._engine
        self.are_sums = False  # -0.0 stays what it is until they are written
        tensors, buffers, values = engine.tensors, engine.buffers, engine.values.detach()
        sizes = count_by_tensor(ids, tensors).tolist() if sizes is None else sizes
        ids, order = ids.sort()
        slots = buffers.total + order  # the next free ones
        offsets = upload([tensor.offset for tensor in tensors], ids.device)
        indices = ids - offsets.repeat_interleave(upload(sizes, ids.device), output_size=ids.numel())
        if engine.sharded:
            first = buffers.total
            buffers.append(sizes, indices, slots, values.new_zeros(ids.numel()))
            torch.autograd.Variable._execution_engine.queue_callback(partial(read_base, engine, first))
            return
        if weights is None:
            parts = zip(tensors, indices.split(list(sizes)), strict=True)
            taken = [tensor.take(own.to(tensor.parameter.device)).to(values) for tensor, own in parts if own.numel()]
            base = torch.cat(taken) if taken else values[:0]
        else:
            base = weights[order]
        buffers.append(sizes, indices, slots, base)

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


def _can_scatter(tensor: MaskedTensor) -> bool:
    """Whether a weight can be written to together with others, by its address."""
    parameter = tensor.parameter
    on_gpu = runs_ahead(parameter.device) and has_triton(parameter.device)
    return on_gpu and parameter.is_contiguous() and not tensor.packed and not is_shard(parameter)
