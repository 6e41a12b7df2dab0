"""The unmasked entries of a whole model, in order of unmasking: an entry's position is its slot in the flat delta.

    sparse_values    (capacity,) float  the flat delta, the only parameter that trains
    sparse_ids       (capacity,) int64  global ids: the tensor's offset plus the flat index in it
    sparse_base      (capacity,) float  pretrained values, in a dtype that holds those of every tensor
    sparse_position  (4,) int64         optimizer steps done, entries updated by them, number of entries, their checksum

All are on the root. Only the first ``count`` places of the vectors are in use; the others are zero. Their length does
not change in training, so that a copy of the model that was made before (``AveragedModel``, a hand-written EMA) takes
them by ``copy_``. The view by tensor is made from the ids whenever these have changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.core.devices import upload

VALUES, IDS, BASE, POSITION = "sparse_values", "sparse_ids", "sparse_base", "sparse_position"
BUFFERS = (IDS, BASE, POSITION)


class SparseValues(nn.Parameter):
    """The flat delta: a parameter that stays in float32 when its model is cast to a shorter type.

    A delta is small compared to its weight; rounded to bfloat16, most optimizer steps would be lost.
    """

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype in (None, torch.float16, torch.bfloat16):
            dtype = self.dtype
        return super().to(device=device or self.device, dtype=dtype, non_blocking=non_blocking)

    def half(self, *args: Any, **kwargs: Any) -> Tensor:
        return self

    bfloat16 = half

    def __reduce_ex__(self, protocol: Any) -> Any:
        return SparseValues, (self.data, self.requires_grad)


class Entries:
    """The entries of a model, held by its ``root``.

    Args:
        root: the model; what it has in addition after :meth:`register` is all state.
        sizes: number of entries of each masked tensor, by number.

    Attributes:
        step: optimizer steps done.
        updates: entries updated by them.
        count: number of unmasked entries.
        counts: the same of each tensor.
        generation: how often the entries were replaced; in between, entries are only added.
    """

    def __init__(self, root: nn.Module, sizes: Sequence[int]) -> None:
        self.root, self.ends = root, list(accumulate(sizes))
        self.offsets = [end - size for end, size in zip(self.ends, sizes, strict=True)]
        self.step = self.updates = self.count = self.generation = 0
        self.counts = [0] * len(self.ends)
        self._view: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
        self._sorted: tuple[Tensor, Tensor] = torch.empty(0), torch.empty(0)
        self._seen: list[tuple[str, Tensor, int]] = []  # the buffers and their versions when they were last read

    def register(self, capacity: int, dtype: torch.dtype, base_dtype: torch.dtype, device: torch.device) -> None:
        """Adds a flat delta and buffers without entries to the root."""
        values = SparseValues(torch.zeros(capacity, dtype=dtype, device=device))
        self.root.register_parameter(VALUES, values)
        self.root.register_buffer(IDS, torch.zeros(capacity, dtype=torch.int64, device=device))
        self.root.register_buffer(BASE, torch.zeros(capacity, dtype=base_dtype, device=device))
        self.root.register_buffer(POSITION, torch.zeros(4, dtype=torch.int64, device=device))
        self._take_in(0, self.counts)

    def remove(self) -> None:
        """Removes all that :meth:`register` added."""
        del self.root._parameters[VALUES]
        for name in BUFFERS:
            del self.root._buffers[name]

    @property
    def values(self) -> SparseValues:
        """(capacity,) the flat delta; looked up by name, since ``load_state_dict(assign=True)`` replaces it."""
        values: Any = self.root._parameters[VALUES]
        if type(values) is nn.Parameter:
            values.__class__ = SparseValues
        return values

    def has_values(self) -> bool:
        """Whether the root has a flat delta; a root in the middle of a copy has none."""
        return VALUES in self.root.__dict__.get("_parameters", ())

    @property
    def ids(self) -> Tensor:
        """(count,) int64: global ids, by slot."""
        return self._buffer(IDS)[: self.count]

    @property
    def base(self) -> Tensor:
        """(count,) pretrained values, by slot."""
        return self._buffer(BASE)[: self.count]

    @property
    def effective(self) -> Tensor:
        """(count,) base + delta, by slot."""
        base, values = self.base, self.values.detach()[: self.count]
        return base.to(torch.promote_types(base.dtype, values.dtype)) + values.to(base.device)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + sum(self._buffer(name).nbytes for name in BUFFERS)

    def by_tensor(self) -> tuple[Tensor, Tensor]:
        """Slots and flat indices (count,) of all entries, one tensor after the other, each by ascending index."""
        if self._sorted[0].device != self._buffer(IDS).device:  # the model was moved
            self._sort()
        return self._sorted

    def of(self, number: int) -> tuple[Tensor, Tensor]:
        """Slots and flat indices (k,) of the entries of one tensor, by ascending index."""
        parts = self.by_tensor()
        if self._view is None:
            slots, indices = (part.split(self.counts) for part in parts)
            self._view = slots, indices
        return self._view[0][number], self._view[1][number]

    def append(self, ids: Tensor, base: Tensor, counts: Sequence[int]) -> None:
        """Adds entries.

        Args:
            ids: (n,) int64 global ids, in order of unmasking.
            base: (n,) their pretrained values.
            counts: how many of them each tensor has.
        """
        stop = self.count + ids.numel()
        new_count = torch.full((), ids.numel(), dtype=torch.int64, device=ids.device)
        self._buffer(IDS)[self.count : stop] = ids
        self._buffer(BASE)[self.count : stop] = base.to(self._buffer(BASE))
        self._buffer(POSITION)[2:].add_(torch.stack([new_count, _checksum(ids, self.count)]))
        self._take_in(stop, [old + new for old, new in zip(self.counts, counts, strict=True)])

    def stepped(self, updates: int) -> None:
        """Counts an optimizer step that updated so many entries."""
        self.step, self.updates = self.step + 1, self.updates + updates
        position = self._buffer(POSITION)[:2]
        position.copy_(upload([self.step, self.updates], position.device))
        self.remember()

    def read(self) -> None:
        """Reads the buffers again, after they were replaced."""
        self.step, self.updates, count, _ = self._buffer(POSITION).tolist()
        self._take_in(count, count_by_tensor(self._buffer(IDS)[:count], self.ends).tolist())
        self.generation += 1

    def catch_up(self) -> bool:
        """Takes in the steps that something else has written, as a copy's; whether the entries are others now.

        Waits for the device only where the buffers were written or moved.
        """
        if all(self._buffer(name) is seen and seen._version == version for name, seen, version in self._seen):
            return False
        if self._have_changed():
            return True
        self.remember()
        return False

    def _have_changed(self) -> bool:
        step, updates, count, _ = self._buffer(POSITION).tolist()
        if count != self.count:
            return True
        self.step, self.updates = step, updates
        slots, indices = self._sorted
        offsets = torch.tensor(self.offsets).repeat_interleave(torch.tensor(self.counts))
        return not torch.equal(self.ids.cpu()[slots.cpu()], indices.cpu() + offsets)

    def problem(self, state: Mapping[str, Tensor] | None = None) -> str | None:
        """Returns what is wrong with the buffers, or with those of a state dict; ``None`` if nothing is."""
        ids, base, position = ((state or self.root._buffers)[name] for name in BUFFERS)
        assert ids is not None
        assert base is not None
        assert position is not None
        if ids.dtype not in (torch.int64, torch.int32) or position.shape != (4,) or position.is_floating_point():
            return f"`{IDS}` and `{POSITION}` are not whole numbers of the right number; load what was saved."
        count, room = int(position[2]), self.values.numel()
        if ids.dim() != 1 or ids.shape != base.shape or not 0 <= count <= ids.numel():
            return f"`{IDS}` {tuple(ids.shape)}, `{BASE}` {tuple(base.shape)} and {count:,} entries do not agree."
        if count > room:
            return (
                f"the state dict has more than {room:,} unmasked entries, which this model has room for; sparsify it "
                "with the budget of the model that was saved."
            )
        if int(_checksum(ids[:count].long(), 0)) != int(position[3]):
            return f"`{IDS}` are not those that were saved: they were damaged, or averaged; load another state dict."
        ids = ids[:count].long().sort().values
        if count and not 0 <= int(ids[0]) <= int(ids[-1]) < self.ends[-1]:
            return "the entries lie beyond this model's candidates; sparsify the model that was saved, not another one."
        if bool((ids[1:] == ids[:-1]).any()):
            return "the entries hold the same one twice; the state dict is damaged, load another one."
        return None

    def make_room(self, capacity: int) -> None:
        """Lengthens the buffers to ``capacity`` entries."""
        for name in (IDS, BASE):
            old = self._buffer(name)
            self.root._buffers[name] = torch.cat([old, old.new_zeros(capacity - old.numel())])
        self.remember()

    def _take_in(self, count: int, counts: list[int]) -> None:
        self.count, self.counts = count, counts
        self._sort()
        self.remember()

    def _sort(self) -> None:
        ids, slots = self.ids.sort()
        offsets, counts = upload(self.offsets, ids.device), upload(self.counts, ids.device)
        self._sorted = slots, ids - offsets.repeat_interleave(counts, output_size=self.count)
        self._view = None

    def remember(self) -> None:
        """Notes that what is in the buffers is known."""
        self._seen = [(name, self._buffer(name), self._buffer(name)._version) for name in BUFFERS]

    def _buffer(self, name: str) -> Tensor:
        buffer = self.root._buffers[name]
        assert buffer is not None
        return buffer

    def __getstate__(self) -> dict[str, Any]:
        # a copy's buffers count their writes from 0
        return {**self.__dict__, "_seen": [(name, buffer, -1) for name, buffer, _ in self._seen], "_view": None}


def _checksum(ids: Tensor, first: int) -> Tensor:
    """A number () int64 of ids (n,) in slots from ``first`` on, to be added to that of the slots before.

    Not linear, so that an average of entries does not have the average of their checksums.
    """
    slots = torch.arange(first + 1, first + 1 + ids.numel(), device=ids.device)
    return (ids * ids * slots).sum()


def count_by_tensor(ids: Tensor, ends: Sequence[int]) -> Tensor:
    """How many of some global ids (n,) each tensor has: (tensors,) int64; -1 is no id.

    Args:
        ids: in any order.
        ends: of each tensor, by number: the global id after its last one.
    """
    bounds = upload([0, *ends], ids.device)
    return torch.searchsorted(ids.sort().values, bounds).diff()
