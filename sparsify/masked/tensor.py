"""One tensor parameter that is trained at some of its entries, and the gradient it gets in one node.

A :class:`MaskedTensor` owns no data. Its indices, slots and base values are its part of the root's index buffers, so
that ``.to()``, ``state_dict()`` and ``deepcopy`` see them; here they have their meaning:

* ``indices`` (k,) int64: flat, row-major positions of the unmasked entries, in order of unmasking;
* ``slots``   (k,) int64: where each entry's delta lives in the root's flat vector;
* ``base``    (k,) the pretrained values of these entries, in the weight's dtype.

The parameter itself always holds the effective values: base + delta at the indices, the pretrained ones elsewhere.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sparsify.common.shards import is_shard, put_own, take, take_own, whole
from sparsify.errors import SparsifyError
from sparsify.masked.handles import new_handle
from sparsify.masked.index_buffers import IndexBuffers

CAST_ENTRIES = 1 << 22  # of short gradients, that are cast to a longer type at once


class Gradient:
    """The gradient of one weight as a node saw it: every row of the weight, or only the rows that it used.

    Args:
        values: (n, cols).
        rows: (n,) int64, ascending: the weight's rows that ``values`` are about; ``None`` for all rows in order. The
            last row may come again, with values of zero.
        owned: whether ``values`` may be written to; autograd shares some gradients between nodes.
        dtype: in which the gradient came, where ``values`` are sums in a longer one.
    """

    def __init__(
        self, values: Tensor, rows: Tensor | None = None, *, owned: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        self.values = values
        self.rows = rows
        self._owned = owned
        self._dtype = dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def numel(self) -> int:
        """Number of entries that may have a gradient."""
        return self.values.numel()

    def dense(self) -> Gradient:
        """The gradient with its values at hand."""
        return self

    def take(self, indices: Tensor) -> Tensor:
        """The gradient (k,) at flat indices (k,) of the weight; zero in rows that were not used."""
        if self.rows is None:
            return self.values.take(indices)
        if not self.rows.numel():
            return self.values.new_zeros(indices.shape)
        at, used = self._locate(indices)
        return torch.where(used, self.values.take(at), 0)

    def own(self, dtype: torch.dtype | None = None) -> Gradient:
        """The gradient with values that nobody else writes to, or reads, in their dtype or another."""
        dtype = self.values.dtype if dtype is None else dtype
        if not self._owned or not self.values.is_contiguous() or self.values.dtype != dtype:
            self.values = self.values.to(dtype, copy=True, memory_format=torch.contiguous_format)
            self._owned = True
        return self

    def clear(self, indices: Tensor) -> None:
        """Sets the gradient at flat indices (k,) of the weight to zero."""
        self.own()
        if self.rows is not None:
            if not self.rows.numel():
                return
            at, used = self._locate(indices)
            cleared = torch.zeros(self.numel + 1, dtype=torch.bool, device=at.device)  # the last is nobody's
            cleared.index_fill_(0, at.where(used, self.numel), True)
            self.values.masked_fill_(cleared[:-1].view_as(self.values), 0)
        else:
            self.values.view(-1).index_fill_(0, indices, 0)

    def held(self) -> Gradient:
        """The gradient in a form that outlives the node that saw it."""
        return self

    def add(self, other: Gradient) -> Gradient:
        """The sum with the gradient of another use of the same weight; the two are not used afterwards."""
        other = other.dense()
        # autocast's short ones meet others; long sums over a few rows do not make the whole weight's gradient long
        dtype = torch.promote_types(self._dtype or self.values.dtype, other._dtype or other.values.dtype)
        if self.rows is None and other.rows is None:
            self.own(dtype)
            self.values += other.values
            return self
        if other.rows is not None and self.rows is None:
            self.own(dtype)
            self.values.index_add_(0, other.rows, other.values.to(dtype))
            return self
        if self.rows is None or other.rows is None:
            return other.add(self)
        return sum_rows(torch.cat([self.rows, other.rows]), torch.cat([self.values, other.values]), dtype=dtype)

    def _locate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Where the weight's flat indices lie in ``values``, and which of them do."""
        assert self.rows is not None
        cols = self.values.shape[1]
        row = indices.div(cols, rounding_mode="floor")
        position = torch.searchsorted(self.rows, row).clamp_(max=self.rows.numel() - 1)
        return position * cols + indices % cols, self.rows[position] == row


def sum_rows(rows: Tensor, values: Tensor, *, padded: bool = False, dtype: torch.dtype | None = None) -> Gradient:
    """The gradient (unique rows, cols) whose row r is the sum of ``values`` (n, cols) where ``rows`` (n,) is r.

    The sums are float32 at least: in bfloat16 the sum of equal terms stays at 256 of them, in float16 at 2048.

    Args:
        rows: (n,) int64, in any order.
        values: (n, cols).
        padded: whether the sums are (n, cols), so that the host need not wait for the number of rows that differ.
        dtype: in which the gradient came; by default that of ``values``.
    """
    unique, inverse = _padded_unique(rows) if padded else rows.unique(return_inverse=True)
    long = torch.promote_types(values.dtype, torch.float32)
    total = torch.zeros(unique.numel(), values.shape[1], dtype=long, device=values.device)
    at_once = max(1, CAST_ENTRIES // max(1, values.shape[1])) if values.dtype != long else max(1, values.shape[0])
    for places, some in zip(inverse.split(at_once), values.split(at_once), strict=True):
        if total.is_cuda:  # index_add_ adds in another order at every run, and index_put_ waits to check the places
            torch._index_put_impl_(total, [places], some.to(long), accumulate=True, unsafe=True)
        else:
            total.index_add_(0, places, some.to(long))
    return Gradient(total, unique, dtype=dtype or values.dtype)


def _padded_unique(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``rows.unique(return_inverse=True)`` of a size that is known ahead.

    Returns:
        (n,) int64, ascending: the distinct numbers in ``rows`` (n,), the largest as often as it takes to fill up; and
        (n,) int64: where each of ``rows`` is among them, the first place of the largest.
    """
    ordered, order = rows.sort()
    place = ordered.clone()
    place[:1] = 0
    place[1:] = ordered[1:] != ordered[:-1]
    place = place.cumsum(0)
    unique = ordered[-1:].expand_as(ordered).clone().index_put_((place,), ordered)
    return unique, torch.empty_like(place).index_put_((order,), place)


class Use(Protocol):
    """One use of a tensor in a forward pass: what a masked module's autograd node holds on to."""

    anchor: Tensor

    def wanted(self) -> bool:
        """Whether anybody wants this use's gradient in the backward pass that is running."""

    def collect(self, gradient: Gradient | None) -> None:
        """Hands over what the node saw; ``None`` where it was not wanted."""


class Collector(Protocol):
    """Whoever trains the tensors. A masked module does not know how entries are selected."""

    @property
    def values(self) -> Tensor:
        """(budget,) the flat delta."""

    @property
    def buffers(self) -> IndexBuffers:
        """The unmasked entries of all tensors."""

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 has the weights."""

    @property
    def in_forward(self) -> bool:
        """Whether the model runs forward now, so that a weight that is read is a weight that is used."""

    @property
    def forward_pass(self) -> int:
        """Number of the model's forward pass that this thread is in, or was in last."""

    @property
    def compiled(self) -> Compiled:
        """Its part in compiled graphs."""

    def use(self, tensor: MaskedTensor) -> Use | None:
        """Announces a use in a forward pass; ``None`` where no gradient will be collected."""


class Compiled(Protocol):
    """A collector's part in compiled graphs, which know a tensor by its handle."""

    @property
    def root_anchor(self) -> Tensor:
        """(1,) what a use in a compiled graph takes as an input; its gradient is empty."""

    def make_root(self) -> None:
        """Sees to it that there is a root anchor of the flat delta as it is now."""

    def trains(self, tensor: MaskedTensor) -> bool:
        """Whether a gradient may be collected for the tensor, now or later; it is asked while a graph is compiled."""

    def announce(self, tensor: MaskedTensor) -> None:
        """Announces a use by a compiled graph that runs forward."""

    def use(self, tensor: MaskedTensor) -> Use:
        """One of the announced uses, in the backward pass of its graph."""

    def refresh(self) -> None:
        """Brings the weights in step with the flat delta."""


class MaskedTensor:
    """One tensor parameter, its index buffers, and who collects its gradient.

    Args:
        number: which of the model's masked tensors it is, from 0.
        owner: the module that has the parameter; the first of those that share it.
        attribute: the parameter's name in its owner.
        name: its first name in the model's ``named_parameters``.
        offset: global id of its first entry: the number of entries in the tensors before it.
        collector: gets the gradients.
        frozen_row: a row that is no candidate (an embedding's padding row).

    Attributes:
        handle: () int64, what stands for this tensor in a compiled graph.
    """

    dormant = False  # whether it has no unmasked entry and never will
    packed = False  # whether the parameter is packed, so that no trained value can be written into it
    scheme: str | None = None  # how the parameter is quantized

    def __init__(
        self,
        number: int,
        owner: nn.Module,
        attribute: str,
        name: str,
        offset: int,
        collector: Collector,
        frozen_row: int | None = None,
    ) -> None:
        self.number = number
        self.owner = owner
        self.attribute = attribute
        self.name = name
        self.offset = offset
        self.collector = collector
        self.frozen_row = frozen_row
        self.shape = self.shape_now
        self.handle = new_handle(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.handle = new_handle(self)

    @property
    def parameter(self) -> Tensor:
        parameter = self.owner._parameters.get(self.attribute)
        assert parameter is not None
        return parameter

    @property
    def shape_now(self) -> torch.Size:
        """The parameter's shape; ``shape`` is the one it had at first."""
        return self.parameter.shape

    def check_shape(self) -> None:
        """Raises where the parameter was given another shape."""
        if self.shape_now != self.shape:
            raise SparsifyError(
                f"`{self.name}` had shape {tuple(self.shape)} at sparsify() and has {tuple(self.shape_now)} now; "
                "resize embeddings and the like before sparsify(). FullyShardedDataParallel (FSDP1) flattens weights: "
                "use fully_shard() (FSDP2)."
            )

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight's values."""
        return self.parameter.dtype

    @property
    def weight(self) -> Tensor:
        """The effective values, detached; gathered from all ranks where they are sharded."""
        return whole(self.parameter)

    @property
    def numel(self) -> int:
        """Number of entries."""
        return self.shape.numel()

    @property
    def indices(self) -> Tensor:
        return self.collector.buffers.indices(self.number).to(self.parameter.device)

    @property
    def slots(self) -> Tensor:
        return self.collector.buffers.slots(self.number).to(self.parameter.device)

    @property
    def base(self) -> Tensor:
        return self.collector.buffers.base(self.number).to(self.parameter.device, self.dtype)

    @property
    def delta(self) -> Tensor:
        """(k,) trained minus pretrained value of the unmasked entries, in the flat delta's dtype."""
        values = self.collector.values.detach()
        return values[self.slots.to(values.device)].to(self.base.device)

    @property
    def count(self) -> int:
        """Number of unmasked entries."""
        return self.collector.buffers.count(self.number)

    @property
    def effective(self) -> Tensor:
        """(k,) the values at the unmasked entries as they are now."""
        return self.take(self.indices)

    @property
    def own_effective(self) -> Tensor:
        """(k,) likewise, or zero at entries that another rank holds: to be written back."""
        return take_own(self.parameter, self.indices) if is_shard(self.parameter) else self.effective

    @property
    def matrix(self) -> Tensor:
        """The parameter as (rows, cols): the last dimension is kept, a vector is one row."""
        return as_matrix(self.weight)

    @property
    def num_candidates(self) -> int:
        """Number of entries that may be unmasked."""
        return self.numel - (0 if self.frozen_row is None else self.shape[-1])

    @property
    def never_candidates(self) -> Tensor:
        """Flat indices, ascending, of the entries that can never be unmasked."""
        device, cols = self.parameter.device, self.shape[-1] if self.shape else 1
        if self.frozen_row is None:
            return torch.empty(0, dtype=torch.int64, device=device)
        return torch.arange(self.frozen_row * cols, (self.frozen_row + 1) * cols, device=device)

    @property
    def not_candidates(self) -> Tensor:
        """Flat indices, in no order, of the entries that cannot be unmasked any more, or never."""
        return self.indices if self.frozen_row is None else torch.cat([self.indices, self.never_candidates])

    def take(self, indices: Tensor) -> Tensor:
        """The effective values (n,) at flat indices (n,)."""
        return take(self.parameter, indices)

    def write(self, values: Tensor) -> None:
        """Puts values (k,) into the weight at the indices; autograd's version counter sees it."""
        put_own(self.parameter, self.indices, values.to(self.parameter.device, self.parameter.dtype))

    def write_unseen(self, values: Tensor) -> None:
        """Likewise, through ``.data``: a graph that was built before has saved this weight and gets it unchanged."""
        put_own(self.parameter.data, self.indices, values.to(self.parameter.device, self.parameter.dtype))

    def write_base(self) -> None:
        """Puts the pretrained values into the weight, in the same way."""
        self.write_unseen(self.base)


def as_matrix(tensor: Tensor) -> Tensor:
    """A tensor of any shape as (rows, cols): its last dimension is kept, a vector or a scalar is one row."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)
