"""A model's weights wherever they are, by name: in a model, or in safetensors files that are never read as a whole.

In: a model, or the path of a checkpoint as ``save_pretrained`` writes it, in one file or in shards. Out: a mapping from
tensor names to tensors. Those of a checkpoint are mapped from their file when they are asked for, so that looking at a
few entries of each costs a few pages of memory, whatever the model's size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sparsify.errors import SparsifyError
from sparsify.names import named_tensors

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


def open_base(base: nn.Module | str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """The tensors of a base by name.

    Args:
        base: a model, wrapped or not, or the path of a checkpoint.

    Returns:
        For a model, its own tensors by plain name; for a path, a :class:`Checkpoint`.

    Raises:
        SparsifyError: when there is no checkpoint at the path.
    """
    return named_tensors(base) if isinstance(base, nn.Module) else Checkpoint(base)


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each mapped from its file when it is asked for.

    Args:
        path: a folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and the shards that it
            names; or a safetensors file.

    Raises:
        SparsifyError: when there is no such checkpoint, its index is broken, or a shard is missing.

    Attributes:
        path: the folder, or the file.
        files: the safetensors files, in the order of their names.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.files = _weight_files(self.path)
        self._file_of: dict[str, Path] = {}
        for file in self.files:
            for name in _names_in(file):
                if name in self._file_of:
                    raise SparsifyError(
                        f"`{name}` is both in `{self._file_of[name].name}` and in `{file.name}` of `{self.path}`: the "
                        "checkpoint is damaged, download or save it again."
                    )
                self._file_of[name] = file

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._file_of[name], framework="pt", device="cpu") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._file_of[name]


def _weight_files(path: Path) -> tuple[Path, ...]:
    if path.is_file():
        return (path,)
    if (path / WEIGHTS_NAME).is_file():
        return (path / WEIGHTS_NAME,)
    if (path / INDEX_NAME).is_file():
        return _shards(path / INDEX_NAME)
    raise SparsifyError(
        f"`{path}` holds no checkpoint: expected a folder with `{WEIGHTS_NAME}` or `{INDEX_NAME}`, or a safetensors "
        "file. A checkpoint in another format can be converted with `from_pretrained` and `save_pretrained`."
    )


def _shards(index: Path) -> tuple[Path, ...]:
    """The files that an index names: plain names, next to the index, all there."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SparsifyError(f"`{index}` is no index of a checkpoint ({error!r}): download it again.") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise SparsifyError(f"`{index}` names the shard {name!r}, expected the name of a file next to it.")
        if not (index.parent / name).is_file():
            raise SparsifyError(f"the shard `{name}` that `{index}` names is missing: download the checkpoint again.")
    return tuple(index.parent / name for name in names)


def _names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise SparsifyError(f"`{file}` is no safetensors file ({error}): download or save it again.") from error
