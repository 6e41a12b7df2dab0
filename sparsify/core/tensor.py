"""One parameter that is trained at some of its entries, and the collector that takes its gradient.

A :class:`MaskedTensor` owns no data: its indices, slots and base values are its part of the root's index buffers, which
``.to()``, ``state_dict()`` and ``deepcopy`` see.

* ``indices`` (k,) int64: flat, row-major positions of the unmasked entries, in order of unmasking;
* ``slots``   (k,) int64: positions of their deltas in the root's flat vector;
* ``base``    (k,) their pretrained values, in the weight's dtype.

The parameter itself always holds the effective values: base + delta at the indices, the pretrained ones elsewhere.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from sparsify.common.shards import full_values, is_shard, read_entries, read_own_entries, write_own_entries
from sparsify.core.devices import upload
from sparsify.core.entries import IndexBuffers
from sparsify.core.gradients import Gradient, as_matrix
from sparsify.errors import SparsifyError

_HANDLES = itertools.count()
_BY_HANDLE: weakref.WeakValueDictionary[int, MaskedTensor] = weakref.WeakValueDictionary()


class Use(Protocol):
    """One use of a tensor in a forward pass; the masked module's autograd node holds it."""

    anchor: Tensor

    def wanted(self) -> bool:
        """Whether the running backward pass needs this use's gradient."""

    def collect(self, gradient: Gradient | None) -> None:
        """Takes the use's gradient; ``None`` where it is not wanted."""


class Collector(Protocol):
    """The engine, as far as a masked module sees it: not how entries are selected."""

    @property
    def values(self) -> Tensor:
        """(budget,) the flat delta."""

    @property
    def buffers(self) -> IndexBuffers:
        """The unmasked entries of all tensors."""

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds the weights."""

    @property
    def in_forward(self) -> bool:
        """Whether the model runs forward now, so that reading a weight is a use of it."""

    @property
    def forward_pass(self) -> int:
        """Number of this thread's current, or last, forward pass of the model."""

    @property
    def compiled(self) -> Any:
        """What the operators in compiled graphs call (``training/compiled.py``)."""

    def use(self, tensor: MaskedTensor) -> Use | None:
        """Announces a use in a forward pass; ``None`` where no gradient will be collected."""


@dataclass(eq=False, repr=False)
class MaskedTensor:
    """One parameter, its index buffers, and the collector of its gradient."""

    number: int  # its position among the model's masked tensors, from 0
    owner: nn.Module  # has the parameter; the first of those that share it
    attribute: str  # the parameter's name in its owner
    name: str  # its first name in the model's ``named_parameters``
    offset: int  # global id of its first entry: the number of entries in the tensors before it
    collector: Collector  # takes the gradients
    frozen_row: int | None = None  # a row that is no candidate (an embedding's padding row)

    dormant = False  # whether it has no unmasked entry and never will
    packed = False  # whether the parameter is packed, so that no trained value can be written into it
    scheme: ClassVar[str | None] = None  # how the parameter is quantized

    def __post_init__(self) -> None:
        self.shape = self.shape_now  # at sparsify()
        self.handle = self._new_handle()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.handle = self._new_handle()

    def _new_handle(self) -> Tensor:
        """Makes the tensor's number () int64 in compiled graphs.

        Layers with one code share one graph, whatever their handles, and a graph that another process has stored finds
        this process's tensors.
        """
        number = next(_HANDLES)
        _BY_HANDLE[number] = self
        return torch.tensor(number, device="cpu")

    @property
    def parameter(self) -> Tensor:
        parameter = self.owner._parameters.get(self.attribute)
        assert parameter is not None
        return parameter

    @property
    def shape_now(self) -> torch.Size:
        """The parameter's present shape."""
        return self.parameter.shape

    def check_shape(self) -> None:
        """Raises ``SparsifyError`` if the parameter has another shape than at sparsify()."""
        if self.shape_now != self.shape:
            raise SparsifyError(
                f"`{self.name}` had shape {tuple(self.shape)} at sparsify() and has {tuple(self.shape_now)} now; "
                "resize embeddings and the like before sparsify(). FullyShardedDataParallel (FSDP1) flattens weights: "
                "use fully_shard() (FSDP2)."
            )

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def weight(self) -> Tensor:
        """The effective values, detached; gathered from all ranks where they are sharded."""
        return full_values(self.parameter)

    @property
    def numel(self) -> int:
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
        """(k,) the current values at the unmasked entries."""
        return self.take(self.indices)

    @property
    def own_effective(self) -> Tensor:
        """(k,) :attr:`effective`, with zeros at entries that another rank holds."""
        return read_own_entries(self.parameter, self.indices) if is_shard(self.parameter) else self.effective

    @property
    def matrix(self) -> Tensor:
        """The parameter as (rows, cols): the last dimension is kept, a vector is one row."""
        return as_matrix(self.weight)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape of :attr:`matrix`, without gathering it."""
        cols = self.shape[-1] if self.shape else 1
        return self.numel // max(1, cols), cols

    @property
    def num_candidates(self) -> int:
        """Number of entries that may be unmasked."""
        return self.numel - (0 if self.frozen_row is None else self.shape[-1])

    @property
    def never_candidates(self) -> Tensor:
        """Flat indices, ascending, of the frozen row's entries."""
        device, (_, cols) = self.parameter.device, self.matrix_shape
        if self.frozen_row is None:
            return torch.empty(0, dtype=torch.int64, device=device)
        return torch.arange(self.frozen_row * cols, (self.frozen_row + 1) * cols, device=device)

    @property
    def not_candidates(self) -> Tensor:
        """Flat indices, in no order, of the entries that are unmasked already or in the frozen row."""
        return self.indices if self.frozen_row is None else torch.cat([self.indices, self.never_candidates])

    def take(self, indices: Tensor) -> Tensor:
        """Returns the effective values (n,) at flat indices (n,)."""
        return read_entries(self.parameter, indices)

    def write(self, values: Tensor) -> None:
        """Writes values (k,) into the weight at the indices; autograd's version counter sees it."""
        write_own_entries(self.parameter, self.indices, values.to(self.parameter.device, self.parameter.dtype))

    def write_unseen(self, values: Tensor) -> None:
        """Writes values (k,) through ``.data``, so that backward through an earlier graph raises no error."""
        write_own_entries(self.parameter.data, self.indices, values.to(self.parameter.device, self.parameter.dtype))

    def write_base(self) -> None:
        """Writes the pretrained values as :meth:`write_unseen` does."""
        self.write_unseen(self.base)


def count_by_tensor(ids: Tensor, tensors: Sequence[MaskedTensor]) -> Tensor:
    """How many of some global ids (n,) each tensor has: (tensors,) int64, by ascending offset; -1 is no id."""
    bounds = upload([0, *(tensor.offset + tensor.numel for tensor in tensors)], ids.device)
    return torch.searchsorted(ids.sort().values, bounds).diff()


def tensor_of(handle: Tensor) -> MaskedTensor:
    """Returns the living masked tensor of a handle () int64."""
    return _BY_HANDLE[int(handle)]
