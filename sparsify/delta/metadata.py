"""Writes and checks the JSON object in a delta file's header.

In: the parts of a delta, or untrusted text. Out: the text, or records that are checked. ``format.md`` specifies each
field; nothing from a file reaches a message, a terminal or the rest of the library unchecked.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Any, NamedTuple

from sparsify.common.initializers import InitializerRecipe
from sparsify.delta.entries import DTYPES, KINDS, NamedTensors, TensorDeltas, is_short_text
from sparsify.errors import DeltaFormatError, SparsifyError

FORMAT_VERSION = 2  # that is written; version 1 is the same without `payload_sha256`
METADATA_KEY = "sparse_delta"
PEFT_KEY, ADAPTERS_KEY = "peft", "adapters"  # of the config: adapters that were added to the base
ENTRIES_IN_WHOLE_KEY = "entries_in_whole"  # of the config: number of entries trained in tensors stored whole
MAX_NAME_CHARACTERS = 1000
MAX_DEPTH = 64  # of objects and lists in each other
MAX_NUMBER_CHARACTERS = 1000  # the time to read a longer integer grows with its square

_DOCUMENT_KEYS = {1: {"format_version", "config", "tensors", "whole"}}  # by version
_DOCUMENT_KEYS[2] = {*_DOCUMENT_KEYS[1], "payload_sha256"}
_SHA256 = re.compile("[0-9a-f]{64}")
_STRING = re.compile('"[^"]*"')  # in JSON without escapes
_RECORD_KEYS = {"shape", "dtype", "count", "base_sha256"}
_DEFAULT_KIND = "replace"
_MAX_DIMS = 64
_MAX_NUMEL = 2**63 - 1  # positions are int64 in memory
# control characters, line separators, marks that turn the direction of writing, halves of surrogate pairs
_NOT_IN_NAMES = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LONGEST_SHOWN = 120


@dataclass(frozen=True)
class Record:
    """The metadata of one tensor, fields as in :class:`TensorDelta`; ``base_sha256`` is not checked yet."""

    shape: tuple[int, ...]
    dtype: str  # a key of ``DTYPES``
    kind: str
    count: int
    base_sha256: str
    initializer: InitializerRecipe | None = None
    quantization: str | None = None


class Metadata(NamedTuple):
    """The metadata of a file: records by tensor name, names of dense tensors, config, and the payload's SHA-256.

    ``payload_sha256`` is None in a file of version 1.
    """

    records: dict[str, Record]
    whole: list[str]
    config: dict[str, Any]
    payload_sha256: str | None


def describe(
    tensors: TensorDeltas, whole: NamedTensors, config: Mapping[str, Any], payload_sha256: str
) -> dict[str, Any]:
    """The metadata object of a delta."""
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    records = {
        name: {
            "shape": list(tensor.shape),
            "dtype": dtype_names[tensor.dtype],
            **({} if tensor.kind == _DEFAULT_KIND else {"kind": tensor.kind}),
            "count": tensor.count,
            "base_sha256": tensor.base_sha256,
            **({} if tensor.initializer is None else {"drawn": asdict(tensor.initializer)}),
            **({} if tensor.quantization is None else {"quantization": tensor.quantization}),
        }
        for name, tensor in tensors.items()
    }
    return {
        "format_version": FORMAT_VERSION,
        "config": dict(config),
        "tensors": records,
        "whole": list(whole),
        "payload_sha256": payload_sha256,
    }


def to_json(document: Mapping[str, Any], indent: int | None = None) -> str:
    """The metadata object as text; raises where its config does not go into JSON."""
    separators = (",", ":") if indent is None else (",", ": ")
    try:
        return json.dumps(document, allow_nan=False, indent=indent, separators=separators)
    except (TypeError, ValueError, RecursionError) as error:
        raise SparsifyError(
            f"the delta's config does not go into JSON ({error}), so it cannot be saved: keep it to strings, finite "
            "numbers, booleans, None, lists and dicts."
        ) from error


def parse(metadata: Mapping[str, str] | None) -> Metadata:
    """Parses the safetensors header's metadata; raises where anything in it is not as ``format.md`` says."""
    if not metadata or METADATA_KEY not in metadata:
        raise DeltaFormatError(f"its header has no metadata `{METADATA_KEY}`: it is another kind of safetensors file")
    document = parse_json(metadata[METADATA_KEY])
    version: Any = document.get("format_version") if isinstance(document, dict) else None
    if not _is_int(version, 1, FORMAT_VERSION):
        raise DeltaFormatError(
            f"its format version is {shown(version)}, this sparsify reads 1 to {FORMAT_VERSION}: upgrade it if the "
            "file is newer"
        )
    _check_object("metadata", document, _DOCUMENT_KEYS[version])
    records, whole, config = document["tensors"], document["whole"], document["config"]
    if not (isinstance(records, dict) and isinstance(whole, list) and isinstance(config, dict)):
        raise DeltaFormatError("metadata: `tensors` and `config` have to be objects, `whole` a list")
    sha = document.get("payload_sha256")
    if version > 1 and not (isinstance(sha, str) and _SHA256.fullmatch(sha)):
        raise DeltaFormatError(f"metadata: `payload_sha256` is {shown(sha)}, expected 64 lower-case hex digits")
    check_names(records, whole)
    return Metadata({name: _parse_record(name, record) for name, record in records.items()}, whole, config, sha)


def check_names(tensors: Iterable[Any], whole: Iterable[Any]) -> None:
    """Raises unless the names of a delta's tensors are strings without control characters, none of them twice."""
    seen: set[str] = set()
    for name in [*tensors, *whole]:
        if not isinstance(name, str) or not name:
            raise SparsifyError(f"a tensor's name is {shown(name)}, expected a string that is not empty")
        if len(name) > MAX_NAME_CHARACTERS or _NOT_IN_NAMES.search(name):
            raise SparsifyError(
                f"a tensor's name is {shown(name)} ({len(name):,} characters), expected at most "
                f"{MAX_NAME_CHARACTERS:,}, and no control characters: rename the module"
            )
        if name in seen:
            raise SparsifyError(f"tensor `{name}` is there twice: it is either changed at entries or stored whole")
        seen.add(name)


def check_not_extended(config: Mapping[str, Any], what: str) -> None:
    """Raises where a delta is of a model with PEFT's or our adapters, and ``what`` needs the base's own tensors."""
    if extended := [key for key in (PEFT_KEY, ADAPTERS_KEY) if config.get(key)]:
        plain = "merge_and_unload() of it is a plain model" if PEFT_KEY in extended else "save_adapters(model, folder)"
        raise SparsifyError(
            f"{what} goes by the base's own tensors, and this delta is of modules that "
            f"{'PEFT' if PEFT_KEY in extended else 'add_adapters'} put into the base: take "
            f"load_model(base, delta), and {plain}."
        )


def parse_json(text: str | bytes) -> Any:
    """Parses JSON, strictly by the standard, from a source that is not trusted.

    Raises:
        ValueError: for text that is no JSON or not UTF-8; NaN, Infinity, or a number beyond floats; an object with a
            key twice; a number too long; half of a surrogate pair.
        RecursionError, DeltaFormatError: for objects and lists too deep in each other.
    """
    if isinstance(text, bytes):
        text = text.decode()
    value = json.loads(text, parse_constant=_refuse, parse_int=_int, parse_float=_float)
    without_escapes = text.replace(r"\\", "").replace(r"\"", "")
    num_keys = _STRING.sub("", without_escapes).count(":")  # a hook that gets the pairs takes far more memory
    if _check_tree(value) != num_keys:
        raise DeltaFormatError("metadata: an object has a key twice")
    return value


def shown(value: Any) -> str:
    """Formats a value from a file for a message: on one line, printable, and not long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _refuse(constant: str) -> None:
    raise DeltaFormatError(f"metadata: {constant} is not JSON")


def _int(digits: str) -> int:
    _float(digits)
    return int(digits)


def _float(digits: str) -> float:
    if len(digits) > MAX_NUMBER_CHARACTERS:
        raise DeltaFormatError(f"metadata: a number has {len(digits):,} characters, at most {MAX_NUMBER_CHARACTERS:,}")
    number = float(digits)
    if not math.isfinite(number):
        raise DeltaFormatError(f"metadata: the number {digits:.40} is beyond what a float holds")
    return number


def _check_tree(value: Any) -> int:
    """Number of keys in a parsed value; raises where it is too deep, or a string in it is no Unicode text."""
    num_keys = 0
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for holder in level:
            num_keys += len(holder) if isinstance(holder, dict) else 0
            for item in chain(holder, holder.values()) if isinstance(holder, dict) else holder:
                if isinstance(item, str):
                    _check_text(item)
                elif isinstance(item, (dict, list)):
                    below.append(item)
        if not below:
            return num_keys
        level = below
    raise DeltaFormatError(f"metadata: objects and lists are more than {MAX_DEPTH} deep in each other")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DeltaFormatError(f"metadata: {shown(text)} is no Unicode text ({error.reason})") from error


def _parse_record(name: str, record: Any) -> Record:
    where = f"tensor `{name}`"
    _check_object(where, record, _RECORD_KEYS, optional={"kind", "drawn", "quantization"})
    shape, dtype, count, sha = (record[k] for k in ("shape", "dtype", "count", "base_sha256"))
    kind = record.get("kind", _DEFAULT_KIND)
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(_is_int(d, 0, _MAX_NUMEL) for d in shape):
        raise DeltaFormatError(f"{where}: `shape` is not a list of at most {_MAX_DIMS} sizes")
    numel = math.prod(shape)
    if numel > _MAX_NUMEL:
        raise DeltaFormatError(f"{where}: `shape` is that of more than 2^63 entries")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DeltaFormatError(f"{where}: `dtype` is {shown(dtype)}, expected one of {', '.join(DTYPES)}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise DeltaFormatError(f"{where}: `kind` is {shown(kind)}, expected one of {', '.join(KINDS)}")
    initializer = _parse_initializer(where, record["drawn"]) if "drawn" in record else None
    least = 1 if initializer is None else 0
    if not _is_int(count, least, numel):
        raise DeltaFormatError(
            f"{where}: `count` is {shown(count)}, expected a number from {least} to the tensor's {numel} entries"
        )
    if "quantization" in record and (initializer is not None or not is_short_text(record["quantization"])):
        raise DeltaFormatError(
            f"{where}: `quantization` is {shown(record['quantization'])}, expected a short string of printable ASCII, "
            "in a record without `drawn`"
        )
    return Record(tuple(shape), dtype, kind, count, sha, initializer, record.get("quantization"))


def _parse_initializer(where: str, recipe: Any) -> InitializerRecipe:
    _check_object(f"{where}, `drawn`", recipe, {field.name for field in fields(InitializerRecipe)})
    try:
        return InitializerRecipe(**recipe)
    except SparsifyError as error:
        raise DeltaFormatError(f"{where}, `drawn`: {error}") from error


def _check_object(where: str, value: Any, keys: set[str], optional: Set[str] = frozenset()) -> None:
    if not isinstance(value, dict) or not keys <= set(value) <= keys | optional:
        raise DeltaFormatError(f"{where}: expected a JSON object with exactly the keys {', '.join(sorted(keys))}")


def _is_int(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
