"""Masked tensors of a real model: sharded over ranks, some of them, and known to compiled graphs by a number."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsify.common import shards
from sparsify.common.shards import Block, is_shard
from sparsify.core.devices import put, upload
from sparsify.core.gradients import DenseGradient, Gradient, Product, as_matrix, tap_gradient
from sparsify.core.tensor import MaskedTensor

PARTIAL = "ReplicatedWithGradAllReduce"  # transformers' tensor-parallel style of norms within heads
_HANDLES = itertools.count()
_BY_HANDLE: weakref.WeakValueDictionary[int, ModelTensor] = weakref.WeakValueDictionary()


class BlockGradient(DenseGradient):
    """The gradient of what this rank holds of a tensor-parallel weight; flat indices are those of the whole weight.

    What is taken is multiplied by the number of ``shards``, and zero where another rank holds it: so the mean over all
    ranks is the gradient, as it is of the weights that each of them has.
    """

    def __init__(self, values: Tensor, block: Block, shards: int) -> None:
        super().__init__(values, owned=False)
        self.block, self._shards, self.covers_all = block, shards, False

    def take(self, indices: Tensor) -> Tensor:
        taken = super().take(indices)
        return taken.to(torch.promote_types(taken.dtype, torch.float32)) * self._shards

    def _locate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.block.locate(indices)


class ModelTensor(MaskedTensor):
    """A masked tensor whose parameter may be sharded over ranks."""

    dormant = False  # whether it has no unmasked entry and never will
    is_frozen = False  # by requires_grad_(False), after sparsify()
    scheme: ClassVar[str | None] = None  # how the parameter is quantized

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_parallel = is_shard(self.parameter)  # whether it is a DTensor of a tensor-parallel model
        placements = self.parameter.placements if self.is_parallel else ()
        self.is_partial = shards.parallel_style(self.owner) == PARTIAL  # each rank's gradient is of its heads alone
        # ranks that its entries are on, each on one
        self.shards = self.parameter.device_mesh.size() if any(not each.is_replicate() for each in placements) else 1
        self.handle = self._new_handle()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.handle = self._new_handle()

    def _new_handle(self) -> Tensor:
        """Makes the tensor's number () int64, an input of compiled graphs: layers with one code share one graph."""
        number = next(_HANDLES)
        _BY_HANDLE[number] = self
        return torch.tensor(number, device="cpu")

    @property
    def num_candidates(self) -> int:
        """Number of entries that may be unmasked."""
        if self.rows is not None:
            return len(self.rows) * self.shape[-1]
        return self.numel - (0 if self.frozen_row is None else self.shape[-1])

    @property
    def never_candidates(self) -> Tensor:
        """Flat indices, ascending, of the entries in the frozen row, or in the rows that are trained anyway."""
        if self.rows is None:
            return super().never_candidates
        rows = upload(self.rows, self.parameter.device)
        return (rows[:, None] * self.shape[-1] + torch.arange(self.shape[-1], device=rows.device)).flatten()

    def of_rows(self, gradient: Gradient) -> Gradient:
        """The part of a gradient that is of the trained ``rows``."""
        assert self.rows is not None
        rows = upload(self.rows, gradient.device)
        if isinstance(gradient, Product) and gradient.looked_up is None:
            return DenseGradient(gradient.left[:, rows].t() @ gradient.right, rows)
        return DenseGradient(gradient.take(self.never_candidates).view(rows.numel(), -1), rows)

    def gradient(self, grad: Any) -> Gradient:
        if not is_shard(grad):
            return tap_gradient(grad * self.collector.parallel if self.is_partial else grad)
        local = grad.redistribute(placements=self.parameter.placements).to_local()  # sums what ranks have terms of
        if self.shards == 1:
            return tap_gradient(local)
        return BlockGradient(as_matrix(local), shards.block_of(self.parameter), self.shards)

    @property
    def local(self) -> Tensor:
        """(n,) the effective values that this rank holds, with those that ``fully_shard`` has dealt to its copies."""
        from torch.distributed.tensor import Replicate

        placements = [*[Replicate() for _ in self.parameter.placements[1:]], self.parameter.placements[-1]]
        return self.parameter.detach().redistribute(placements=placements).to_local().reshape(-1)

    @property
    def weight(self) -> Tensor:
        """The effective values, detached; gathered from all ranks where they are sharded."""
        return shards.full_values(self.parameter)

    @property
    def base_weight(self) -> Tensor:
        """The pretrained values; a new tensor where there are entries."""
        weight = self.weight
        return put(weight.clone(), self.indices, self.base.to(weight.dtype)) if self.count else weight

    def take(self, indices: Tensor) -> Tensor:
        return shards.read_entries(self.parameter, indices) if is_shard(self.parameter) else super().take(indices)

    def write(self, values: Tensor) -> None:
        shards.write_own_entries(self.parameter.detach(), self.indices, values)

    def write_without_version_bump(self, values: Tensor) -> None:
        """Writes values (k,) through ``.data``, so that backward through an earlier graph raises no error."""
        shards.write_own_entries(self.parameter.data, self.indices, values)


def are_plain(tensors: Sequence[MaskedTensor]) -> bool:
    """Whether all parameters are ordinary tensors: neither quantized nor sharded."""
    kinds = {(type(tensor.parameter), tensor.is_quantized) for tensor in tensors}
    return not any(is_quantized or is_shard(kind) for kind, is_quantized in kinds)


def matrix_shape(tensor: MaskedTensor) -> tuple[int, int]:
    """That of a tensor's ``matrix``, which a sharded weight would be gathered for."""
    cols = tensor.shape[-1] if tensor.shape else 1
    return tensor.numel // max(1, cols), cols


def tensor_of(handle: Tensor) -> ModelTensor:
    """Returns the living masked tensor of a handle () int64."""
    return _BY_HANDLE[int(handle)]
