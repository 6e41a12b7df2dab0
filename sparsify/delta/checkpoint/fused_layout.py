"""The places where a tensor's entries are stored that is made of others: stacked, joined, chunked, split, transposed.

Torch's own functions take a layout in place of a tensor. It is a set of windows, boxes that together fill the tensor,
and nothing of the tensor's own size is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Window(NamedTuple):
    """A box of a tensor whose entries all are in one stored tensor, called ``key``."""

    key: str
    box: tuple[slice, ...]  # its coordinates, an index into the tensor
    place: Tensor  # the same as a view of the stored tensor, on the meta device

    def view(self, stored: Tensor) -> Tensor:
        """The box as a view of the stored tensor, which has to be contiguous."""
        offset = stored.storage_offset() + self.place.storage_offset()
        return stored.as_strided(self.place.shape, self.place.stride(), offset)


class Part(NamedTuple):
    """Those of the located entries that are in one window, of the stored tensor called ``key``."""

    key: str
    indices: Tensor  # (count,) int64, flat in the stored tensor, strictly increasing
    entries: Tensor  # (count,) int64, numbers of these among the located entries


class Layout:
    """A tensor that is made of stored ones, without its values: its shape, and the boxes that fill it."""

    def __init__(self, shape: Sequence[int], windows: Iterable[Window]) -> None:
        self.shape = torch.Size(shape)
        self.windows = tuple(windows)

    @classmethod
    def stored(cls, key: str, shape: Sequence[int]) -> Layout:
        return cls(shape, [Window(key, tuple(map(slice, [0] * len(shape), shape)), torch.empty(shape, device="meta"))])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in _FUNCTIONS:
            raise NotImplementedError(f"{getattr(func, '__name__', func)} of a layout")
        return _FUNCTIONS[func](*args, **(kwargs or {}))

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
            return [Part(window.key, indices + int(window.place.storage_offset()), torch.arange(indices.numel()))]
        parts = []
        for window in self.windows:
            corners = np.ravel_multi_index(tuple((s.start, s.stop - 1) for s in window.box), self.shape, mode="clip")
            begin, end = torch.searchsorted(indices, torch.from_numpy(corners) + torch.tensor([0, 1])).tolist()
            near = torch.stack(torch.unravel_index(indices[begin:end], self.shape))  # (ndim, count) coordinates
            local = near - torch.tensor([s.start for s in window.box])[:, None]
            inside = ((local >= 0) & (local < torch.tensor(window.place.shape)[:, None])).all(dim=0)
            entries = inside.nonzero().flatten()
            if entries.numel():
                offset, strides = int(window.place.storage_offset()), torch.tensor(window.place.stride())
                flat, order = (offset + strides @ local[:, entries]).sort()
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


def _stack(layouts: Sequence[Layout], dim: int = 0) -> Layout:
    dim %= len(layouts[0].shape) + 1
    rows = []
    for layout in layouts:
        boxes = [(*w.box[:dim], slice(0, 1), *w.box[dim:]) for w in layout.windows]
        windows = [Window(w.key, box, w.place.unsqueeze(dim)) for w, box in zip(layout.windows, boxes, strict=True)]
        rows.append(Layout((*layout.shape[:dim], 1, *layout.shape[dim:]), windows))
    return _cat(rows, dim)


def _cat(layouts: Sequence[Layout], dim: int = 0) -> Layout:
    shape = torch.cat([torch.empty(layout.shape, device="meta") for layout in layouts], dim).shape
    windows: list[Window] = []
    begin = 0
    for layout in layouts:
        windows += [_moved(window, dim, window.box[dim].start + begin, window.place) for window in layout.windows]
        begin += layout.shape[dim]
    return Layout(shape, windows)


def _cut(function: Any, layout: Layout, size: int | Sequence[int], dim: int = 0) -> tuple[Layout, ...]:
    """The pieces that ``torch.split`` or ``torch.chunk`` makes of a tensor."""
    pieces, begin = [], 0
    for piece in function(torch.empty(layout.shape, device="meta"), size, dim):
        windows, end = [], begin + piece.shape[dim]
        for window in layout.windows:
            box = window.box[dim]
            first, last = max(box.start, begin), min(box.stop, end)
            if first < last:
                place = window.place.narrow(dim, first - box.start, last - first)
                windows.append(_moved(window, dim, first - begin, place))
        pieces.append(Layout(piece.shape, windows))
        begin = end
    return tuple(pieces)


def _transpose(layout: Layout, dim0: int, dim1: int) -> Layout:
    order = list(range(len(layout.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    windows = [Window(w.key, tuple(w.box[dim] for dim in order), w.place.permute(order)) for w in layout.windows]
    return Layout([layout.shape[dim] for dim in order], windows)


def _moved(window: Window, dim: int, start: int, place: Tensor) -> Window:
    box = list(window.box)
    box[dim] = slice(start, start + place.shape[dim])
    return Window(window.key, tuple(box), place)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.split: partial(_cut, torch.split),
    torch.chunk: partial(_cut, torch.chunk),
    torch.transpose: _transpose,
}
