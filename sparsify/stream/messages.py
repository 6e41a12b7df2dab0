"""The bytes of a stream's messages: snapshots and updates. ``format.md`` specifies both under "Streams".

Changes --write_message-->  bytes, a delta file, in an update with more keys  --read_message-->  Message
"""

from __future__ import annotations

import hashlib
import io
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify.common.raw_bits import all_finite
from sparsify.delta import format as delta_format
from sparsify.delta.entries import DTYPES, decode_indices, encode_indices, is_text
from sparsify.delta.metadata import PAYLOAD_KEY, check_object
from sparsify.errors import DeltaFormatError
from sparsify.stream.version import Changes, KnownValues

STREAM_KEY = "stream"  # of the config
STREAM_VERSION = 1
_HASH_KEY, _ZEROS = "header_sha256", b"0" * 64
_KEYS = {"format_version", "chain", "version", "snapshot", _HASH_KEY}
_MAX_VERSION = 2**53
_OPTIONAL = {f"{dtype}.{role}" for dtype in DTYPES for role in ("known", "places")}


class Message(NamedTuple):
    """Which version a message makes, and what it changes in the base (a snapshot) or in the version before."""

    chain: str
    version: int
    changes: Changes


def write_message(chain: str, number: int, changes: Changes, config: Mapping[str, Any]) -> bytes:
    """The bytes of what makes a version of a chain; the ``config`` is in those of a snapshot only."""
    more: dict[str, Tensor] = {}
    for name, dtype in DTYPES.items():
        if known := (changes.known or {}).get(dtype):
            more[f"{name}.known"] = known.values
            if known.places is not None:
                more[f"{name}.places"] = encode_indices(known.places)
    placeholder = secrets.token_hex(32)
    place = {"chain": chain, "version": number, "snapshot": changes.known is None}
    stream = {"format_version": STREAM_VERSION, **place, _HASH_KEY: placeholder}
    config = {**(config if changes.known is None else {}), STREAM_KEY: stream}
    data, _ = delta_format.to_bytes(changes.tensors, changes.whole, config, more)
    delta_format.fill_in(data, placeholder, _header_digest(data, placeholder))
    return bytes(data)


def read_message(data: bytes) -> Message:
    """Reads a message and checks everything about it that can be checked without the base and earlier versions.

    Raises:
        DeltaFormatError: when a bit of it has changed since it was written, or it is no message at all.
    """
    with delta_format.refused("this is no update that can be used", "have it sent again, or ask for `snapshot()`"):
        file = io.BytesIO(data)
        header, document = delta_format.read_header(file)
        stream = _check_stream(document["config"], data)
        if PAYLOAD_KEY not in document:
            raise DeltaFormatError(f"its metadata has no `{PAYLOAD_KEY}`, which every message has")
        optional = set() if stream["snapshot"] else _OPTIONAL
        (tensors, whole, _), more = delta_format.read_contents(file, header, document, optional)
        if drawn := [name for name, part in tensors.items() if part.initializer is not None]:
            raise DeltaFormatError(f"tensor `{drawn[0]}` is drawn from a seed, which a stream does not do")
        known = {dtype: found for name, dtype in DTYPES.items() if (found := _known(name, dtype, more)) is not None}
    return Message(stream["chain"], stream["version"], Changes(tensors, whole, None if stream["snapshot"] else known))


def _check_stream(config: dict[str, Any], data: bytes) -> dict[str, Any]:
    """The object that names a message's place in a stream; the header that it is in is compared with its hash."""
    stream = config.get(STREAM_KEY)
    if stream is None:
        raise DeltaFormatError(f"its config has no `{STREAM_KEY}`, so it belongs to no stream")
    if isinstance(stream, dict) and stream.get("format_version") != STREAM_VERSION:
        raise DeltaFormatError(f"its stream's format version is {stream.get('format_version')!r:.120}, expected 1")
    check_object(f"`{STREAM_KEY}`", stream, _KEYS)
    chain, stated, number = stream["chain"], stream[_HASH_KEY], stream["version"]
    if not is_text("[0-9a-f]{32}", chain) or not is_text("[0-9a-f]{64}", stated):
        raise DeltaFormatError(f"`{STREAM_KEY}`: its chain or hash is no text of hex digits of the right length")
    if type(number) is not int or not 0 <= number <= _MAX_VERSION or type(stream["snapshot"]) is not bool:
        raise DeltaFormatError(f"`{STREAM_KEY}`: its version or kind is none")
    if _header_digest(data, stated) != stated:
        raise DeltaFormatError("its header does not have the SHA-256 that it records, so it was damaged or changed")
    return stream


def _header_digest(data: bytes | bytearray, stated: str) -> str:
    """SHA-256 of the header, with zeros for the hash in it."""
    return hashlib.sha256(bytes(data[: delta_format.header_end(data)]).replace(stated.encode(), _ZEROS)).hexdigest()


def _known(name: str, dtype: torch.dtype, more: dict[str, Tensor]) -> KnownValues | None:
    """The values of known entries of one dtype; raises where they are not as ``format.md`` says."""
    values, stored = more.get(f"{name}.known"), more.get(f"{name}.places")
    if values is None:
        if stored is not None:
            raise DeltaFormatError(f"`{name}.places` has no `{name}.known` next to it")
        return None
    if values.dtype != dtype or values.dim() != 1:
        shape = tuple(values.shape)
        raise DeltaFormatError(f"`{name}.known` is {values.dtype} of shape {shape}, expected (n,) {dtype}")
    if not all_finite(values):
        raise DeltaFormatError(f"`{name}.known` has values that are not finite")
    if stored is None:
        return KnownValues(values)
    places = decode_indices(stored, values.numel())
    if bool((places[1:] <= places[:-1]).any()) or int(places[:1].sum()) < 0:
        raise DeltaFormatError(f"`{name}.places` is not strictly increasing")
    return KnownValues(values, places)
