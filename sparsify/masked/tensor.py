"""Masked tensors of a real model: sharded by FSDP2 at times, and known to compiled graphs by a number."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsify.common.shards import full_values, is_shard, read_entries, read_own_entries, write_own_entries
from sparsify.core.devices import put, upload
from sparsify.core.gradients import DenseGradient, Gradient, Product
from sparsify.core.tensor import MaskedTensor

_HANDLES = itertools.count()
_BY_HANDLE: weakref.WeakValueDictionary[int, ModelTensor] = weakref.WeakValueDictionary()


class ModelTensor(MaskedTensor):
    """A masked tensor whose parameter may be sharded over ranks."""

    dormant = False  # whether it has no unmasked entry and never will
    scheme: ClassVar[str | None] = None  # how the parameter is quantized

    def __post_init__(self) -> None:
        super().__post_init__()
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

    @property
    def weight(self) -> Tensor:
        """The effective values, detached; gathered from all ranks where they are sharded."""
        return full_values(self.parameter)

    @property
    def base_weight(self) -> Tensor:
        """The pretrained values; a new tensor where there are entries."""
        weight = self.weight
        return put(weight.clone(), self.indices, self.base.to(weight.dtype)) if self.count else weight

    @property
    def own_effective(self) -> Tensor:
        """(k,) the current values at the unmasked entries, zeros at those that another rank holds."""
        indices = self.indices
        return read_own_entries(self.parameter, indices) if is_shard(self.parameter) else self.take(indices)

    def take(self, indices: Tensor) -> Tensor:
        return read_entries(self.parameter, indices) if is_shard(self.parameter) else super().take(indices)

    def write(self, values: Tensor) -> None:
        parameter = self.parameter.detach()
        write_own_entries(parameter, self.indices, values.to(parameter.device, parameter.dtype))

    def write_base(self) -> None:
        """Writes the pretrained values as :meth:`write_without_version_bump` does."""
        self.write_without_version_bump(self.base)

    def write_without_version_bump(self, values: Tensor) -> None:
        """Writes values (k,) through ``.data``, so that backward through an earlier graph raises no error."""
        write_own_entries(self.parameter.data, self.indices, values.to(self.parameter.device, self.parameter.dtype))


def matrix_shape(tensor: MaskedTensor) -> tuple[int, int]:
    """That of a tensor's ``matrix``, which a sharded weight would be gathered for."""
    cols = tensor.shape[-1] if tensor.shape else 1
    return tensor.numel // max(1, cols), cols


def tensor_of(handle: Tensor) -> ModelTensor:
    """Returns the living masked tensor of a handle () int64."""
    return _BY_HANDLE[int(handle)]
