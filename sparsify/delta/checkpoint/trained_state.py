"""Reads the delta out of a checkpoint that was written in training, full or of the trained state alone.

sparse_ids, sparse_base, sparse_values    the entries, numbered through all candidates
sparse_settings                           has a record of the candidates, of what is stored whole, and of the run
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsify.common.names import POSITION, RECORD, SETTINGS, plain_name
from sparsify.common.raw_bits import digest
from sparsify.core.entries import BASE, IDS, VALUES, count_by_tensor
from sparsify.delta.checkpoint.reader import Checkpoint
from sparsify.delta.entries import DTYPES, DeltaParts, StrPath, TensorDelta
from sparsify.delta.format import FILE_NAME, refused
from sparsify.delta.metadata import ENTRIES_IN_WHOLE_KEY, parse_json
from sparsify.errors import SparsifyError, brief

_PICKLED = "pytorch_model.bin"
_READ_AGAIN = "sparsify the same base as then, `load_state_dict` the checkpoint, and take SparseDelta.from_model(model)"


def is_training_checkpoint(path: object) -> bool:
    """Whether a path is the folder of a checkpoint with entries, and not of a delta."""
    folder = Path(path) if isinstance(path, (str, Path)) else None
    if folder is None or not folder.is_dir() or (folder / FILE_NAME).exists():
        return False
    try:
        return bool(_prefixes(_opened(folder)[0]))
    except SparsifyError:
        return False


def read_training_checkpoint(path: StrPath | Mapping[str, Any]) -> DeltaParts:
    """The parts of the delta in a checkpoint; see :meth:`sparsify.SparseDelta.from_checkpoint`."""
    shown = "the state dict" if isinstance(path, Mapping) else f"`{path}`"
    names, read = _opened(path)
    prefix, *others = _prefixes(names) or [None]
    if others:
        raise SparsifyError(f"{shown} is of a model with several sparsified parts: give the state dict of one of them.")
    if prefix is None:
        raise SparsifyError(
            f"{shown} has no `{POSITION}`, so it is no checkpoint of a sparsified model in training: of a merged or "
            "another fine-tuned model take SparseDelta.diff(base, tuned), and SparseDelta.load() of a saved delta."
        )
    with refused(f"{shown} is no checkpoint that can be used", "take an earlier one"):
        settings = parse_json(read(prefix + SETTINGS).to("cpu", torch.uint8).numpy().tobytes().decode())
        if isinstance(settings, dict) and RECORD in settings:
            return _parts(settings, {name.removeprefix(prefix) for name in names}, lambda name: read(prefix + name))
    raise SparsifyError(f"{shown} was written by an earlier version, which did not name its tensors: {_READ_AGAIN}.")


def _parts(settings: dict[str, Any], names: Collection[str], read: Callable[[str], Tensor]) -> DeltaParts:
    record = settings[RECORD]
    steps_done, _, count, _ = read(POSITION).tolist()
    ids, order = read(IDS)[:count].long().sort()
    base, values = (read(name)[:count][order] for name in (BASE, VALUES))
    ends = list(accumulate(math.prod(shape) for _, shape, *_ in record["tensors"]))
    counts = count_by_tensor(ids, ends).tolist()
    tensors: dict[str, TensorDelta] = {}
    in_whole = 0
    entries = zip(*(part.split(counts) for part in (ids, base, values)), strict=True)
    for (name, shape, dtype, scheme), end, (own, old, change) in zip(record["tensors"], ends, entries, strict=True):
        if name in record["whole"]:
            in_whole += own.numel()
        elif dtype is not None and own.numel():
            old = old.to(DTYPES[dtype.strip()])
            new = (old.to(base.dtype) + change).to(old.dtype) if scheme is None else change
            sort = tuple(shape), old.dtype, "replace" if scheme is None else "add", digest(old)
            indices = own - (end - math.prod(shape))
            tensors[plain_name(name)] = TensorDelta(indices, new, *sort, quantization=scheme)
    stored = {name: read(name) for name in (*record["whole"], *record["buffers"]) if name in names}
    if lacking := [name for name in record["whole"] if name not in stored]:
        raise SparsifyError(f"it lacks `{lacking[0]}`, which was trained whole")
    changed = {name: t for name, t in stored.items() if digest(t) != record["buffers"].get(name)}
    config = {**record["config"], "budget": count, "steps": settings.get("steps"), "steps_done": steps_done}
    config |= {ENTRIES_IN_WHOLE_KEY: in_whole} if in_whole else {}
    whole = {plain_name(name): tensor.clone() for name, tensor in changed.items()}
    return dict(sorted(tensors.items())), whole, config


def _opened(path: StrPath | Mapping[str, Any]) -> tuple[Collection[str], Callable[[str], Tensor]]:
    """The names of a checkpoint's tensors, and what reads one of them."""
    if isinstance(path, Mapping):
        state = _with_entries(path)
        return state, lambda name: state[name].detach().cpu()
    file = Path(path) / _PICKLED if (Path(path) / _PICKLED).is_file() else Path(path)
    if file.is_dir() or file.suffix == ".safetensors" or not file.exists():
        checkpoint = Checkpoint(file)
        return checkpoint.stored, checkpoint.read
    try:
        return _opened(torch.load(file, "cpu", weights_only=True, mmap=True))
    except Exception as error:  # of any file
        raise SparsifyError(
            f"`{file}` cannot be read as weights ({brief(error)}): give a Trainer's checkpoint folder, or what "
            "torch.save(model.state_dict(), file) wrote."
        ) from error


def _with_entries(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping of tensors in a checkpoint, as ``{"model": model.state_dict(), "step": 3}`` has one."""
    inner = [value for value in state.values() if isinstance(value, Mapping)]
    return next((found for found in (state, *inner) if _prefixes(found)), state)


def _prefixes(names: Collection[str]) -> list[str]:
    """What the names of entries begin with, such as the wrapper's ``module.``; one item for each sparsified part."""
    return [str(name).removesuffix(POSITION) for name in names if str(name).endswith(POSITION)]
