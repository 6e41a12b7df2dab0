"""What a stream sends: the versions of a model in training, what changed from one to the next, and the bytes of it.

    Version --snapshot--> Changes --write_message--> bytes --read_message--> Changes
    two of them --difference--> Changes

The entries of a version are in the order of their tensors' names, and ascending in each tensor, so that the values of
known entries are sent without positions. ``delta/format.md`` specifies the bytes under "Streams".
"""

import hashlib
import io
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify.common.raw_bits import as_bits, digest, same_values
from sparsify.delta import format as delta_format
from sparsify.delta.entries import DTYPES, TensorDelta, decode_indices, encode_indices, is_text
from sparsify.errors import DeltaFormatError

STREAM_KEY = "stream"  # of the config
STREAM_VERSION = 1
_HASH_KEY, _ZEROS = "header_sha256", b"0" * 64
_KEYS = {"format_version", "chain", "version", "snapshot", _HASH_KEY}
_MAX_VERSION = 2**53
_OPTIONAL = {f"{dtype}.{role}" for dtype in DTYPES for role in ("known", "places")}


class TrainedEntries(NamedTuple):
    """The unmasked entries of one tensor, with memory of their own on the CPU; fields as in :class:`TensorDelta`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    quantization: str | None
    indices: Tensor
    base: Tensor  # (count,) the base's values: at the sending end in dtype, at the receiving one in its own base's
    values: Tensor

    @property
    def entry_type(self) -> tuple[object, ...]:
        """What all entries of a tensor have in common, in whatever version."""
        return (*self[:4], self.values.dtype)

    def find(self, before: "TrainedEntries") -> Tensor | slice | None:
        """Numbers (k,) of an earlier version's entries; ``None`` unless all are here, of one type and over one base."""
        if self.entry_type != before.entry_type:
            return None
        if self.indices is before.indices and self.base is before.base:
            return slice(None)
        places = torch.searchsorted(self.indices, before.indices).clamp_(max=self.indices.numel() - 1)
        pairs = zip(self[4:6], before[4:6], strict=True)
        return places if all(same_values(part.index_select(0, places), old) for part, old in pairs) else None

    def at(self, places: Tensor) -> "TrainedEntries":
        """The entries with some numbers (k,), or those that a mask (count,) chooses."""
        return self._replace(indices=self.indices[places], base=self.base[places], values=self.values[places])

    def joined(self, more: "TrainedEntries") -> "TrainedEntries":
        number, every = self.indices.numel(), torch.arange(self.indices.numel() + more.indices.numel(), device="cpu")
        places = torch.searchsorted(self.indices, more.indices) + every[: more.indices.numel()]
        order = torch.ones_like(every).index_fill_(0, places, 0).cumsum(0) - 1  # numbers of the own ones
        order[places] = every[number:]
        pairs = zip(self[4:], more[4:], strict=True)
        return TrainedEntries(*self[:4], *(torch.cat([own, new.to(own.dtype)])[order] for own, new in pairs))

    def reverted(self) -> "TrainedEntries":
        """The entries with values that leave the base as it is."""
        return self._replace(values=self.base if self.kind == "replace" else torch.zeros_like(self.values))

    def delta(self) -> TensorDelta:
        return TensorDelta(self.indices, self.values, *self[:3], digest(self.base), quantization=self.quantization)


class KnownValues(NamedTuple):
    """Values of one dtype of entries that both ends know: (n,) at ascending ``places`` among these, or all of them."""

    values: Tensor
    places: Tensor | None = None


class Changes(NamedTuple):
    """What turns a version into the next: new entries and dense tensors by name, and values of known entries."""

    tensors: dict[str, TensorDelta]
    whole: dict[str, Tensor]
    known: dict[torch.dtype, KnownValues] | None  # None in a snapshot, which turns the base into a version


class Version(NamedTuple):
    """A model's trained state: entries by tensor, in the order of the names, dense tensors, and a delta's config."""

    tensors: dict[str, TrainedEntries]
    whole: dict[str, Tensor]
    config: dict[str, Any]

    def snapshot(self) -> Changes:
        return Changes({name: entries.delta() for name, entries in self.tensors.items()}, self.whole, None)


def difference(old: Version, new: Version) -> Changes | None:
    """What changed from one version to another; ``None`` where that is more than new entries, values and tensors."""
    if not (old.whole.keys() <= new.whole.keys() and old.tensors.keys() <= new.tensors.keys()):
        return None
    tensors: dict[str, TensorDelta] = {}
    pairs: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for name, entries in new.tensors.items():
        before, values = old.tensors.get(name), entries.values
        if before is None:
            tensors[name] = entries.delta()
            continue
        if (known := entries.find(before)) is None:
            return None
        if isinstance(known, Tensor) and known.numel() < values.numel():
            is_new = torch.ones_like(values, dtype=torch.bool).index_fill_(0, known, False)
            tensors[name] = entries.at(is_new).delta()
            values = values.index_select(0, known)
        pairs.setdefault(values.dtype, []).append((before.values, values))
    changed = {dtype: _changed(*map(torch.cat, zip(*found, strict=True))) for dtype, found in pairs.items()}
    sent = {dtype: values for dtype, values in changed.items() if values.values.numel()}
    return Changes(tensors, changed_whole(old, new), sent)


def changed_whole(old: Version, new: Version) -> dict[str, Tensor]:
    return {name: t for name, t in new.whole.items() if name not in old.whole or not same_values(t, old.whole[name])}


def changed_entries(old: Version, new: Version) -> dict[str, TensorDelta]:
    """What brings the entries of an earlier version to those of a later one, by tensor name."""
    found = {name: part.reverted().delta() for name, part in old.tensors.items() if name not in new.tensors}
    for name, after in new.tensors.items():
        if (before := old.tensors.get(name)) is None:
            found[name] = after.delta()
        elif (known := after.find(before)) is None:  # entries have left, or changed their base or dtype
            left = before.at(torch.isin(before.indices, after.indices, invert=True))
            found[name] = after.joined(left.reverted()).delta()
        else:
            changed = torch.ones_like(after.indices, dtype=torch.bool)
            changed[known] = as_bits(after.values[known]) != as_bits(before.values)
            if bool(changed.any()):
                found[name] = after.at(changed).delta()
    return dict(sorted(found.items()))


def _changed(old: Tensor, new: Tensor) -> KnownValues:
    """All values (n,), or those whose bits changed and their places, whichever takes fewer bytes."""
    changed = as_bits(old) != as_bits(new)
    if int(changed.count_nonzero()) * (2 + new.itemsize) >= new.nbytes:  # a place takes two bytes, as a rule
        return KnownValues(new)
    places = changed.nonzero().flatten()
    return KnownValues(new[places], places)


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


def read_message(data: bytes) -> tuple[str, int, Changes]:
    """Chain, version and changes of a message; raises ``DeltaFormatError`` where it is damaged, or no message."""
    with delta_format.refused("this is no update that can be used", "have it sent again, or ask for `snapshot()`"):
        file = io.BytesIO(data)
        header, document = delta_format.read_header(file)
        stream = _check_stream(document["config"], data)
        optional = set() if stream["snapshot"] else _OPTIONAL
        (tensors, whole, _), more = delta_format.read_contents(file, header, document, optional)
        known = {dtype: found for name, dtype in DTYPES.items() if (found := _known(name, dtype, more)) is not None}
    return stream["chain"], stream["version"], Changes(tensors, whole, None if stream["snapshot"] else known)


def _check_stream(config: dict[str, Any], data: bytes) -> dict[str, Any]:
    if (stream := config.get(STREAM_KEY)) is None:
        raise DeltaFormatError(f"its config has no `{STREAM_KEY}`, so it belongs to no stream")
    if isinstance(stream, dict) and stream.get("format_version") != STREAM_VERSION:
        found = f"{stream.get('format_version')!r:.120}, expected {STREAM_VERSION}"
        raise DeltaFormatError(f"its stream's format version is {found}")
    delta_format.check_object(f"`{STREAM_KEY}`", stream, _KEYS)
    chain, stated, number = stream["chain"], stream[_HASH_KEY], stream["version"]
    if not is_text("[0-9a-f]{32}", chain) or not is_text("[0-9a-f]{64}", stated):
        raise DeltaFormatError(f"`{STREAM_KEY}`: its chain or hash is no text of hex digits of the right length")
    if type(number) is not int or not 0 <= number <= _MAX_VERSION or type(stream["snapshot"]) is not bool:
        raise DeltaFormatError(f"`{STREAM_KEY}`: its version or kind is none")
    if _header_digest(data, stated) != stated:
        raise DeltaFormatError("its header does not have the SHA-256 that it records, so it was damaged or changed")
    return stream


def _header_digest(data: bytes | bytearray, stated: str) -> str:
    return hashlib.sha256(bytes(data[: delta_format.header_end(data)]).replace(stated.encode(), _ZEROS)).hexdigest()


def _known(name: str, dtype: torch.dtype, more: dict[str, Tensor]) -> KnownValues | None:
    values, stored = more.get(f"{name}.known"), more.get(f"{name}.places")
    if values is None:
        if stored is not None:
            raise DeltaFormatError(f"`{name}.places` has no `{name}.known` next to it")
        return None
    if values.dtype != dtype or values.dim() != 1:
        shape = tuple(values.shape)
        raise DeltaFormatError(f"`{name}.known` is {values.dtype} of shape {shape}, expected (n,) {dtype}")
    if not values.isfinite().all():
        raise DeltaFormatError(f"`{name}.known` has values that are not finite")
    if stored is None:
        return KnownValues(values)
    places = decode_indices(stored, values.numel())
    if bool((places[1:] <= places[:-1]).any()) or int(places[:1].sum()) < 0:
        raise DeltaFormatError(f"`{name}.places` is not strictly increasing")
    return KnownValues(values, places)
