"""The unmasked entries of a whole model, in flat buffers of its root, one tensor after the other.

    sparse_counts   (tensors,) int64   number of entries of each tensor
    sparse_indices  (capacity,) int64  flat, row-major positions in their tensor
    sparse_slots    (capacity,) int64  positions of the entries' deltas in the flat vector
    sparse_base     (capacity,)        pretrained values, in a dtype that holds those of every tensor

Only the first k elements are in use, with k the sum of the counts; the others are zero. The sizes do not change in
training, so a copy of the model that was made before (``AveragedModel``, a hand-written EMA) takes the buffers by
``copy_``. A tensor's entries are in order of unmasking. The buffers are on the root and not in the modules, so that
parts of a state dict selected by modules' names (PEFT saves all names with ``lora_``) are plain weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.core.devices import upload

COUNTS = "sparse_counts"
INDICES, SLOTS, BASE = PER_ENTRY = ("sparse_indices", "sparse_slots", "sparse_base")
BUFFERS = (COUNTS, *PER_ENTRY)


class IndexBuffers:
    """The index buffers of a model, held by its ``root``; a tensor is given by its number, from 0."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._starts = [0]  # of each tensor's entries, then the end of the last one's: a copy of the counts on the host
        self._seen: tuple[Tensor, int] | None = None  # the buffer of counts at that copy, and its version
        self.generation = 0  # how often the entries were replaced; in between, entries are only added

    def register(self, num_tensors: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        """Adds buffers without entries to the root, with base values in ``dtype``."""
        self._root.register_buffer(COUNTS, torch.zeros(num_tensors, dtype=torch.int64, device=device))
        for name in (INDICES, SLOTS):
            self._root.register_buffer(name, torch.zeros(capacity, dtype=torch.int64, device=device))
        self._root.register_buffer(BASE, torch.zeros(capacity, dtype=dtype, device=device))
        self.loaded()

    def remove(self) -> None:
        """Removes the buffers from the root."""
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

    def indices(self, number: int | None = None) -> Tensor:
        """(n,) int64: the flat positions of one tensor's entries, or of all entries, each in its tensor."""
        return self._part(INDICES, number)

    def slots(self, number: int | None = None) -> Tensor:
        """(n,) int64: the positions of these entries' deltas in the flat vector."""
        return self._part(SLOTS, number)

    def base(self, number: int | None = None) -> Tensor:
        """(n,) their pretrained values."""
        return self._part(BASE, number)

    def split(self, per_entry: Tensor) -> tuple[Tensor, ...]:
        """Splits a tensor (k,) over all entries into one part for each masked tensor."""
        return per_entry.split([end - start for start, end in pairwise(self._starts)])

    def append(self, sizes: Sequence[int], indices: Tensor, slots: Tensor, base: Tensor) -> None:
        """Adds entries (n,) in the order of the tensors, ``sizes`` of each, after those that it has."""
        grown = []
        for name, more in zip(PER_ENTRY, (indices, slots, base), strict=True):
            old = self._buffer(name)
            pairs = zip(self.split(old[: self.total]), more.to(old).split(list(sizes)), strict=True)
            grown.append(torch.cat(list(chain.from_iterable(pairs))))
        more_counts = upload(sizes, self._buffer(COUNTS).device)
        starts = [start + more for start, more in zip(self._starts, accumulate(sizes, initial=0), strict=True)]
        # nothing below can fail
        for name, entries in zip(PER_ENTRY, grown, strict=True):
            self._buffer(name)[: starts[-1]].copy_(entries)
        self._buffer(COUNTS).add_(more_counts)
        self._remember(starts)

    def make_room(self, capacity: int) -> None:
        """Lengthens the buffers to ``capacity`` entries."""
        state = {name: self._buffer(name) for name in BUFFERS}
        self._root._buffers.update(padded(state, capacity))

    def have_changed(self) -> bool:
        """Whether counts were written into the buffers from outside, as ``AveragedModel`` copies them.

        Waits for the device only where the buffer was written.
        """
        counts = self._buffer(COUNTS)
        if self._seen is None or self._seen[0] is not counts:  # moved to another device, with what is in it
            self._seen = counts, counts._version
        if self._seen[1] == counts._version:
            return False
        if self._read() != self._starts:
            return True
        self._remember(self._starts)  # DDP's broadcast wrote the same counts
        return False

    def loaded(self) -> None:
        """Reads the counts again, after the buffers were replaced."""
        self._remember(self._read())
        self.generation += 1

    def problem(self, sizes: Sequence[int]) -> str | None:
        """Returns what is wrong with the buffers, as :func:`problem_with` does."""
        return problem_with({name: self._buffer(name) for name in BUFFERS}, sizes, self._buffer(SLOTS).numel())

    def _read(self) -> list[int]:
        return list(accumulate(self._buffer(COUNTS).tolist(), initial=0))

    def _remember(self, starts: list[int]) -> None:
        counts = self._buffer(COUNTS)
        self._starts, self._seen = starts, (counts, counts._version)

    def __getstate__(self) -> dict[str, Any]:
        # a copy's buffers count their writes from 0
        return {**self.__dict__, "_seen": None if self._seen is None else (self._seen[0], -1)}

    def _part(self, name: str, number: int | None) -> Tensor:
        first, last = (0, len(self._starts) - 1) if number is None else (number, number + 1)
        return self._buffer(name)[self._starts[first] : self._starts[last]]

    def _buffer(self, name: str) -> Tensor:
        buffer = self._root._buffers[name]
        assert buffer is not None
        return buffer


def padded(state: Mapping[str, Tensor], capacity: int) -> dict[str, Tensor]:
    """Returns the per-entry buffers of a checked state dict at their full size (capacity,), with integers as int64."""
    whole, total = {}, int(state[COUNTS].sum())
    for name in PER_ENTRY:
        entries = state[name][:total] if name == BASE else state[name][:total].long()
        whole[name] = torch.cat([entries, entries.new_zeros(capacity - entries.numel())])
    return whole


def problem_with(state: Mapping[str, Tensor], sizes: Sequence[int], capacity: int) -> str | None:
    """Returns what is wrong with the index buffers in a state dict, ``None`` if nothing is.

    Args:
        state: the buffers by name; those per entry have at least as many elements as there are entries.
        sizes: number of entries, masked or not, of each tensor of the model.
        capacity: the largest number of unmasked entries that the model can hold.
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
    twice = (starts + indices).unique().numel() < indices.numel()
    if twice or not torch.equal(slots.long().sort().values, torch.arange(slots.numel(), device=slots.device)):
        what = "the same entry of a tensor twice" if twice else "one slot of the flat delta twice, or leave one out"
        return f"the index buffers hold {what}; the state dict is damaged, load another one."
    return None
