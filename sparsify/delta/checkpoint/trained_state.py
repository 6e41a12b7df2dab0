"""Reads the delta out of a checkpoint that was written in training, full or of the trained state alone.

sparse_ids, sparse_base, sparse_values    the entries, numbered through all candidates
sparse_settings                           has a record of the candidates, of what is stored whole, and of the run
"""

import math
import zipfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.common.names import POSITION, RECORD, SETTINGS, plain_name
from sparsify.common.raw_bits import checksum, digest
from sparsify.delta.checkpoint.reader import Checkpoint
from sparsify.delta.entries import DTYPES, DeltaParts, StrPath, TensorDelta
from sparsify.delta.format import ENTRIES_IN_WHOLE_KEY, parse_json, refused, stored_name
from sparsify.errors import SparsifyError, brief

VALUES, IDS, BASE = "sparse_values", "sparse_ids", "sparse_base"  # as in core/entries.py, which is training code


def is_training_checkpoint(path: StrPath) -> bool:
    """Whether a path is the folder of a checkpoint with entries."""
    folder = Path(path)
    if folder.is_dir():
        with suppress(SparsifyError):
            return bool(_opened(folder)[2])
    return False


def read_training_checkpoint(path: StrPath | Mapping[str, Any]) -> DeltaParts:
    if isinstance(path, nn.Module):
        raise SparsifyError("from_checkpoint() got a model: SparseDelta.from_model(model) is its delta.")
    shown = "the state dict" if isinstance(path, Mapping) else f"`{path}`"
    names, read, prefixes = _opened(path)
    if len(prefixes) != 1:
        remedy = "of a fine-tuned model take SparseDelta.diff(base, tuned), of several parts the state dict of each."
        raise SparsifyError(f"{shown} is of {len(prefixes)} sparsified models, by `{POSITION}`, expected 1: {remedy}")
    (prefix,) = prefixes
    with refused(f"{shown} is no checkpoint that can be used", "take an earlier one"):
        settings = parse_json(read(prefix + SETTINGS).to("cpu", torch.uint8).numpy().tobytes().decode())
        return _parts(settings, {name.removeprefix(prefix) for name in names}, lambda name: read(prefix + name))


def _parts(settings: dict[str, Any], names: Collection[str], read: Callable[[str], Tensor]) -> DeltaParts:
    record = settings[RECORD]
    steps_done, _, count, saved = read(POSITION).tolist()
    ids = read(IDS)[:count].long()
    if ids.numel() != count or int(checksum(ids)) != saved:
        raise SparsifyError(f"`{IDS}` are not those that were saved")
    ids, order = ids.sort()
    base, values = (read(name)[:count][order] for name in (BASE, VALUES))
    ends = list(accumulate(math.prod(shape) for _, shape, *_ in record["tensors"]))
    counts = torch.searchsorted(ids, torch.tensor([0, *ends], device=ids.device)).diff().tolist()
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
            tensors[plain_name(name)] = TensorDelta(own - (end - math.prod(shape)), new, *sort, quantization=scheme)
    stored = {name: read(name) for name in (*record["whole"], *record["buffers"]) if name in names}
    if lacking := [name for name in record["whole"] if name not in stored]:
        raise SparsifyError(f"it lacks `{lacking[0]}`, which was trained whole")
    config = {**record["config"], "budget": count, "steps": settings.get("steps"), "steps_done": steps_done}
    whole = {stored_name(n, config): t.clone() for n, t in stored.items() if digest(t) != record["buffers"].get(n)}
    config |= {ENTRIES_IN_WHOLE_KEY: in_whole} if in_whole else {}
    return dict(sorted(tensors.items())), whole, config


def _opened(path: StrPath | Mapping[str, Any]) -> tuple[Collection[str], Callable[[str], Tensor], list[str]]:
    """The names of a checkpoint's tensors, what reads one of them, and the prefixes of those with entries."""
    if isinstance(path, Mapping):  # perhaps {"model": model.state_dict(), "step": 3}
        parts = [path, *(value for value in path.values() if isinstance(value, Mapping))]
        state = next((part for part in parts if _prefixes(part)), path)
        return state, lambda name: state[name].detach().cpu(), _prefixes(state)
    pickled = Path(path) / "pytorch_model.bin"
    file = pickled if pickled.is_file() else Path(path)
    if file.is_dir() or file.suffix == ".safetensors" or not file.exists():
        checkpoint = Checkpoint(file)
        return checkpoint.stored, checkpoint.read, _prefixes(checkpoint.stored)
    try:
        return _opened(torch.load(file, "cpu", weights_only=True, mmap=zipfile.is_zipfile(file)))
    except Exception as error:  # of any file
        expected = "give a Trainer's checkpoint folder, or what torch.save(model.state_dict(), file) wrote."
        raise SparsifyError(f"`{file}` cannot be read as weights ({brief(error)}): {expected}") from error


def _prefixes(names: Collection[Any]) -> list[str]:
    """What the names of entries begin with, such as the wrapper's ``module.``; one item for each sparsified part."""
    return [str(name).removesuffix(POSITION) for name in names if str(name).endswith(POSITION)]
