"""The entries of a model that others write to: state dicts, averages, casts, moves to another device.

``sparse_position`` (4,) int64 is state too: optimizer steps done, entries updated by them, number of entries, and a
checksum of their ids.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.common.names import POSITION
from sparsify.common.raw_bits import checksum
from sparsify.core.devices import upload
from sparsify.core.entries import BASE, IDS, VALUES, Entries, count_by_tensor
from sparsify.errors import SparsifyError

BUFFERS = (IDS, BASE, POSITION)
_SHORT = (torch.float16, torch.bfloat16)


class SparseValues(nn.Parameter):
    """The flat delta. A cast, which sets ``data``, leaves it in float32: most steps would be lost in a shorter type."""

    @property
    def data(self) -> Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: Tensor) -> None:
        own = self.detach()
        if new.dtype in _SHORT and own.dtype not in _SHORT:
            is_cast = new.shape == own.shape and not new.is_meta and torch.equal(own.to(new), new)
            new = own.to(new.device) if is_cast else new.to(own.dtype)
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]

    def is_floating_point(self) -> bool:
        """``False``: a module casts what says so, and transformers takes the dtype of the first one for the model's."""
        traced = torch.compiler.is_dynamo_compiling()
        if not traced and sys._getframe(1).f_code.co_name == "_validate_tensors_to_flatten":
            raise SparsifyError("FullyShardedDataParallel (FSDP1) flattens parameters: use fully_shard() (FSDP2).")
        return False

    def __reduce_ex__(self, protocol: Any) -> Any:
        return SparseValues, (self.data, self.requires_grad)


class ModelEntries(Entries):
    """Entries that notice when something else has written into their buffers."""

    def __init__(self, root: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__(root, sizes)
        self.generation = 0  # how often they were replaced; in between, entries are only added
        self.base_was_written = False  # by something else, though the entries are the same
        self._seen: list[tuple[str, Tensor, int]] = []  # the buffers and their versions when they were last read

    def __getstate__(self) -> dict[str, Any]:
        # a copy's buffers count their writes from 0
        return {**self.__dict__, "_seen": [(name, buffer, -1) for name, buffer, _ in self._seen]}

    def register(self, capacity: int, dtype: torch.dtype, base_dtype: torch.dtype, device: torch.device) -> None:
        super().register(capacity, dtype, base_dtype, device)
        self.root.register_buffer(POSITION, torch.zeros(4, dtype=torch.int64, device=device))
        self.remember()

    def remove(self) -> None:
        super().remove()
        self.root._buffers.pop(POSITION, None)

    @property
    def values(self) -> SparseValues:
        values: Any = self.root._parameters[VALUES]
        if type(values) is nn.Parameter:  # new, or from ``load_state_dict(assign=True)``
            if values.dtype in _SHORT:
                values.data = values.data.float()
            values.__class__ = SparseValues
        return values

    def remember(self) -> None:
        """Notes that what is in the buffers is known."""
        buffers: dict[str, Any] = self.root._buffers
        self._seen = [(name, buffers[name], buffers[name]._version) for name in BUFFERS]

    @property
    def written(self) -> list[str]:
        """The buffers that something else has written to, or replaced."""
        buffers = self.root._buffers
        return [name for name, seen, known in self._seen if buffers[name] is not seen or seen._version != known]

    def append(self, ids: Tensor, base: Tensor, counts: Sequence[int]) -> None:
        added = torch.stack([torch.full_like(ids[:1].sum(), ids.numel()), checksum(ids, self.count)])
        super().append(ids, base, counts)
        self.root.get_buffer(POSITION)[2:].add_(added)
        self.remember()

    def stepped(self, updates: int) -> None:
        super().stepped(updates)
        position = self.root.get_buffer(POSITION)[:2]
        position.copy_(upload([self.step, self.updates], position.device))
        self.remember()

    def read(self) -> None:
        """Reads the buffers again, after they were replaced."""
        self.step, self.updates, self.count, _ = self.root.get_buffer(POSITION).tolist()
        self.counts = count_by_tensor(self.ids, self.ends).tolist()
        self._sort()
        self.generation += 1
        self.remember()

    def truncate(self, count: int) -> None:
        """Takes the entries from slot ``count`` on away again; their values have to be zero."""
        position = self.root.get_buffer(POSITION)
        position[2:] = torch.stack([torch.full_like(position[2], count), checksum(self.ids[:count])])
        self.ids[count:] = self.base[count:] = 0
        self.read()

    def catch_up(self, *, by_value: bool = False) -> bool:
        """Takes in the steps that something else has written, as a copy's; whether the entries are others now."""
        written = self.written
        if not written and not by_value:
            return False
        step, updates, count, _ = self.root.get_buffer(POSITION).tolist()
        slots, ids = (part.cpu() for part in self.by_tensor)
        known_ids = torch.empty_like(ids).index_copy_(0, slots, ids)
        if count != self.count or self.ids.is_floating_point() or not torch.equal(known_ids, self.ids.cpu()):
            return True
        self.base_was_written |= any(name == BASE and known >= 0 for name, _, known in self._seen if name in written)
        self.step, self.updates = step, updates
        self._sort()  # on another device, perhaps
        self.remember()
        return False

    def problem(self, state: Mapping[str, Any] | None = None) -> str | None:
        """Returns what is wrong with the buffers, or with those of a state dict; ``None`` if nothing is."""
        buffers: Mapping[str, Any] = state or self.root._buffers
        ids, base, position = (buffers[name] for name in BUFFERS)
        if ids.dtype not in (torch.int64, torch.int32) or position.shape != (4,) or position.is_floating_point():
            return f"`{IDS}` and `{POSITION}` are not whole numbers of the right number; load what was saved."
        count, room = int(position[2]), self.values.numel()
        if ids.dim() != 1 or ids.shape != base.shape or not 0 <= count <= ids.numel():
            return f"`{IDS}` {tuple(ids.shape)}, `{BASE}` {tuple(base.shape)} and {count:,} entries do not agree."
        if count > room:
            return f"there are more than {room:,} unmasked entries; sparsify with the budget of the saved model."
        ids = ids[:count].long()
        if int(checksum(ids)) != int(position[3]):
            return f"`{IDS}` are not those that were saved: they were damaged, or averaged; load another state dict."
        ids = ids.sort().values
        if count and not 0 <= int(ids[0]) <= int(ids[-1]) < self.ends[-1]:
            return "the entries lie beyond this model's candidates; sparsify the model that was saved, not another one."
        if bool((ids[1:] == ids[:-1]).any()):
            return "the entries hold the same one twice; the state dict is damaged, load another one."
        return None
