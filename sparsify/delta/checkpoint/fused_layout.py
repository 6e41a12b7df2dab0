"""Where the entries of a tensor lie that is made of others: stacked, concatenated, chunked, split, or transposed.

In: stored tensors, of which only names and shapes matter. Out: a :class:`Layout`, which torch's own functions take in
place of a tensor and which, at the end, says for any flat index which stored tensor holds that entry, and where.

    Layout.stored("gate.0", (4, 3)), Layout.stored("gate.1", (4, 3))  --torch.stack-->  Layout of shape (2, 4, 3)

A layout is a set of windows: boxes of the tensor that together fill it, each a strided view of one stored tensor.
All arithmetic is O(entries + windows); nothing of the tensor's own size is ever made.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Window(NamedTuple):
    """A box of a tensor whose entries all lie in one stored tensor.

    Attributes:
        key: the stored tensor's name.
        start: the box's first coordinate, in each dimension.
        size: its extent.
        stride: how far apart in the stored tensor, in entries, neighbours in each dimension are.
        offset: the flat position in the stored tensor of the box's first entry.
    """

    key: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, stored: Tensor) -> Tensor:
        """The box as a view of the stored tensor, which has to be contiguous."""
        return stored.as_strided(self.size, self.stride, stored.storage_offset() + self.offset)

    @property
    def box(self) -> tuple[slice, ...]:
        """The box as an index into the tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))


class Part(NamedTuple):
    """Those of the entries asked for that lie in one stored tensor.

    Attributes:
        key: the stored tensor's name.
        indices: (count,) int64, flat in the stored tensor, strictly increasing.
        entries: (count,) int64, which of the entries asked for these are.
    """

    key: str
    indices: Tensor
    entries: Tensor


class Layout:
    """A tensor that is made of stored ones, without its values.

    Args:
        shape: its shape.
        windows: the boxes that fill it.

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
        """The layout of a tensor that is stored as it is."""
        return cls(shape, [Window(key, (0,) * len(shape), tuple(shape), _contiguous_stride(shape), 0)])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Lets torch's functions take a layout for a tensor."""
        if func not in _FUNCTIONS:
            raise NotImplementedError(f"{getattr(func, '__name__', func)} of a layout")
        return _FUNCTIONS[func](*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def contiguous(self) -> Layout:
        """Itself: where a tensor's copies lie does not matter to a layout."""
        return self

    @property
    def keys(self) -> list[str]:
        """Names of the stored tensors, each once."""
        return list(dict.fromkeys(window.key for window in self.windows))

    def locate(self, indices: Tensor) -> list[Part]:
        """The stored tensors that hold some entries, and where.

        Args:
            indices: (count,) int64, flat row-major positions in this tensor, strictly increasing.

        Returns:
            A part for each window that holds any, in the order of the windows.
        """
        if self._is_flat:
            window = self.windows[0]
            return [Part(window.key, indices + window.offset, torch.arange(indices.numel()))]
        coordinates = [dim.contiguous() for dim in torch.unravel_index(indices, self.shape)]
        number = self._window_of(coordinates)
        order = number.argsort(stable=True)
        counts = torch.bincount(number, minlength=len(self.windows)).tolist()
        return [
            _part(window, coordinates, entries)
            for window, entries in zip(self.windows, order.split(counts), strict=True)
            if entries.numel()
        ]

    def assemble(self, read: Callable[[str], Tensor]) -> Tensor:
        """The tensor itself: a view of what is stored where it is one box, else a copy of all boxes.

        Args:
            read: gives a stored tensor by name.
        """
        if len(self.windows) == 1:
            return self.windows[0].view(read(self.windows[0].key))
        result = torch.empty(self.shape, dtype=read(self.windows[0].key).dtype)
        for window in self.windows:
            result[window.box] = window.view(read(window.key))
        return result

    @property
    def _is_flat(self) -> bool:
        """Whether flat positions are the stored tensor's, up to an offset."""
        return len(self.windows) == 1 and self.windows[0].stride == _contiguous_stride(self.shape)

    def _window_of(self, coordinates: Sequence[Tensor]) -> Tensor:
        """The windows (count,) by number that hold the entries at some coordinates."""
        # The windows' starts cut the tensor into a grid; a table says which window each cell belongs to.
        edges = [sorted({window.start[dim] for window in self.windows}) for dim in range(self.ndim)]
        table = torch.zeros([len(starts) for starts in edges], dtype=torch.int64)
        for number, window in enumerate(self.windows):
            cells = tuple(
                slice(bisect_left(starts, first), bisect_left(starts, first + size))
                for starts, first, size in zip(edges, window.start, window.size, strict=True)
            )
            table[cells] = number
        cell = tuple(
            torch.searchsorted(torch.tensor(starts), coordinate, right=True) - 1
            for starts, coordinate in zip(edges, coordinates, strict=True)
        )
        return table[cell]


def _part(window: Window, coordinates: Sequence[Tensor], entries: Tensor) -> Part:
    """Some entries (count,), all in the window."""
    flat = torch.full_like(entries, window.offset)
    for coordinate, start, stride in zip(coordinates, window.start, window.stride, strict=True):
        flat += (coordinate[entries] - start) * stride
    indices, order = flat.sort()
    return Part(window.key, indices, entries[order])


def _stack(layouts: Sequence[Layout], dim: int = 0) -> Layout:
    shape = _common_shape(layouts, lambda layout: list(layout.shape))
    dim %= len(shape) + 1
    windows = [
        Window(
            window.key,
            _insert(window.start, dim, number),
            _insert(window.size, dim, 1),
            _insert(window.stride, dim, 0),
            window.offset,
        )
        for number, layout in enumerate(layouts)
        for window in layout.windows
    ]
    return Layout(_insert(shape, dim, len(layouts)), windows)


def _cat(layouts: Sequence[Layout], dim: int = 0) -> Layout:
    dim %= layouts[0].ndim
    shape = _common_shape(layouts, lambda layout: _replace(layout.shape, dim, 0))
    windows, length = [], 0
    for layout in layouts:
        windows += [w._replace(start=_replace(w.start, dim, w.start[dim] + length)) for w in layout.windows]
        length += layout.shape[dim]
    return Layout(_replace(shape, dim, length), windows)


def _split(layout: Layout, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Layout, ...]:
    """Pieces of one size, the last maybe smaller, or of the given sizes."""
    dim %= layout.ndim
    sizes, length = split_size_or_sections, layout.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    if sum(sizes) != length:
        raise ValueError(f"sizes {list(sizes)} do not add up to {length}")
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(_slice(layout, dim, start, size) for start, size in zip(starts, sizes, strict=True))


def _chunk(layout: Layout, chunks: int, dim: int = 0) -> tuple[Layout, ...]:
    return _split(layout, max(1, math.ceil(layout.shape[dim] / chunks)), dim)


def _transpose(layout: Layout, dim0: int, dim1: int) -> Layout:
    def swap(values: Sequence[int]) -> tuple[int, ...]:
        result = list(values)
        result[dim0], result[dim1] = result[dim1], result[dim0]
        return tuple(result)

    windows = [w._replace(start=swap(w.start), size=swap(w.size), stride=swap(w.stride)) for w in layout.windows]
    return Layout(swap(layout.shape), windows)


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.split: _split,
    torch.chunk: _chunk,
    torch.transpose: _transpose,
}


def _slice(layout: Layout, dim: int, start: int, size: int) -> Layout:
    """The entries from ``start`` on along a dimension."""
    windows = []
    for window in layout.windows:
        first = max(window.start[dim], start)
        end = min(window.start[dim] + window.size[dim], start + size)
        if first < end:
            windows.append(
                window._replace(
                    start=_replace(window.start, dim, first - start),
                    size=_replace(window.size, dim, end - first),
                    offset=window.offset + (first - window.start[dim]) * window.stride[dim],
                )
            )
    return Layout(_replace(layout.shape, dim, size), windows)


def _common_shape(layouts: Sequence[Layout], shape_of: Callable[[Layout], Sequence[int]]) -> tuple[int, ...]:
    shapes = {tuple(shape_of(layout)) for layout in layouts}
    if len(shapes) != 1:
        raise ValueError(f"shapes {sorted(shapes)} do not go together")
    return shapes.pop()


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _insert(values: Sequence[int], position: int, value: int) -> tuple[int, ...]:
    return (*values[:position], value, *values[position:])


def _replace(values: Sequence[int], position: int, value: int) -> tuple[int, ...]:
    return (*values[:position], value, *values[position + 1 :])
