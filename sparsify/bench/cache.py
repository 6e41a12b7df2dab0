"""Files that a benchmark makes once: written whole or not at all, and made anew where they are damaged or foreign.

A file is named after a hash of all that it depends on. It is a safetensors file, whose metadata has that hash, and one
of its tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsify.delta.format import replace_file

KEY, DIGEST = "key", "sha256"


def folder() -> Path:
    """Where the files are: ``sparsify/bench`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "sparsify" / "bench"


def path_of(kind: str, **depends_on: Any) -> Path:
    """The file for that which depends on these values, which have to go into JSON.

    Example:
        >>> path_of("state", budget=10) == path_of("state", budget=10), path_of("state", budget=10) == path_of("state")
        (True, False)
    """
    words = json.dumps({"kind": kind, **depends_on}, sort_keys=True)
    return folder() / f"{kind}-{hashlib.sha256(words.encode()).hexdigest()[:24]}.safetensors"


def save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors, which come back on the CPU."""
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {KEY: path.stem, DIGEST: _digest(kept)}
    replace_file(path, safetensors.torch.save(kept, metadata))


def load(path: Path) -> dict[str, Tensor] | None:
    """What :func:`save` wrote there; ``None`` where there is no such file, it is damaged, or another one's copy."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118, it is no dict
    except (OSError, SafetensorError):
        return None
    return tensors if metadata == {KEY: path.stem, DIGEST: _digest(tensors)} else None


def _digest(tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
