"""Maps a model's names at run time to the tensors in a checkpoint that transformers renames or fuses at load.

The model is built without weights, and transformers' own conversions of tensors are run on layouts, which torch's
functions take in place of tensors: windows, boxes that together fill the tensor. Nothing of the tensor's own size is
allocated. Conversions that layouts cannot follow (permuting, interleaving, dequantizing) are an error by name.
Transformers 4 only renames tensors.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsify.common.names import tied_names
from sparsify.errors import SparsifyError, brief

_COUNTED = re.compile("layer|depth|expert|label")  # in names of settings that are numbers of modules


class Conversion:
    """A checkpoint's tensors as ``from_pretrained`` would name and arrange them; none where there is a ``problem``.

    ``layouts`` and ``tied`` are by name at run time; in place of a layout that cannot be followed: names of operations.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
        self.layouts: dict[str, Layout | str] = {}
        self.problem, self._prefix, self.tied = "", "", dict[str, list[str]]()
        try:
            model = _model_without_weights(folder, len(shapes))
            self._prefix, self.tied = model.base_model_prefix, tied_names(model)
            names = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
            known, of_earlier_versions = model.state_dict().keys(), re.compile("|".join(names)).search
            converted = _convert(model, shapes).items()
            self.layouts = {name: own for name, own in converted if name in known or not of_earlier_versions(name)}
        except SparsifyError as error:
            self.problem = str(error)

    def aliases(self, name: str) -> list[str]:
        """A tensor's names in ``layouts``, the first of tied ones first, with and without the prefix under the head."""
        tied = [tied for plain in self._prefixed(name) for tied in self.tied.get(plain, (plain,))]
        return [alias for plain in tied for alias in self._prefixed(plain) if alias in self.layouts]

    def find(self, name: str) -> "list[Layout]":
        """A tensor's layouts: several where a tied tensor is stored under several names, none if it is missing."""
        found: dict[tuple[str, ...], Layout] = {}
        for alias in self.aliases(name):
            layout = self.layouts[alias]
            if isinstance(layout, str):
                how = f"in a way that single entries cannot be followed through ({layout})"
                remedy = "load the model with `from_pretrained`, `apply` the delta, and `save_pretrained`."
                raise SparsifyError(f"transformers converts tensor `{name}` at load {how}: {remedy}")
            found.setdefault(tuple(layout.keys), layout)
        return list(found.values())

    def _prefixed(self, name: str) -> tuple[str, ...]:
        prefix = f"{self._prefix}."
        other = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
        return (name, other) if self._prefix else (name,)


def _model_without_weights(folder: Path, num_tensors: int) -> Any:
    """Builds the model of a folder's ``config.json`` on the meta device; runs no code from the folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise SparsifyError(f"`{folder}` has no `config.json` that says what model it is")
    import transformers

    try:
        _check_counts(json.loads(file.read_text(encoding="utf-8")), num_tensors)
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        classes: Any = [getattr(transformers, name, None) for name in config.architectures or ()]
        with torch.device("meta"):
            for model_class in classes:
                is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
                # a class of another family would be built in its own default size
                if is_model and isinstance(config, model_class.config_class or ()):
                    return model_class(config)
            return transformers.AutoModel.from_config(config, trust_remote_code=False)
    except Exception as error:  # third parties' code for hundreds of models
        raise SparsifyError(f"transformers cannot build the model of `{file}` ({brief(error)})") from error


def _check_counts(config: object, num_tensors: int) -> None:
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, int) and value > 50_000 + 10 * num_tensors and _COUNTED.search(key):
            raise SparsifyError(f"`{brief(key, 100)}` is {brief(value, 30)} for {num_tensors:,} tensors: it is damaged")
        _check_counts(value, num_tensors)


def _convert(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> "dict[str, Layout | str]":
    """Layouts, or names of operations, as transformers' ``convert_and_load_state_dict_in_model`` makes tensors."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:  # transformers 4 only renames
        from transformers.modeling_utils import VLMS  # type: ignore[attr-defined]

        classes = [cls.__name__.lower() for cls in type(model).__mro__]
        # ``from_pretrained`` maps no other models' names
        mapping = model._checkpoint_conversion_mapping if any(n in cls for cls in classes for n in VLMS) else None
        names = model._get_key_renaming_mapping(list(shapes), mapping)  # by stored name, some of them legacy names
        return {names[key]: Layout.stored(key, shape) for key, shape in shapes.items()}

    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    expected = model.state_dict()
    layouts: dict[str, Layout | str] = {}
    converting: dict[str, Any] = {}
    for key in sorted(shapes, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, expected)
        if name not in expected and key in expected:  # the rules were for an older layout of the checkpoint
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, expected)
        layout = Layout.stored(key, shapes[key])
        if pattern is None:
            layouts.setdefault(name, layout)
        else:
            converter = converting.setdefault(name, deepcopy(converter_of[pattern]))
            converter.add_tensor(name, key, pattern, layout)
    for name, converter in converting.items():
        try:
            converted = converter.convert(name, model=model, config=model.config)
            layouts |= {target: value[0] if isinstance(value, list) else value for target, value in converted.items()}
        except Exception:  # an operation that layouts do not have may raise any error
            operations = ", ".join(type(operation).__name__ for operation in converter.operations)
            first, *_ = converter.target_patterns
            layouts |= {name.replace(first, target): operations for target in converter.target_patterns}
    return layouts


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
    entries: Tensor | slice  # (count,) int64, numbers of these among the located entries, or all of them


class Layout:
    """A tensor that is made of stored ones, without its values: its shape, and the boxes that fill it."""

    def __init__(self, shape: Sequence[int], windows: Iterable[Window]) -> None:
        self.shape = torch.Size(shape)
        self.windows = tuple(windows)

    @classmethod
    def stored(cls, key: str, shape: Sequence[int]) -> "Layout":
        return cls(shape, [Window(key, tuple(map(slice, [0] * len(shape), shape)), torch.empty(shape, device="meta"))])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in _FUNCTIONS:
            raise NotImplementedError(f"{getattr(func, '__name__', func)} of a layout")
        return _FUNCTIONS[func](*args, **(kwargs or {}))

    def contiguous(self) -> "Layout":
        return self

    @property
    def keys(self) -> list[str]:
        """Names of the stored tensors, each once."""
        return list(dict.fromkeys(window.key for window in self.windows))

    def locate(self, indices: Tensor) -> list[Part]:
        """Finds where entries at flat positions (count,) int64, strictly increasing, are stored, by window."""
        if len(self.windows) == 1 and self.windows[0].place.is_contiguous():
            window = self.windows[0]
            return [Part(window.key, indices + int(window.place.storage_offset()), slice(None))]
        parts = []
        for window in self.windows:
            corners = np.ravel_multi_index(tuple((s.start, s.stop - 1) for s in window.box), self.shape, mode="clip")
            begin, end = torch.searchsorted(indices, torch.from_numpy(corners + np.array([0, 1]))).tolist()
            near = torch.stack(torch.unravel_index(indices[begin:end], self.shape))  # (ndim, count) coordinates
            local = near - near.new_tensor([s.start for s in window.box])[:, None]
            inside = ((local >= 0) & (local < local.new_tensor(window.place.shape)[:, None])).all(dim=0)
            if (entries := inside.nonzero().flatten()).numel():
                offset, strides = int(window.place.storage_offset()), local.new_tensor(window.place.stride())
                flat, order = (offset + strides @ local[:, entries]).sort()
                parts.append(Part(window.key, flat, begin + entries[order]))
        return parts

    def assemble(self, read: Callable[[str], Tensor]) -> Tensor:
        """The tensor itself, from stored ones by name: a view if it is a single box."""
        if len(self.windows) == 1:
            return self.windows[0].view(read(self.windows[0].key))
        result = read(self.windows[0].key).new_empty(self.shape)
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
