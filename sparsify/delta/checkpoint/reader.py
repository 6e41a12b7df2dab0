"""A base's tensors by name, from a model or from safetensors files, which are never read as a whole.

A checkpoint's tensors are mapped from their file on access, so that a few entries of each cost a few pages of memory.
They have the names in the files, and those that the model has at run time, where transformers renames or fuses them.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sparsify.common.names import check_plain, named_tensors, near_names
from sparsify.common.raw_bits import same_values
from sparsify.delta.checkpoint.conversion import Conversion, Layout
from sparsify.errors import BaseMismatchError, SparsifyError, brief

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_MOST_JSON_BYTES = 2**26


class Stored(NamedTuple):
    """The place of a stored tensor."""

    file: Path
    dtype: str  # safetensors' name: F32, BF16
    shape: tuple[int, ...]
    begin: int  # position of its first byte in the file
    nbytes: int


def open_base(base: nn.Module | str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """The tensors of a base by name: a model's, which must not be in training, or a :class:`Checkpoint`'s."""
    if not isinstance(base, nn.Module):
        return Checkpoint(base)
    check_plain(base)
    return named_tensors(base)


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name in the files or, as ``from_pretrained`` makes them, at run time.

    Iteration is over the names in the files, by which ``stored`` has the place of each tensor.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise SparsifyError(f"the base is a {type(path).__name__}, expected a model, or the path of a checkpoint.")
        self.path = Path(path)
        self.folder = self.path if self.path.is_dir() else self.path.parent
        self.files = _weight_files(self.path)
        self.stored: dict[str, Stored] = {}
        for file in self.files:
            for name, stored in read_header(file).items():
                if (first := self.stored.setdefault(name, stored)) is not stored:
                    places = f"`{first.file.name}` and in `{file.name}`"
                    raise SparsifyError(f"`{name}` is both in {places}: download or save it again.")

    def __getitem__(self, name: str) -> Tensor:
        layout = self.layout(name)
        with suppress(SparsifyError):  # transformers transposes some tensors under their own names
            layout = next(iter(self.conversion.find(name)), layout)
        return layout.assemble(self.read)

    def __contains__(self, name: object) -> bool:
        return name in self.stored or (isinstance(name, str) and bool(self.conversion.find(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def plain_names(self) -> list[str]:
        """The tensors' names at run time, each tied one's once, or those in the files of a model that is not known."""
        if self.conversion.problem:
            return list(self)
        first = {name: self.conversion.aliases(name)[0] for name in self.conversion.layouts}
        kept = [name for name, own in first.items() if name == own or not same_values(self[name], self[own])]
        return [self.conversion.tied.get(name, [name])[0] if name == first[name] else name for name in kept]

    def lacking(self, names: Iterable[str]) -> list[str]:
        """Those of a model's names that ``from_pretrained`` would not find here; none if it does not know the model."""
        others = (name for name in names if name not in self.stored)
        return [name for name in others if not (self.conversion.problem or self.conversion.aliases(name))]

    def read(self, name: str) -> Tensor:
        """A stored tensor, mapped from its file, by its name there."""
        with safe_open(self.stored[name].file, framework="pt", device="cpu") as file:
            return file.get_tensor(name)

    def layout(self, name: str) -> Layout:
        """The places of a tensor's entries, by its name in the files or at run time; raises where it has none."""
        layer = name.removesuffix(".weight")  # its scales are called so by bitsandbytes, or so by torchao
        if layer != name and {f"{name}.absmax", f"{layer}.SCB", f"{layer}._weight_qdata"} & self.stored.keys():
            remedy = "give the one from before that, or put the delta onto the model, load_model(base, delta)."
            raise BaseMismatchError(f"tensor `{name}` is quantized in the checkpoint `{self.path}`: {remedy}")
        if name in self.stored:
            return Layout.stored(name, self.stored[name].shape)
        if layouts := self.conversion.find(name):
            return layouts[0]
        reason = "transformers loads none under that name either"
        if problem := self.conversion.problem:
            reason = f"what its tensors are called in a model is not known, since {problem}"
        reason += ". Give the base that the delta was trained on, with its `config.json` next to the weights."
        near = near_names(name, self)
        raise BaseMismatchError(f"the checkpoint `{self.path}` has no tensor `{name}`{near}, and {reason}")

    def copies(self, name: str, first: Layout) -> list[Layout]:
        """All layouts of a tensor, of which one is ``first``: equal copies of a tied one have to change together."""
        if list(first.keys) == [name] and self._starts[self._start(name)] == 1:
            return [first]  # without transformers
        try:
            tied = [layout for layout in self.conversion.find(name) if layout.keys != first.keys]
        except SparsifyError:  # stored as in the delta, though transformers would convert it
            tied = []
        return [first, *(own for own in tied if same_values(own.assemble(self.read), first.assemble(self.read)))]

    @cached_property
    def _starts(self) -> Counter[tuple[object, ...]]:
        return Counter(map(self._start, self.stored))

    def _start(self, key: str) -> tuple[object, ...]:
        """Dtype, shape and first bytes of a stored tensor, in which equal ones agree."""
        stored = self.stored[key]
        return stored.dtype, stored.shape, self.read(key).flatten()[:999].view(torch.uint8).numpy().tobytes()

    def take(self, layout: Layout, indices: Tensor) -> Tensor:
        """The values (count,) at flat positions (count,) int64, strictly increasing; only their pages are read."""
        values = indices.new_empty(indices.numel(), dtype=self.dtype(layout))
        for part in layout.locate(indices):
            values[part.entries] = self.read(part.key).take(part.indices)
        return values

    def dtype(self, layout: Layout) -> torch.dtype:
        """The dtype of a tensor; raises where it is made of stored tensors of several dtypes."""
        if len({self.stored[key].dtype for key in layout.keys}) > 1:
            several = f"`{layout.keys[0]}` and {len(layout.keys) - 1} more tensors of `{self.path}`, one in the model,"
            raise SparsifyError(f"{several} are stored in several dtypes: save the checkpoint again in one.")
        return self.read(layout.keys[0]).dtype

    @cached_property
    def conversion(self) -> Conversion:
        return Conversion({name: stored.shape for name, stored in self.stored.items()}, self.folder)


def _weight_files(path: Path) -> tuple[Path, ...]:
    """The file, that in the folder, or those that the folder's index names, checked to be existing files in it."""
    for file in (path, path / WEIGHTS_NAME):
        if file.is_file():
            return (file,)
    index = path / INDEX_NAME
    if not path.exists():
        download = f"one on the hub has to be downloaded first, which `hf download {path}` does."
        raise SparsifyError(f"`{path}` does not exist: give the path of a checkpoint; {download}")
    if not index.is_file():
        raise SparsifyError(f"`{path}` holds no checkpoint: expected a folder with `{WEIGHTS_NAME}`, or such a file.")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SparsifyError(f"`{index}` is no index of a checkpoint, which has a `weight_map`: download it again.")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise SparsifyError(f"`{index}` names the shard {name!r:.100}, expected the name of a file next to it.")
        if not os.path.isfile(path / name):  # Path.is_file raises for a name that no file can have
            raise SparsifyError(f"the shard {name!r:.100} that `{index}` names is missing: download it again.")
    return tuple(path / name for name in sorted(set(weight_map.values())))


def read_json(path: Path, kind: type = dict) -> Any:
    """The JSON object, or list, in a file of a checkpoint or adapter."""
    try:
        if not path.is_file():  # nor a pipe, which may never end
            raise FileNotFoundError("there is no such file")
        if path.stat().st_size > _MOST_JSON_BYTES:
            raise ValueError(f"it has more than {_MOST_JSON_BYTES:,} bytes")
        document = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(document, indent=2)  # fails at a lower depth than reading
    except (OSError, ValueError, RecursionError) as error:
        raise SparsifyError(f"`{path}` is no JSON that can be used ({brief(error)}): download it again.") from error
    if not isinstance(document, kind):
        expected = f"expected a JSON {'object' if kind is dict else 'list'}"
        raise SparsifyError(f"`{path}` holds a {type(document).__name__}, {expected}: download it again.")
    return document


def read_header(file: Path) -> dict[str, Stored]:
    """The places of the tensors of a safetensors file."""
    try:
        with safe_open(file, framework="pt", device="cpu"):
            pass  # checks the whole header, and the file's length
    except SafetensorError as error:
        raise SparsifyError(f"`{file}` is no safetensors file ({brief(error)}): download or save it again.") from error
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    entries = [(name, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in header.items()]
    start = 8 + length
    return {name: Stored(file, dtype, shape, start + begin, end - begin) for name, dtype, shape, begin, end in entries}
