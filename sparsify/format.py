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
* ``tensors``: name -> ``shape`` (of T), ``dtype`` (the base's, in safetensors' words: F64, F32, BF16 or F16), ``kind``
  (only where it is ``add``), ``count`` (entries, at least 1), and ``base_sha256``: SHA-256 in lower-case hex of the
  base's values at the indices, as little-endian bytes in ``dtype``, so that a wrong base is noticed;
* ``whole``: the list of the names of the tensors stored whole.

The file holds exactly the keys that this object implies. No object has other keys than these, and none has one twice.
The header is at most ``MAX_HEADER_BYTES`` long. ``sparse_delta_config.json`` is a copy of the object for people; it is
never read.

A reader takes nothing on trust: header, metadata and sizes are checked before a tensor is loaded, and the entries
before anything is returned.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsify.entries import DTYPES, ESCAPE, KINDS, TensorDelta, decode_indices, encode_indices
from sparsify.errors import DeltaFormatError, SparsifyError

FILE_NAME = "sparse_delta.safetensors"
CONFIG_NAME = "sparse_delta_config.json"
FORMAT_VERSION = 1
MAX_HEADER_BYTES = 32 * 2**20  # some 100,000 tensors


_METADATA_KEY = "sparse_delta"
_RECORD_KEYS = {"shape", "dtype", "count", "base_sha256"}
_DEFAULT_KIND = "replace"
_DOCUMENT_KEYS = {"format_version", "config", "tensors", "whole"}
_MAX_DIMS = 64
_MAX_NUMEL = 2**63 - 1  # positions are int64 in memory


class DeltaFile(NamedTuple):
    """What a file holds: changed entries by tensor name, tensors stored whole, and how they came about."""

    tensors: dict[str, TensorDelta]
    whole: dict[str, Tensor]
    config: dict[str, Any]


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
            **({} if tensor.kind == _DEFAULT_KIND else {"kind": tensor.kind}),
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
    _check_object(where, record, _RECORD_KEYS, optional={"kind"})
    shape, dtype, count, sha = (record[k] for k in ("shape", "dtype", "count", "base_sha256"))
    kind = record.get("kind", _DEFAULT_KIND)
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


def _check_object(where: str, value: Any, keys: set[str], optional: Set[str] = frozenset()) -> None:
    if not isinstance(value, dict) or not keys <= set(value) <= keys | optional:
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
        most += math.prod(record.shape) // ESCAPE  # more escapes than that would skip past the tensor's end
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
