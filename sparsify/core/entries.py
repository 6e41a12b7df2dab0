"""The unmasked entries of a whole model, in order of unmasking: an entry's position is its slot in the flat delta.

    sparse_values   (capacity,) float  the flat delta, the only parameter that trains
    sparse_ids      (capacity,) int64  global ids: the tensor's offset plus the flat index in it
    sparse_base     (capacity,) float  pretrained values, in a dtype that holds those of every tensor

All are on the root, and only the first ``count`` places are in use. Their length does not change in training, so that
optimizers, DDP and copies of the model need no surgery. The view by tensor is made anew when entries join.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.core.devices import upload

VALUES, IDS, BASE = "sparse_values", "sparse_ids", "sparse_base"


class Entries:
    """The entries of a model, the ``root``, whose masked tensors have so many entries each (``sizes``)."""

    def __init__(self, root: nn.Module, sizes: Sequence[int]) -> None:
        self.root, self.ends = root, list(accumulate(sizes))
        self.offsets = [end - size for end, size in zip(self.ends, sizes, strict=True)]
        self.step = self.updates = 0  # optimizer steps done, and entries updated by them
        self.count, self.counts = 0, [0] * len(self.ends)  # of unmasked entries, in all and of each tensor

    def register(self, capacity: int, dtype: torch.dtype, base_dtype: torch.dtype, device: torch.device) -> None:
        """Adds a flat delta and buffers without entries to the root."""
        self.root.register_parameter(VALUES, nn.Parameter(torch.zeros(capacity, dtype=dtype, device=device)))
        self.root.register_buffer(IDS, torch.zeros(capacity, dtype=torch.int64, device=device))
        self.root.register_buffer(BASE, torch.zeros(capacity, dtype=base_dtype, device=device))
        self._sort()

    def remove(self) -> None:
        """Removes all that :meth:`register` added, or had time to."""
        self.root._parameters.pop(VALUES, None)
        for name in (IDS, BASE):
            self.root._buffers.pop(name, None)

    @property
    def values(self) -> Any:
        """(capacity,) the flat delta; looked up by name, since ``load_state_dict(assign=True)`` replaces it."""
        return self.root._parameters[VALUES]

    @property
    def ids(self) -> Tensor:
        """(count,) int64: global ids, by slot."""
        return self.root._buffers[IDS][: self.count]  # type: ignore[index]

    @property
    def base(self) -> Tensor:
        """(count,) pretrained values, by slot."""
        return self.root._buffers[BASE][: self.count]  # type: ignore[index]

    def of(self, number: int) -> tuple[Tensor, Tensor]:
        """Slots and global ids (k,) of the entries of one tensor, by ascending id."""
        first, stop = self.starts[number : number + 2]
        slots, ids = self.by_tensor
        return slots[first:stop], ids[first:stop]

    def effective(self, values: Tensor | None = None) -> Tensor:
        """Base + delta, the model's or another (capacity,), of all entries (count,), in the order of ``by_tensor``."""
        base, values = self.base, (self.values.detach() if values is None else values)[: self.count]
        total = base.to(torch.promote_types(base.dtype, values.dtype)) + values.to(base.device)
        return total.index_select(0, self.by_tensor[0])

    def append(self, ids: Tensor, base: Tensor, counts: Sequence[int]) -> None:
        """Adds entries (n,): global ids in order of unmasking, pretrained values, and how many each tensor has."""
        stop = self.count + ids.numel()
        for name, new in ((IDS, ids), (BASE, base)):
            self.root._buffers[name][self.count : stop] = new  # type: ignore[index]
        self.count, self.counts = stop, [old + more for old, more in zip(self.counts, counts, strict=True)]
        self._sort()

    def stepped(self, updates: int) -> None:
        """Counts an optimizer step that updated so many entries."""
        self.step, self.updates = self.step + 1, self.updates + updates

    def _sort(self) -> None:
        ids, slots = self.ids.sort()
        self.by_tensor = slots, ids  # (count,) of all entries, by ascending id, and so one tensor after the other
        self.starts = [0, *accumulate(self.counts)]  # where each tensor's are among these


def count_by_tensor(ids: Tensor, ends: Sequence[int]) -> Tensor:
    """How many of some global ids (n,) each tensor has: (tensors,) int64; -1 is no id. ``ends``: their last ids + 1."""
    return torch.searchsorted(ids.sort().values, upload([0, *ends], ids.device)).diff()
