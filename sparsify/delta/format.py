"""Reads and writes the delta file, ``sparse_delta.safetensors``.

In and out: entries by tensor name, dense tensors, and a config. ``format.md``, next to this module, specifies the file
to the byte, and the checks of a reader. Here, header, metadata and sizes are checked before a tensor is loaded, and the
entries before anything is returned.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsify.common.interrupts import uninterrupted
from sparsify.delta.entries import (
    DTYPES,
    ESCAPE,
    NamedTensors,
    StrPath,
    TensorDelta,
    TensorDeltas,
    decode_indices,
    encode_indices,
)
from sparsify.delta.metadata import (
    FORMAT_VERSION,
    METADATA_KEY,
    Record,
    check_names,
    describe,
    parse,
    parse_json,
    shown,
    to_json,
)
from sparsify.errors import DeltaFormatError, SparsifyError

__all__ = ["CONFIG_NAME", "FILE_NAME", "FORMAT_VERSION", "DeltaFile", "check_names", "payload_hash", "read", "write"]

FILE_NAME = "sparse_delta.safetensors"
CONFIG_NAME = "sparse_delta_config.json"
MAX_HEADER_BYTES = 32 * 2**20  # some 100,000 tensors

# A parsed object or list takes some 100 bytes, so their number bounds the memory. Tensors need 1 in 21 bytes or fewer.
_FREE_OPENINGS = 4096
_BYTES_PER_OPENING = 16
_LONGEST_REASON = 500
_READS = 20  # of a file that is replaced meanwhile
_HASHED_BYTES = 2**20  # of the payload at a time


class DeltaFile(NamedTuple):
    """The contents of a file: changed entries by tensor name, dense tensors by name, and how they came about."""

    tensors: dict[str, TensorDelta]
    whole: dict[str, Tensor]
    config: dict[str, Any]


def write(
    path: StrPath, tensors: TensorDeltas, whole: NamedTensors, config: Mapping[str, Any], sidecar: StrPath | None = None
) -> None:
    """Writes a delta file, and a copy of its metadata, as JSON for people, to ``sidecar``.

    A file that was there before stays until the new one is complete. Folders are made if need be.

    Raises:
        SparsifyError: when ``config`` does not go into JSON, a name is in both mappings, or a reader would refuse a
            name, the config or the header's length. Nothing is written then.
    """
    metadata = {METADATA_KEY: to_json(describe(tensors, whole, config, hashlib.sha256().hexdigest()))}
    parse(metadata)  # what a reader would refuse is not written
    with torch.device("cpu"):  # whatever the default device is
        payload = _payload(tensors, whole)
        document = describe(tensors, whole, config, _hash_of(_serialise(payload, metadata)))
        data = _serialise(payload, {METADATA_KEY: to_json(document)})
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise SparsifyError(
            f"the delta's header takes {header_bytes:,} bytes, more than the {MAX_HEADER_BYTES:,} that a reader "
            "accepts: shorten `config`, or split the delta."
        )
    _check_openings(data[8 : 8 + header_bytes])
    for_people = (to_json(document, indent=2) + "\n").encode()
    replace_file(Path(path), data)
    if sidecar is not None:
        replace_file(Path(sidecar), for_people)


def _payload(tensors: TensorDeltas, whole: NamedTensors) -> dict[str, Tensor]:
    """The stored tensors by key."""
    payload = {f"{name}.whole": tensor for name, tensor in whole.items()}
    for name, tensor in tensors.items():
        payload[f"{name}.indices"] = encode_indices(tensor.indices)
        payload[f"{name}.values"] = tensor.values
    # Cloned, since safetensors refuses tensors that share memory, as slices of one flat vector do.
    return {key: t.detach().cpu().clone(memory_format=torch.contiguous_format) for key, t in payload.items()}


def _serialise(payload: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    try:
        return safetensors.torch.save(payload, metadata)
    except KeyError as error:
        raise SparsifyError(
            f"safetensors has no dtype {error}, which a tensor stored whole is in: convert it, or leave it out."
        ) from error


def _hash_of(data: bytes) -> str:
    """SHA-256 of a file's payload, the layout of which does not depend on the metadata."""
    return hashlib.sha256(memoryview(data)[8 + int.from_bytes(data[:8], "little") :]).hexdigest()


def read(path: StrPath) -> DeltaFile:
    """Reads a delta file, and checks everything about it that can be checked without the base.

    Returns:
        Its contents, in memory of their own: the file may be deleted or replaced.

    Raises:
        DeltaFormatError: when anything in the file is not as ``format.md`` says, a bit of its payload has changed
            since it was written (undetected in a file of format version 1), or it is no regular file.
        OSError: when the file cannot be opened.
    """
    path = os.fspath(path)
    for _ in range(_READS):
        before = _identity(path)
        try:
            found = _read(path)
        except DeltaFormatError:
            if _identity(path) == before:
                raise
        else:
            if _identity(path) == before:
                return found
    raise DeltaFormatError(f"`{path}` was replaced every time that it was read: try again when nothing writes it.")


def payload_hash(path: StrPath) -> str | None:
    """The SHA-256 of the payload that a file records, None in format version 1; raises as :func:`read`, for less."""
    path = os.fspath(path)
    _identity(path)
    with _described(path):
        _check_header(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            return parse(file.metadata()).payload_sha256


def _identity(path: str) -> tuple[int, ...]:
    """Identifies the file at a path, which is opened several times, so that a replaced one is noticed."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # reading a pipe may never end
        raise DeltaFormatError(f"`{path}` is no regular file, so it is not read: copy what it gives into a file first.")
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read(path: str) -> DeltaFile:
    with _described(path):
        payload_start = _check_header(path)
        with torch.device("cpu"), safe_open(path, framework="pt", device="cpu") as file:
            records, whole, config, payload_sha256 = parse(file.metadata())
            _check_keys(set(file.keys()), records, whole)
            for name, record in records.items():
                _check_sizes(file, name, record)
            if payload_sha256 is not None:
                _check_payload(path, payload_start, payload_sha256)
            return DeltaFile(
                {name: _load_tensor(file, name, record) for name, record in records.items()},
                {name: file.get_tensor(f"{name}.whole").clone() for name in whole},
                config,
            )


@contextmanager
def _described(path: str) -> Iterator[None]:
    """Turns errors about a file's contents into a ``DeltaFormatError`` that names the file."""
    try:
        yield
    except (SafetensorError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        # `from None`: the library's own text may quote the file, terminal escapes and all.
        raise DeltaFormatError(
            f"`{path}` is no delta that can be used: {_reason(error)}. Nothing was loaded: download or save it again."
        ) from None


def _reason(error: Exception) -> str:
    """An error's message as one printable line: libraries quote the file, and torch adds a stack trace."""
    line = str(error).partition("\n")[0].rstrip(".")[:_LONGEST_REASON]
    return "".join(character if character.isprintable() else "?" for character in line)


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file atomically: whenever the process may die, the old or the new one is there, complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A folder of its own inside the target's: same file system, usual permissions, gone whatever error comes. An
    # interrupt would leave it behind.
    with uninterrupted(), tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        complete = Path(folder) / path.name
        with complete.open("wb") as file:
            file.write(data)
            file.flush()
            # Without it some file systems rename first and write later: after a power cut the old file would be gone
            # and the new one empty. The folder is not synced: either file may be there then, but a complete one.
            os.fsync(file.fileno())
        os.replace(complete, path)


def _check_header(path: str) -> int:
    """Checks the header before it is parsed, for memory and for text that parsers differ on; returns its end."""
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise DeltaFormatError(f"its header claims {header_bytes:,} bytes, more than {MAX_HEADER_BYTES:,}")
        if os.fstat(file.fileno()).st_size < 8 + header_bytes:
            raise DeltaFormatError("it is cut short within its header")
        header = file.read(header_bytes)
    _check_openings(header)
    if not (header.startswith(b"{") and header.rstrip(b" ").endswith(b"}")):
        raise DeltaFormatError("its header is more than a JSON object with spaces after it")
    parse_json(header)  # safetensors takes the last of two equal keys, others the first
    return 8 + header_bytes


def _check_payload(path: str, start: int, expected: str) -> None:
    """Raises unless the bytes from ``start`` on have the SHA-256."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(start)
        while piece := file.read(_HASHED_BYTES):
            found.update(piece)
    if found.hexdigest() != expected:
        raise DeltaFormatError(
            "its payload does not have the SHA-256 that its metadata records, so it was damaged or changed after it "
            "was written"
        )


def _check_openings(header: bytes) -> None:
    openings, most = header.count(b"{") + header.count(b"["), _FREE_OPENINGS + len(header) // _BYTES_PER_OPENING
    if openings > most:
        raise SparsifyError(
            f"its header of {len(header):,} bytes opens {openings:,} objects and lists, more than the {most:,} that a "
            "reader accepts: shorten `config`"
        )


def _check_keys(present: set[str], records: Mapping[str, Record], whole: list[str]) -> None:
    """Raises unless the file holds exactly the tensors that its metadata names."""
    expected = {f"{name}.{role}" for name in records for role in ("indices", "values")}
    expected |= {f"{name}.whole" for name in whole}
    if missing := sorted(expected - present):
        raise DeltaFormatError(f"`{missing[0]}` is missing ({len(missing)} in all), though its metadata names it")
    if unknown := sorted(present - expected):
        first = shown(unknown[0]).strip("'\"")
        raise DeltaFormatError(f"`{first}` is in it ({len(unknown)} in all), though its metadata does not name it")


def _check_sizes(file: Any, name: str, record: Record) -> None:
    """Raises unless dtypes and shapes in the header fit the metadata's count; loads nothing."""
    indices, values = (file.get_slice(f"{name}.{role}") for role in ("indices", "values"))
    allowed = [record.dtype] if record.kind == "replace" else list(DTYPES)
    if values.get_dtype() not in allowed:
        raise DeltaFormatError(
            f"tensor `{name}`: values are {values.get_dtype()}, expected {' or '.join(allowed)} for a tensor in "
            f"{record.dtype} and kind {record.kind!r}"
        )
    if list(values.get_shape()) != [record.count]:
        shape = shown(values.get_shape())
        raise DeltaFormatError(f"tensor `{name}`: values have shape {shape}, expected [{record.count}]")
    most = record.count
    if indices.get_dtype() == "U16":
        most += math.prod(record.shape) // ESCAPE  # more escapes than that would skip past the tensor's end
    elif indices.get_dtype() not in ("U32", "U64"):
        raise DeltaFormatError(f"tensor `{name}`: indices are {indices.get_dtype()}, expected U16, U32 or U64")
    shape = indices.get_shape()
    if len(shape) != 1 or not record.count <= shape[0] <= most:
        raise DeltaFormatError(
            f"tensor `{name}`: indices have shape {shown(shape)}, expected one dimension of {record.count} to {most} "
            f"for {record.count} entries"
        )


def _load_tensor(file: Any, name: str, record: Record) -> TensorDelta:
    """One tensor's entries, checked."""
    try:
        return TensorDelta(
            indices=decode_indices(file.get_tensor(f"{name}.indices"), record.count),
            values=file.get_tensor(f"{name}.values").clone(),  # off the mapped file
            shape=record.shape,
            dtype=DTYPES[record.dtype],
            kind=record.kind,
            base_sha256=record.base_sha256,
            initializer=record.initializer,
            quantization=record.quantization,
        )
    except SparsifyError as error:
        raise DeltaFormatError(f"tensor `{name}`: {error}") from error
