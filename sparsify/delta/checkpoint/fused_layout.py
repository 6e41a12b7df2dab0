"""The places where a tensor's entries are stored that is made of others: stacked, joined, chunked, split, transposed.

    Layout.stored("gate.0", (4, 3)), Layout.stored("gate.1", (4, 3))  --torch.stack-->  Layout of shape (2, 4, 3)

Torch's own functions take a layout in place of a tensor. It is a set of windows: boxes that together fill the tensor,
each a strided view of one stored tensor. Nothing of the tensor's own size is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Window(NamedTuple):
    """A box of a tensor whose entries all are in one stored tensor, called ``key``."""

    key: str
    start: tuple[int, ...]  # the box's first coordinate, in each dimension
    place: Tensor  # the box as a view of the stored tensor, on the meta device

    @property
    def offset(self) -> int:
        """The flat position in the stored tensor of the box's first entry."""
        return int(self.place.storage_offset())

    @property
    def box(self) -> tuple[slice, ...]:
        """The box as an index into the tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.place.shape, strict=True))

    def view(self, stored: Tensor) -> Tensor:
        """The box as a view of the stored tensor, which has to be contiguous."""
        return stored.as_strided(self.place.shape, self.place.stride(), stored.storage_offset() + self.offset)


class Part(NamedTuple):
    """Those of the located entries that are in one window, of the stored tensor called ``key``."""

    key: str
    indices: Tensor  # (count,) int64, flat in the stored tensor, strictly increasing
    entries: Tensor  # (count,) int64, numbers of these among the located entries


class Layout:
    """A tensor that is made of stored ones, without its values: its shape, and the boxes that fill it.

    Example:
        >>> experts = [Layout.stored(f"experts.{i}", (2, 3)) for i in range(2)]
        >>> layout = torch.stack(experts)
        >>> layout.shape
        torch.Size([2, 2, 3])
        >>> layout.locate(torch.tensor([1, 8]))
        [Part(key='experts.0', indices=tensor([1]), entries=tensor([0])), \
Part(key='experts.1', indices=tensor([2]), entries=tensor([1]))]
    """

    def __init__(self, shape: Sequence[int], windows: Iterable[Window]) -> None:
        self.shape = torch.Size(shape)
        self.windows = tuple(windows)

    @classmethod
    def stored(cls, key: str, shape: Sequence[int]) -> Layout:
        """The layout of a stored tensor itself."""
        return cls(shape, [Window(key, (0,) * len(shape), torch.empty(shape, device="meta"))])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _FUNCTIONS:
            raise NotImplementedError(f"{getattr(func, '__name__', func)} of a layout")
        return _FUNCTIONS[func](*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def contiguous(self) -> Layout:
        return self

    @property
    def keys(self) -> list[str]:
        """Names of the stored tensors, each once."""
        return list(dict.fromkeys(window.key for window in self.windows))

    def locate(self, indices: Tensor) -> list[Part]:
        """Finds where entries at flat positions (count,) int64, strictly increasing, are stored, by window."""
        if len(self.windows) == 1 and self.windows[0].place.is_contiguous():
            window = self.windows[0]
            return [Part(window.key, indices + window.offset, torch.arange(indices.numel()))]
        parts = []
        for window in self.windows:
            begin, end = torch.searchsorted(indices, torch.tensor(self._range(window))).tolist()
            near = indices[begin:end]
            inside, flat = torch.ones_like(near, dtype=torch.bool), torch.full_like(near, window.offset)
            coordinates = torch.unravel_index(near, self.shape)
            for coordinate, box, stride in zip(coordinates, window.box, window.place.stride(), strict=True):
                inside &= (coordinate >= box.start) & (coordinate < box.stop)
                flat += (coordinate - box.start) * stride
            entries = inside.nonzero().flatten()
            if entries.numel():
                flat, order = flat[entries].sort()
                parts.append(Part(window.key, flat, begin + entries[order]))
        return parts

    def assemble(self, read: Callable[[str], Tensor]) -> Tensor:
        """The tensor itself, from stored ones by name: a view if it is a single box."""
        if len(self.windows) == 1:
            return self.windows[0].view(read(self.windows[0].key))
        result = torch.empty(self.shape, dtype=read(self.windows[0].key).dtype)
        for window in self.windows:
            result[window.box] = window.view(read(window.key))
        return result

    def _range(self, window: Window) -> list[int]:
        """The flat positions from a window's first entry up to after its last one."""
        first = last = 0
        for size, box in zip(self.shape, window.box, strict=True):
            first, last = first * size + box.start, last * size + box.stop - 1
        return [first, last + 1]


def _stack(layouts: Sequence[Layout], dim: int = 0) -> Layout:
    dim %= layouts[0].ndim + 1
    rows = []
    for layout in layouts:
        windows = [Window(w.key, (*w.start[:dim], 0, *w.start[dim:]), w.place.unsqueeze(dim)) for w in layout.windows]
        rows.append(Layout((*layout.shape[:dim], 1, *layout.shape[dim:]), windows))
    return _cat(rows, dim)


def _cat(layouts: Sequence[Layout], dim: int = 0) -> Layout:
    shape = list(layouts[0].shape)
    dim %= len(shape)
    if len({(*layout.shape[:dim], *layout.shape[dim + 1 :]) for layout in layouts}) > 1:
        raise ValueError("shapes do not go together")
    windows: list[Window] = []
    shape[dim] = 0
    for layout in layouts:
        windows += [window._replace(start=_moved(window.start, dim, shape[dim])) for window in layout.windows]
        shape[dim] += layout.shape[dim]
    return Layout(shape, windows)


def _cut(function: Any, layout: Layout, size: int | Sequence[int], dim: int = 0) -> tuple[Layout, ...]:
    """The pieces that ``torch.split`` or ``torch.chunk`` makes of a tensor."""
    dim %= layout.ndim
    pieces, start = [], 0
    for piece in function(torch.empty(layout.shape[dim]), size):
        windows, end = [], start + len(piece)
        for window in layout.windows:
            box = window.box[dim]
            first, last = max(box.start, start), min(box.stop, end)
            if first < last:
                place = window.place.narrow(dim, first - box.start, last - first)
                windows.append(Window(window.key, _moved(window.start, dim, first - box.start - start), place))
        pieces.append(Layout((*layout.shape[:dim], len(piece), *layout.shape[dim + 1 :]), windows))
        start = end
    return tuple(pieces)


def _transpose(layout: Layout, dim0: int, dim1: int) -> Layout:
    order = list(range(layout.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    windows = [Window(w.key, tuple(w.start[dim] for dim in order), w.place.permute(order)) for w in layout.windows]
    return Layout([layout.shape[dim] for dim in order], windows)


def _moved(start: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return (*start[:dim], start[dim] + by, *start[dim + 1 :])


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.split: lambda layout, split_size_or_sections, dim=0: _cut(torch.split, layout, split_size_or_sections, dim),
    torch.chunk: lambda layout, chunks, dim=0: _cut(torch.chunk, layout, chunks, dim),
    torch.transpose: _transpose,
}
