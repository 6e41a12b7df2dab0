"""The effective values: base + delta in the weights, before anybody may read them.

after a step, or a load            :meth:`~EffectiveWeights.write`: O(budget)
before a forward, a state dict     :meth:`~EffectiveWeights.refresh`, should the flat delta have been written to
                                   behind the optimizer's back
``with base_weights(model)``       the pretrained values, for a while
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from sparsify.common.devices import runs_ahead
from sparsify.common.interrupts import uninterrupted
from sparsify.common.ranks import Ranks
from sparsify.common.shards import is_fully_sharded, is_shard, reshard
from sparsify.errors import SparsifyError
from sparsify.kernels.scatter import scatter
from sparsify.masked.index_buffers import IndexBuffers
from sparsify.masked.tensor import MaskedTensor
from sparsify.training.sharding import check_root

Model = TypeVar("Model", bound=nn.Module)

OFFLOADED = (
    "`{name}` is on the meta device: it was offloaded after sparsify(), as accelerate's cpu_offload(), disk_offload() "
    "and dispatch_model() do, and its trained values would be lost. Take that back "
    "(accelerate.hooks.remove_hook_from_submodules(model)); offload before sparsify(), and only what is not trained."
)


class Engine(Protocol):
    """What has a flat delta."""

    root: nn.Module
    tensors: list[MaskedTensor]
    buffers: IndexBuffers
    ranks: Ranks

    @property
    def values(self) -> Tensor:
        """(capacity,) the flat delta."""


class BaseWeights(AbstractContextManager[Model]):
    """A model whose weights are the pretrained ones inside a ``with`` block, however the block ends.

    Args:
        weights: of the model.
        model: what the block gets.
    """

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
    """The weights of a sparsified model at its unmasked entries.

    Args:
        engine: of the model.

    Attributes:
        are_base: whether they are the pretrained ones for now.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.are_base = False
        self._written: Tensor | None = None  # the flat delta that they were written from
        self._written_dtype: torch.dtype | None = None

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 has them."""
        return is_fully_sharded(self._engine.root)

    @torch.no_grad()
    def write(self, *, but: Set[MaskedTensor] = frozenset()) -> None:
        """Writes base + delta into the weights, those of some tensors excepted."""
        engine = self._engine
        check_root(engine)
        self.reshard()
        self._written = None  # should this be cut off, it is done again
        values, base = engine.values.detach(), engine.buffers.all_base
        effective = base.to(torch.promote_types(base.dtype, values.dtype)) + values[engine.buffers.all_slots]
        # an optimizer step that is compiled traces this, and an address means nothing to a graph
        traced = torch.compiler.is_dynamo_compiling()
        if not but and not traced and all(_can_scatter(tensor, effective.device) for tensor in engine.tensors):
            weights, counts = zip(*((tensor.parameter, tensor.count) for tensor in engine.tensors), strict=True)
            scatter(weights, counts, engine.buffers.all_indices, effective)
        else:
            for tensor, own in zip(engine.tensors, engine.buffers.split(effective), strict=True):
                if own.numel() and tensor not in but:
                    tensor.write(own)
        self._written, self._written_dtype = values.clone(), engine.tensors[0].dtype

    @property
    def are_in_step(self) -> bool:
        """Whether the flat delta and the weights' dtype are those that they were written from.

        The values themselves are compared: a version counter misses writes through ``.data``.
        """
        written, values = self._written, self._engine.values.detach()
        return (
            written is not None
            and (written.device, written.dtype) == (values.device, values.dtype)
            and (self._written_dtype == self._engine.tensors[0].dtype or self.sharded)
            and torch.equal(written, values)
        )

    def mark_stale(self) -> None:
        """Has them written before they are used next, whether the flat delta changes or not."""
        self._written = None

    def refresh(self) -> None:
        """Writes the weights if they are not in step with the flat delta."""
        if not self.are_base and not self.are_in_step:
            self.write()

    def freeze(self) -> None:
        """They require no grad, though PEFT sets it back as it switches adapters, and are at hand."""
        for tensor in self._engine.tensors:
            parameter = tensor.parameter
            if parameter.is_meta:
                raise SparsifyError(OFFLOADED.format(name=tensor.name))
            if parameter.requires_grad and parameter.is_leaf:
                parameter.requires_grad_(False)

    def write_base(self) -> None:
        """Puts the pretrained values into the weights."""
        self.reshard()
        for tensor in self._engine.tensors:
            if tensor.count:
                tensor.write_base()

    def make_base(self) -> list[Tensor]:
        """From now on they are the pretrained ones; no graph that was built before is disturbed.

        Returns:
            The trained values of each tensor, for :meth:`make_trained`.
        """
        self.refresh()
        self.reshard()
        trained = [tensor.own_effective for tensor in self._engine.tensors]
        self.are_base = True
        self.write_base()
        return trained

    def make_trained(self, trained: list[Tensor]) -> None:
        """They are the trained ones again."""
        self.reshard()
        for tensor, values in zip(self._engine.tensors, trained, strict=True):
            tensor.write_unseen(values)
        self.are_base = False

    def reshard(self) -> None:
        """Sharded ones are in their shards, where they may be read and written."""
        if self.sharded:
            reshard(self._engine.root)

    def check_trained(self, call: str) -> None:
        """Raises where they are the pretrained ones for now, and ``call`` needs the trained ones."""
        if self.are_base:
            raise SparsifyError(f"{call} inside base_weights(): the weights are the pretrained ones; leave it first.")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_written": None, "are_base": False}  # a copy writes them before they are used


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
