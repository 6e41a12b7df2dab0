"""The unmasked entries of a whole model, in flat buffers of its root, one tensor after the other.

    sparse_counts   (tensors,) int64   how many entries each tensor has
    sparse_indices  (capacity,) int64  flat, row-major positions in their tensor
    sparse_slots    (capacity,) int64  where each entry's delta lives in the flat vector
    sparse_base     (capacity,)        the pretrained values, in a dtype that holds those of every tensor

Only the first k elements are in use, with k the sum of the counts; the others are zero. The sizes never change, so a
copy of the model that was made before training (``AveragedModel``, a hand-written EMA) takes the buffers by ``copy_``.
A tensor's entries are in order of unmasking. They are on the root and not in the modules, so that whoever picks parts
of a state dict by modules' names (PEFT saves whatever has ``lora_`` in its name) gets plain weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.common.devices import upload

COUNTS = "sparse_counts"
INDICES, SLOTS, BASE = PER_ENTRY = ("sparse_indices", "sparse_slots", "sparse_base")
BUFFERS = (COUNTS, *PER_ENTRY)


class IndexBuffers:
    """The index buffers of a model; tensors are known by their number, from 0.

    Args:
        root: the module that holds the buffers.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._starts = [0]  # of each tensor's entries, and the end of the last one's: the counts, on the host
        self._seen: tuple[Tensor, int] | None = None  # the counts that these are of, and how often they were written

    def register(self, num_tensors: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        """Adds buffers without entries to the root; base values will be kept in ``dtype``."""
        self._root.register_buffer(COUNTS, torch.zeros(num_tensors, dtype=torch.int64, device=device))
        for name in (INDICES, SLOTS):
            self._root.register_buffer(name, torch.zeros(capacity, dtype=torch.int64, device=device))
        self._root.register_buffer(BASE, torch.zeros(capacity, dtype=dtype, device=device))
        self.loaded()

    def remove(self) -> None:
        """Takes the buffers from the root."""
        for name in BUFFERS:
            delattr(self._root, name)

    @property
    def total(self) -> int:
        """Number of entries of all tensors."""
        return self._starts[-1]

    @property
    def nbytes(self) -> int:
        return sum(self._buffer(name).nbytes for name in BUFFERS)

    def count(self, number: int) -> int:
        """Number of entries of a tensor."""
        return self._starts[number + 1] - self._starts[number]

    def indices(self, number: int) -> Tensor:
        """(count,) int64: a tensor's flat positions."""
        return self._part(INDICES, number)

    def slots(self, number: int) -> Tensor:
        """(count,) int64: where a tensor's deltas live in the flat vector."""
        return self._part(SLOTS, number)

    def base(self, number: int) -> Tensor:
        """(count,) a tensor's pretrained values."""
        return self._part(BASE, number)

    def split(self, per_entry: Tensor) -> tuple[Tensor, ...]:
        """Something (k,) about all entries, tensor by tensor."""
        return per_entry.split([end - start for start, end in pairwise(self._starts)])

    @property
    def all_indices(self) -> Tensor:
        """(k,) int64: the flat positions of all entries, each in its tensor."""
        return self._buffer(INDICES)[: self.total]

    @property
    def all_slots(self) -> Tensor:
        """(k,) int64: the slots of all entries."""
        return self._buffer(SLOTS)[: self.total]

    @property
    def all_base(self) -> Tensor:
        """(k,) the pretrained values of all entries."""
        return self._buffer(BASE)[: self.total]

    def append(self, sizes: Sequence[int], indices: Tensor, slots: Tensor, base: Tensor) -> None:
        """Adds entries after those that their tensors have.

        Args:
            sizes: how many each tensor gets.
            indices: (n,) int64 positions, in the order of the tensors.
            slots: (n,) int64.
            base: (n,) pretrained values.
        """
        grown = []
        for name, more in zip(PER_ENTRY, (indices, slots, base), strict=True):
            old = self._buffer(name)
            pairs = zip(self.split(old[: self.total]), more.to(old).split(list(sizes)), strict=True)
            grown.append(torch.cat(list(chain.from_iterable(pairs))))
        more_counts = upload(sizes, self._buffer(COUNTS).device)
        starts = [start + more for start, more in zip(self._starts, accumulate(sizes, initial=0), strict=True)]
        # whatever can fail has been done
        for name, entries in zip(PER_ENTRY, grown, strict=True):
            self._buffer(name)[: starts[-1]].copy_(entries)
        self._buffer(COUNTS).add_(more_counts)
        self._know(starts)

    def make_room(self, capacity: int) -> None:
        """Makes the buffers longer, or leaves them as long as they are."""
        state = {name: self._buffer(name) for name in BUFFERS}
        self._root._buffers.update(padded(state, capacity))

    def set_base(self, where: Tensor, base: Tensor) -> None:
        """Sets the pretrained values (n,) of the entries where ``where`` (k,) is true."""
        self.all_base[where] = base.to(self._buffer(BASE))

    def have_changed(self) -> bool:
        """Whether other counts were written into the buffers than by this object, as ``AveragedModel`` copies them.

        Waits for the device only where something was written.
        """
        counts = self._buffer(COUNTS)
        if self._seen is None or self._seen[0] is not counts:  # moved to another device, with what is in it
            self._seen = counts, counts._version
        if self._seen[1] == counts._version:
            return False
        if self._read() != self._starts:
            return True
        self._know(self._starts)  # DDP's broadcast has written what was there
        return False

    def loaded(self) -> None:
        """Reads the counts anew: the buffers hold other entries now."""
        self._know(self._read())

    def problem(self, sizes: Sequence[int]) -> str | None:
        """What is wrong with the buffers as they are, if anything; as :func:`problem_with`."""
        return problem_with({name: self._buffer(name) for name in BUFFERS}, sizes, self._buffer(SLOTS).numel())

    def _read(self) -> list[int]:
        return list(accumulate(self._buffer(COUNTS).tolist(), initial=0))

    def _know(self, starts: list[int]) -> None:
        counts = self._buffer(COUNTS)
        self._starts, self._seen = starts, (counts, counts._version)

    def __getstate__(self) -> dict[str, Any]:
        # a copy's buffers count their writes from 0
        return {**self.__dict__, "_seen": None if self._seen is None else (self._seen[0], -1)}

    def _part(self, name: str, number: int) -> Tensor:
        return self._buffer(name)[self._starts[number] : self._starts[number + 1]]

    def _buffer(self, name: str) -> Tensor:
        buffer = self._root._buffers[name]
        assert buffer is not None
        return buffer


def padded(state: Mapping[str, Tensor], capacity: int) -> dict[str, Tensor]:
    """The buffers per entry of a state dict that was checked, at their full size (capacity,); integers are int64."""
    whole, total = {}, int(state[COUNTS].sum())
    for name in PER_ENTRY:
        entries = state[name][:total] if name == BASE else state[name][:total].long()
        whole[name] = torch.cat([entries, entries.new_zeros(capacity - entries.numel())])
    return whole


def problem_with(state: Mapping[str, Tensor], sizes: Sequence[int], capacity: int) -> str | None:
    """What is wrong with the index buffers in a state dict, if anything.

    Args:
        state: those of the buffers that are there, by name; those per entry as long as there are entries, or longer.
        sizes: number of entries, masked or not, of each tensor of the model.
        capacity: how many entries the model has room for.
    """
    if missing := [name for name in BUFFERS if name not in state]:
        return f"index buffers are missing: {', '.join(missing)}; expected all of {', '.join(BUFFERS)}, or none."
    shapes = {name: tuple(state[name].shape) for name in BUFFERS}
    counts = state[COUNTS]
    if any(state[name].dtype not in (torch.int64, torch.int32) for name in (COUNTS, INDICES, SLOTS)):
        return f"the index buffers {COUNTS}, {SLOTS} and {INDICES} are not all of whole numbers; load what was saved."
    if shapes[COUNTS] != (len(sizes),):
        return (
            f"the index buffers are about {counts.numel():,} tensors, and this model has {len(sizes):,} that are "
            "masked; sparsify it with the same target_modules as the model that was saved."
        )
    limits, length = torch.tensor(sizes, device=counts.device), state[SLOTS].numel()
    one_length = all(shapes[name] == (length,) for name in PER_ENTRY)
    if not one_length or bool(((counts < 0) | (counts > limits)).any()) or (total := int(counts.sum())) > length:
        return f"the index buffers do not agree: {shapes}; expected as many of each as sparse_counts adds up to."
    indices, slots = state[INDICES][:total], state[SLOTS][:total]
    if total > capacity:
        return (
            f"the state dict has more than {capacity:,} unmasked entries, which this model has room for; "
            "sparsify it with the budget of the model that was saved."
        )
    if bool(((indices < 0) | (indices >= limits.repeat_interleave(counts))).any()):
        return "the index buffers point beyond their tensors; sparsify the model that was saved, not another one."
    starts = (limits.cumsum(0) - limits).repeat_interleave(counts)  # of each entry's tensor, among the model's entries
    if (starts + indices).unique().numel() < indices.numel():
        return "the index buffers hold the same entry of a tensor twice; the state dict is damaged, load another one."
    if not torch.equal(slots.long().sort().values, torch.arange(slots.numel(), device=slots.device)):
        return (
            f"{SLOTS} is not every slot from 0 to {slots.numel() - 1:,} once, so that two entries would share one, now "
            "or later; the state dict is damaged, load another one."
        )
    return None
