"""The delta file: what is in ``sparse_delta.safetensors``, and how it is written and checked.

The file is an ordinary safetensors file. For a tensor T that is changed at some entries it holds two tensors:

* ``T.indices``: where. Flat row-major positions in T, strictly increasing, in one of three encodings that the stored
  dtype tells apart. U32 and U64 are the positions themselves. U16 are gaps: each number is the position minus the
  previous one minus 1 (before the first entry the previous position is -1), and 0xFFFF is an escape that stands for
  65535 skipped positions and no entry. The last number is never an escape, and the numbers that are no escapes are as
  many as the entries. A writer takes the smallest encoding, and U16 where two are equally small.
* ``T.values``: what, in the order of the indices. For the kind ``replace`` the trained values in the base's dtype, so
  that nothing is computed on loading; for the kind ``add`` differences to be added to the base, in any of the dtypes
  below. All are finite.

A tensor T that is stored whole (a new head, say, or a buffer that training changed) is one tensor ``T.whole``, of any
dtype and with any values. Since every key ends in its role, a parameter may itself be called ``x.values``. Names are
those of the plain model's state dict.

The safetensors header's metadata has one key, ``sparse_delta``, whose string is a JSON object:

* ``format_version``: 1;
* ``config``: how the delta came about, for people and tools; nothing here depends on it;
* ``tensors``: name -> ``shape`` (of T), ``dtype`` (the base's, in safetensors' words: F64, F32, BF16 or F16), ``kind``,
  ``count`` (entries, at least 1), and ``base_sha256``: SHA-256 in lower-case hex of the base's values at the indices,
  as little-endian bytes in ``dtype``, so that a wrong base is noticed;
* ``whole``: the list of the names of the tensors stored whole.

The file holds exactly the keys that this object implies. No object has other keys than these, and none has one twice.
The header is at most ``MAX_HEADER_BYTES`` long. ``sparse_delta_config.json`` is a copy of the object for people; it is
never read.

A reader takes nothing on trust: header, metadata and sizes are checked before a tensor is loaded, and the entries
before anything is returned.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsify.errors import DeltaFormatError, SparsifyError

FILE_NAME = "sparse_delta.safetensors"
CONFIG_NAME = "sparse_delta_config.json"
FORMAT_VERSION = 1
MAX_HEADER_BYTES = 32 * 2**20  # some 100,000 tensors

KINDS = ("replace", "add")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_METADATA_KEY = "sparse_delta"
_RECORD_KEYS = {"shape", "dtype", "kind", "count", "base_sha256"}
_DOCUMENT_KEYS = {"format_version", "config", "tensors", "whole"}
_ESCAPE = 0xFFFF
_MAX_DIMS = 64
_MAX_NUMEL = 2**63 - 1  # positions are int64 in memory


@dataclass(frozen=True, eq=False)
class TensorDelta:
    """The changed entries of one tensor parameter. What exists is valid: the constructor checks it.

    Args:
        indices: (count,) int64 on the CPU, count >= 1: flat row-major positions, strictly increasing.
        values: (count,) on the CPU, finite: the trained values, or what to add.
        shape: the tensor's shape.
        dtype: the base's dtype, one of the values of ``DTYPES``.
        kind: ``"replace"``: ``values`` are the trained ones, in ``dtype``; ``"add"``: they are differences.
        base_sha256: :func:`digest` of the base's values at the indices.

    Raises:
        SparsifyError: when the parts do not fit together.
    """

    indices: Tensor
    values: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    base_sha256: str

    def __post_init__(self) -> None:
        _check_types(self)
        _check_indices(self.indices, math.prod(self.shape))
        if bad := int((~self.values.isfinite()).sum()):
            raise SparsifyError(
                f"{bad} of {self.count} values are not finite, and a model that holds them computes nothing of use: "
                "take a delta from before the training diverged."
            )

    @property
    def count(self) -> int:
        """Number of entries."""
        return self.indices.numel()


class DeltaFile(NamedTuple):
    """What a file holds: changed entries by tensor name, tensors stored whole, and how they came about."""

    tensors: dict[str, TensorDelta]
    whole: dict[str, Tensor]
    config: dict[str, Any]


def digest(values: Tensor) -> str:
    """SHA-256, in hex, of a tensor's values as little-endian bytes in its own dtype.

    Example:
        >>> digest(torch.tensor([1.0])) == hashlib.sha256(bytes.fromhex("0000803f")).hexdigest()
        True
    """
    values = values.detach().cpu().reshape(-1)
    as_bytes = values.contiguous().view(torch.uint8)
    if sys.byteorder == "big":
        as_bytes = as_bytes.view(-1, values.element_size()).flip(1)
    return hashlib.sha256(as_bytes.numpy().tobytes()).hexdigest()


def encode_indices(indices: Tensor) -> Tensor:
    """The smallest stored form of flat positions.

    Args:
        indices: (count,) int64, strictly increasing, not negative.

    Returns:
        (count or more,) uint16 gaps, or (count,) uint32 or uint64 positions.

    Example:
        >>> encode_indices(torch.tensor([2, 3, 70_000])).tolist()
        [2, 0, 65535, 4461]
    """
    previous = torch.cat([indices.new_tensor([-1]), indices[:-1]])
    gaps = indices - previous - 1
    escapes = gaps.div(_ESCAPE, rounding_mode="floor")
    stream_length = indices.numel() + int(escapes.sum())
    wide = torch.uint32 if int(indices[-1:].sum()) < 2**32 else torch.uint64  # [-1:]: there may be no entry
    if 2 * stream_length > wide.itemsize * indices.numel():
        return indices.to(wide)
    stream = torch.full((stream_length,), _ESCAPE, dtype=torch.int32)
    ends = torch.arange(indices.numel()) + escapes.cumsum(0)  # an entry's number comes after its own escapes
    stream[ends] = (gaps % _ESCAPE).int()
    return stream.to(torch.uint16)


def decode_indices(stored: Tensor, count: int) -> Tensor:
    """The positions that :func:`encode_indices` stored. Their order and range are not checked here.

    Args:
        stored: (any,) uint16, uint32 or uint64.
        count: number of entries that there must be.

    Returns:
        (count,) int64. A position beyond int64 comes out negative.

    Raises:
        DeltaFormatError: when the dtype is no encoding, a gap stream ends in an escape, or the count is another.
    """
    if stored.dtype == torch.uint16:
        indices = _decode_gaps(stored)
    elif stored.dtype in (torch.uint32, torch.uint64):
        indices = stored.to(torch.int64)
    else:
        raise DeltaFormatError(f"indices are stored as {stored.dtype}, expected uint16, uint32 or uint64")
    if indices.numel() != count:
        raise DeltaFormatError(f"indices hold {indices.numel()} entries, expected {count}")
    return indices


def _decode_gaps(stored: Tensor) -> Tensor:
    stream = stored.to(torch.int64)
    if stream.numel() and int(stream[-1]) == _ESCAPE:
        raise DeltaFormatError("indices end in the escape 0xFFFF, which needs an entry after it")
    is_entry = stream != _ESCAPE
    steps = stream + is_entry  # an escape skips 65535 positions, an entry its gap and itself
    return steps.cumsum(0)[is_entry] - 1


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, TensorDelta],
    whole: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    sidecar: str | os.PathLike[str] | None = None,
) -> None:
    """Writes a delta file. What was there before stays until the new file is complete.

    Args:
        path: the file.
        tensors: changed entries by tensor name.
        whole: tensors to store whole, by name.
        config: how the delta came about; anything that JSON can hold.
        sidecar: where to write the metadata as JSON for people, if at all.

    Raises:
        SparsifyError: when ``config`` does not go into JSON, a name is in both mappings, or the header gets too long.
            Nothing is written then.
    """
    document = _describe(tensors, whole, config)
    metadata = {_METADATA_KEY: _to_json(document)}
    _parse_metadata(metadata)  # what a reader would refuse is not written
    payload = {f"{name}.whole": tensor for name, tensor in whole.items()}
    for name, tensor in tensors.items():
        payload[f"{name}.indices"] = encode_indices(tensor.indices)
        payload[f"{name}.values"] = tensor.values
    # Cloned, since safetensors refuses tensors that share memory, as slices of one flat vector do.
    payload = {key: t.detach().cpu().clone(memory_format=torch.contiguous_format) for key, t in payload.items()}
    data = safetensors.torch.save(payload, metadata)
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise SparsifyError(
            f"the delta's header takes {header_bytes:,} bytes, more than the {MAX_HEADER_BYTES:,} that a reader "
            "accepts: shorten `config`, or split the delta."
        )
    _replace_file(Path(path), data)
    if sidecar is not None:
        _replace_file(Path(sidecar), (_to_json(document, indent=2) + "\n").encode())


def read(path: str | os.PathLike[str]) -> DeltaFile:
    """Reads a delta file, and checks everything about it that can be checked without the base.

    Args:
        path: the file.

    Returns:
        Its contents, in memory of their own: the file may be deleted or replaced.

    Raises:
        DeltaFormatError: when anything in the file is not as this module's docstring says; names the tensor.
        OSError: when the file cannot be opened.
    """
    path = os.fspath(path)
    try:
        _check_header_size(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            records, whole, config = _parse_metadata(file.metadata())
            _check_keys(set(file.keys()), records, whole)
            for name, record in records.items():
                _check_sizes(file, name, record)
            return DeltaFile(
                {name: _load_tensor(file, name, record) for name, record in records.items()},
                {name: file.get_tensor(f"{name}.whole").clone() for name in whole},
                config,
            )
    except (SafetensorError, SparsifyError, ValueError, TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")  # torch's own errors go on for a stack trace
        raise DeltaFormatError(
            f"`{path}` is no delta that can be used: {reason}. Nothing was loaded: download or save it again."
        ) from error


@dataclass(frozen=True)
class _Record:
    """What the metadata says about one tensor."""

    shape: tuple[int, ...]
    dtype: str  # a key of DTYPES
    kind: str
    count: int
    base_sha256: str


def _check_types(tensor: TensorDelta) -> None:
    """Raises unless kind, dtypes, devices and counts of a tensor's parts fit together."""
    indices, values = tensor.indices, tensor.values
    if tensor.kind not in KINDS:
        raise SparsifyError(f"kind is {tensor.kind!r}, expected one of {', '.join(KINDS)}")
    if tensor.dtype not in DTYPES.values():
        raise SparsifyError(f"dtype is {tensor.dtype}, expected one of {', '.join(map(str, DTYPES.values()))}")
    if indices.dtype != torch.int64:
        raise SparsifyError(f"indices are {indices.dtype}, expected torch.int64")
    if values.dtype not in DTYPES.values() or (tensor.kind == "replace" and values.dtype != tensor.dtype):
        raise SparsifyError(f"values are {values.dtype}, expected the base's {tensor.dtype} for kind {tensor.kind!r}")
    if indices.dim() != 1 or values.shape != indices.shape or indices.numel() == 0:
        raise SparsifyError(
            f"indices have shape {tuple(indices.shape)} and values {tuple(values.shape)}, expected one dimension, "
            "equally long, with at least one entry"
        )
    if not isinstance(tensor.base_sha256, str) or not re.fullmatch("[0-9a-f]{64}", tensor.base_sha256):
        raise SparsifyError(f"base_sha256 is {tensor.base_sha256!r}, expected 64 lower-case hex digits")
    if indices.device.type != "cpu" or values.device.type != "cpu":
        raise SparsifyError(f"indices are on {indices.device} and values on {values.device}, expected both on cpu")


def _check_indices(indices: Tensor, numel: int) -> None:
    """Raises unless positions (count >= 1,) are strictly increasing and lie in a tensor of ``numel`` entries."""
    if bool((indices[1:] <= indices[:-1]).any()):
        raise SparsifyError("indices are not strictly increasing")
    first, last = int(indices[0]), int(indices[-1])
    if first < 0 or last >= numel:
        raise SparsifyError(f"indices are out of range: they go from {first} to {last}, in a tensor of {numel} entries")


def check_names(tensors: Iterable[Any], whole: Iterable[Any]) -> None:
    """Checks the names of one delta.

    Args:
        tensors: of tensors that are changed at some entries.
        whole: of tensors that are stored whole.

    Raises:
        SparsifyError: unless all are strings, none is empty, and none is there twice.
    """
    seen: set[str] = set()
    for name in [*tensors, *whole]:
        if not isinstance(name, str) or not name:
            raise SparsifyError(f"a tensor's name is {name!r}, expected a string that is not empty")
        if name in seen:
            raise SparsifyError(
                f"tensor `{name}` is there twice: it is either changed at entries or stored whole, once"
            )
        seen.add(name)


def _describe(
    tensors: Mapping[str, TensorDelta], whole: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Any]:
    """The metadata object."""
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    records = {
        name: {
            "shape": list(tensor.shape),
            "dtype": dtype_names[tensor.dtype],
            "kind": tensor.kind,
            "count": tensor.count,
            "base_sha256": tensor.base_sha256,
        }
        for name, tensor in tensors.items()
    }
    return {"format_version": FORMAT_VERSION, "config": dict(config), "tensors": records, "whole": list(whole)}


def _to_json(document: Mapping[str, Any], indent: int | None = None) -> str:
    separators = (",", ":") if indent is None else (",", ": ")
    try:
        return json.dumps(document, allow_nan=False, indent=indent, separators=separators)
    except (TypeError, ValueError) as error:
        raise SparsifyError(
            f"the delta's config does not go into JSON ({error}), so it cannot be saved: keep it to strings, finite "
            "numbers, booleans, None, lists and dicts."
        ) from error


def _replace_file(path: Path, data: bytes) -> None:
    """Puts a complete file in place of what is at ``path``, or leaves that as it is."""
    # A folder of its own inside the target's: same file system, usual permissions, gone whatever happens.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        complete = Path(folder) / path.name
        complete.write_bytes(data)
        os.replace(complete, path)


def _check_header_size(path: str) -> None:
    """Raises where the header is too long to be parsed without thinking about memory."""
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise DeltaFormatError(f"its header claims {header_bytes:,} bytes, more than {MAX_HEADER_BYTES:,}")


def _parse_metadata(metadata: dict[str, str] | None) -> tuple[dict[str, _Record], list[str], dict[str, Any]]:
    """Records by tensor name, names of whole tensors, and config, from the safetensors header's metadata."""
    if not metadata or _METADATA_KEY not in metadata:
        raise DeltaFormatError(
            f"its header has no metadata `{_METADATA_KEY}`: it is a safetensors file of something else"
        )
    document = _parse_json(metadata[_METADATA_KEY])
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise DeltaFormatError(
            f"its format version is {version!r}, this sparsify reads {FORMAT_VERSION}: upgrade it if the file is newer"
        )
    _check_object("metadata", document, _DOCUMENT_KEYS)
    records, whole, config = document["tensors"], document["whole"], document["config"]
    if not (isinstance(records, dict) and isinstance(whole, list) and isinstance(config, dict)):
        raise DeltaFormatError("metadata: `tensors` and `config` have to be objects, `whole` a list")
    check_names(records, whole)
    return {name: _parse_record(name, record) for name, record in records.items()}, whole, config


def _parse_json(text: str) -> Any:
    """JSON as the standard has it: no NaN or Infinity, no key twice in one object."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise DeltaFormatError("metadata: an object has a key twice")
        return result

    def refuse(constant: str) -> None:
        raise DeltaFormatError(f"metadata: {constant} is not JSON")

    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)


def _parse_record(name: str, record: Any) -> _Record:
    where = f"tensor `{name}`"
    _check_object(where, record, _RECORD_KEYS)
    shape, dtype, kind, count, sha = (record[k] for k in ("shape", "dtype", "kind", "count", "base_sha256"))
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(_is_int(d, 0, _MAX_NUMEL) for d in shape):
        raise DeltaFormatError(f"{where}: `shape` is not a list of at most {_MAX_DIMS} sizes")
    numel = math.prod(shape)
    if numel > _MAX_NUMEL:
        raise DeltaFormatError(f"{where}: `shape` is that of more than 2^63 entries")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DeltaFormatError(f"{where}: `dtype` is {dtype!r}, expected one of {', '.join(DTYPES)}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise DeltaFormatError(f"{where}: `kind` is {kind!r}, expected one of {', '.join(KINDS)}")
    if not _is_int(count, 1, numel):
        raise DeltaFormatError(
            f"{where}: `count` is {count!r}, expected a number from 1 to the tensor's {numel} entries"
        )
    return _Record(tuple(shape), dtype, kind, count, sha)


def _check_object(where: str, value: Any, keys: set[str]) -> None:
    if not isinstance(value, dict) or set(value) != keys:
        raise DeltaFormatError(f"{where}: expected a JSON object with exactly the keys {', '.join(sorted(keys))}")


def _is_int(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _check_keys(present: set[str], records: Mapping[str, _Record], whole: list[str]) -> None:
    """Raises unless the file holds exactly the tensors that its metadata names."""
    expected = {f"{name}.{role}" for name in records for role in ("indices", "values")}
    expected |= {f"{name}.whole" for name in whole}
    if missing := sorted(expected - present):
        raise DeltaFormatError(f"`{missing[0]}` is missing ({len(missing)} in all), though its metadata names it")
    if unknown := sorted(present - expected):
        raise DeltaFormatError(f"`{unknown[0]}` is in it ({len(unknown)} in all), though its metadata does not name it")


def _check_sizes(file: Any, name: str, record: _Record) -> None:
    """Raises unless dtypes and shapes in the header fit the metadata's count; loads nothing."""
    indices, values = (file.get_slice(f"{name}.{role}") for role in ("indices", "values"))
    allowed = [record.dtype] if record.kind == "replace" else list(DTYPES)
    if values.get_dtype() not in allowed:
        raise DeltaFormatError(
            f"tensor `{name}`: values are {values.get_dtype()}, expected {' or '.join(allowed)} for a tensor in "
            f"{record.dtype} and kind {record.kind!r}"
        )
    if list(values.get_shape()) != [record.count]:
        raise DeltaFormatError(f"tensor `{name}`: values have shape {values.get_shape()}, expected [{record.count}]")
    most = record.count
    if indices.get_dtype() == "U16":
        most += math.prod(record.shape) // _ESCAPE  # more escapes than that would skip past the tensor's end
    elif indices.get_dtype() not in ("U32", "U64"):
        raise DeltaFormatError(f"tensor `{name}`: indices are {indices.get_dtype()}, expected U16, U32 or U64")
    shape = indices.get_shape()
    if len(shape) != 1 or not record.count <= shape[0] <= most:
        raise DeltaFormatError(
            f"tensor `{name}`: indices have shape {shape}, expected one dimension of {record.count} to {most} for "
            f"{record.count} entries"
        )


def _load_tensor(file: Any, name: str, record: _Record) -> TensorDelta:
    """One tensor's entries, checked."""
    try:
        return TensorDelta(
            indices=decode_indices(file.get_tensor(f"{name}.indices"), record.count),
            values=file.get_tensor(f"{name}.values").clone(),  # off the mapped file
            shape=record.shape,
            dtype=DTYPES[record.dtype],
            kind=record.kind,
            base_sha256=record.base_sha256,
        )
    except SparsifyError as error:
        raise DeltaFormatError(f"tensor `{name}`: {error}") from error
