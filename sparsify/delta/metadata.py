"""Writes and checks the JSON object in a delta file's header, from the parts of a delta or from untrusted text."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Set
from dataclasses import asdict
from itertools import chain
from typing import Any

from sparsify.common.names import check_names
from sparsify.delta.entries import DTYPES, NamedTensors, TensorDeltas
from sparsify.errors import DeltaFormatError, SparsifyError

FORMAT_VERSION = 2  # that is written; version 1 is the same without `payload_sha256`
METADATA_KEY = "sparse_delta"
PAYLOAD_KEY = "payload_sha256"
PEFT_KEY, ADAPTERS_KEY = "peft", "adapters"  # of the config: adapters that were added to the base
ENTRIES_IN_WHOLE_KEY = "entries_in_whole"  # of the config: number of entries trained in tensors stored whole
MAX_DEPTH = 64  # of objects and lists in each other
# A parsed object or list takes some 100 bytes, so their number bounds the memory. Tensors need 1 in 21 bytes or fewer.
_FREE_OPENINGS = 4096
_CHARACTERS_PER_OPENING = 16
_CHARACTERS_PER_COLON = 10  # and so of a key: one takes some 200 bytes while its object is read
_MOST_DIGITS = 310  # of an integer that a float holds, and its sign

_DOCUMENT_KEYS = {"format_version", "config", "tensors", "whole"}


def describe(tensors: TensorDeltas, whole: NamedTensors, config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata object of a delta, still without the payload's hash."""
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    records = {
        name: {
            "shape": list(tensor.shape),
            "dtype": dtype_names[tensor.dtype],
            **({} if tensor.kind == "replace" else {"kind": tensor.kind}),
            "count": tensor.count,
            "base_sha256": tensor.base_sha256,
            **({} if tensor.initializer is None else {"drawn": asdict(tensor.initializer)}),
            **({} if tensor.quantization is None else {"quantization": tensor.quantization}),
        }
        for name, tensor in tensors.items()
    }
    return {"format_version": FORMAT_VERSION, "config": dict(config), "tensors": records, "whole": list(whole)}


def to_json(document: Mapping[str, Any]) -> str:
    """The metadata object as text; raises where its config does not go into JSON, or a reader would refuse it."""
    try:
        text = json.dumps(document, allow_nan=False, separators=(",", ":"))
        parse_json(text)
    except (TypeError, ValueError, RecursionError) as error:
        remedy = "keep it to strings, finite numbers, booleans, None, lists and dicts."
        raise SparsifyError(f"the delta's config does not go into JSON ({error}): {remedy}") from error
    return text


def parse(header: Any) -> dict[str, Any]:
    """The metadata object in a file's header; raises where anything in it but a record is not as ``format.md`` says."""
    holder = header.get("__metadata__") if isinstance(header, dict) else None
    text = holder.get(METADATA_KEY) if isinstance(holder, dict) else None
    if not isinstance(text, str):
        other = "it is another kind of safetensors file, such as a model's"
        raise DeltaFormatError(f"its header has no metadata `{METADATA_KEY}`: {other}")
    document = parse_json(text)
    version = document.get("format_version") if isinstance(document, dict) else None
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        remedy = f"this sparsify reads 1 to {FORMAT_VERSION}: upgrade it if the file is newer"
        raise DeltaFormatError(f"its format version is {version!r:.120}, {remedy}")
    check_object("metadata", document, {*_DOCUMENT_KEYS, *([PAYLOAD_KEY] if version > 1 else [])})
    tensors, whole = document["tensors"], document["whole"]
    if not (isinstance(tensors, dict) and isinstance(whole, list) and isinstance(document["config"], dict)):
        raise DeltaFormatError("metadata: `tensors` and `config` have to be objects, `whole` a list")
    check_names(tensors, whole)
    return dict(document)


def check_not_extended(config: Mapping[str, Any], what: str) -> None:
    """Raises where a delta is of a model with PEFT's or our adapters, and ``what`` needs the base's own tensors."""
    if extended := [key for key in (PEFT_KEY, ADAPTERS_KEY) if config.get(key)]:
        plain = "merge_and_unload() of it is a plain model" if PEFT_KEY in extended else "save_adapters(model, folder)"
        maker = "PEFT" if PEFT_KEY in extended else "add_adapters"
        what += f" goes by the base's own tensors, and this delta is of modules that {maker} put into the base"
        raise SparsifyError(f"{what}: take load_model(base, delta), and {plain}.")


def check_object(where: str, value: Any, keys: Set[str], optional: Set[str] = frozenset()) -> None:
    """Raises unless a parsed value is an object with some keys, none of which is null."""
    if not isinstance(value, dict) or not keys <= set(value) <= keys | optional or None in value.values():
        names = ", ".join(sorted(keys))
        raise DeltaFormatError(f"{where}: expected a JSON object with exactly the keys {names}, none of which is null")


def parse_json(text: str) -> Any:
    """Parses JSON strictly, from a source that is not trusted; raises ``ValueError`` or ``RecursionError``."""
    if text.count("{") + text.count("[") > _FREE_OPENINGS + len(text) // _CHARACTERS_PER_OPENING:
        raise DeltaFormatError(f"{len(text):,} characters of JSON open more objects and lists than a reader accepts")
    if text.count(":") > _FREE_OPENINGS + len(text) // _CHARACTERS_PER_COLON:
        raise DeltaFormatError(f"{len(text):,} characters of JSON have more colons than a reader accepts")
    value = json.loads(text, parse_int=_int, object_pairs_hook=_without_repeats)
    _check_tree(value)
    return value


def _int(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:  # converting takes time that grows with the square
        raise DeltaFormatError(f"the number {digits:.40} is not finite as a float")
    return int(digits)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise DeltaFormatError("an object has a key twice")
    return found


def _check_tree(value: Any) -> None:
    """Raises where objects and lists are too deep in each other, a number is beyond floats, or a text no Unicode."""
    items, depth = [value], 0
    while items:  # those of one depth
        inner: list[Any] = []
        for item in items:
            if isinstance(item, str):
                item.encode()  # fails for half of a surrogate pair
            elif isinstance(item, (int, float)) and not abs(item) <= sys.float_info.max:  # nor is NaN
                raise DeltaFormatError(f"the number {item!r:.40} is not finite as a float")
            elif isinstance(item, (dict, list)):
                inner += chain(item, item.values()) if isinstance(item, dict) else item
                if depth == MAX_DEPTH:
                    raise DeltaFormatError(f"objects and lists are more than {MAX_DEPTH} deep in each other")
        items, depth = inner, depth + 1
