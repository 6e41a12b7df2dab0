"""Reads and writes the delta file, ``sparse_delta.safetensors``, and the JSON object in its header.

``format.md``, next to this module, specifies the file to the byte, and the checks of a reader.
"""

import hashlib
import json
import math
import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from sparsify.common.interrupts import uninterrupted
from sparsify.common.names import check_names, plain_name
from sparsify.delta import entries
from sparsify.delta.entries import DTYPES, Config, DeltaParts, NamedTensors, StrPath, TensorDelta, TensorDeltas, check
from sparsify.errors import DeltaFormatError, SparsifyError, brief

FORMAT_VERSION = 2
METADATA_KEY = "sparse_delta"
PAYLOAD_KEY = "payload_sha256"
PEFT_KEY, ADAPTERS_KEY = "peft", "adapters"  # of the config: adapters that were added to the base
ENTRIES_IN_WHOLE_KEY = "entries_in_whole"  # of the config: number of entries trained in tensors stored whole
MAX_DEPTH = 64  # of objects and lists in each other
# A parsed object or list takes some 100 bytes, so their number bounds the memory. Tensors need 1 in 21 bytes or fewer.
_FREE_OPENINGS = 4096
_CHARACTERS_PER_OPENING = 16
_CHARACTERS_PER_COLON = 10  # and so of a key: one takes some 200 bytes while its object is read
FILE_NAME = "sparse_delta.safetensors"
CONFIG_NAME = "sparse_delta_config.json"
MAX_HEADER_BYTES = 32 * 2**20  # some 100,000 tensors
_KINDS_OF_JSON = {CONFIG_NAME: "the description of a delta, for people", "config.json": "the config of a model",
                  "adapter_config.json": "the config of a PEFT adapter"}  # fmt: skip
_SAVED = re.compile(r"\.modules_to_save\.([^.]+)(?=\.)")
_RECORD_KEYS = {"shape", "dtype", "count", "base_sha256"}
_ERRORS = (SafetensorError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError)
_MAX_DIMS, _MAX_NUMEL = 64, 2**63 - 1  # positions are int64 in memory


def describe(tensors: TensorDeltas, whole: NamedTensors, config: Config) -> dict[str, Any]:
    """The metadata object of a delta, still without the payload's hash."""
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    records = {
        name: {
            "shape": list(tensor.shape),
            "dtype": dtype_names[tensor.dtype],
            **({} if tensor.kind == "replace" else {"kind": tensor.kind}),
            "count": tensor.count,
            "base_sha256": tensor.base_sha256,
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
    if type(version) is not int or version != FORMAT_VERSION:
        remedy = f"this sparsify reads {FORMAT_VERSION}: upgrade it if the file is newer"
        raise DeltaFormatError(f"its format version is {version!r:.120}, {remedy}")
    check_object("metadata", document, {"format_version", "config", "tensors", "whole", PAYLOAD_KEY})
    tensors, whole = document["tensors"], document["whole"]
    if not (isinstance(tensors, dict) and isinstance(whole, list) and isinstance(document["config"], dict)):
        raise DeltaFormatError("metadata: `tensors` and `config` have to be objects, `whole` a list")
    check_names(tensors, whole)
    return dict(document)


def check_not_extended(config: Config, what: str) -> None:
    """Raises where a delta is of a model with PEFT's or our adapters, and ``what`` needs the base's own tensors."""
    if extended := [key for key in (PEFT_KEY, ADAPTERS_KEY) if config.get(key)]:
        plain = "merge_and_unload() of it is a plain model" if PEFT_KEY in extended else "save_adapters(model, folder)"
        maker = "PEFT" if PEFT_KEY in extended else "add_adapters"
        what += f" goes by the base's own tensors, and this delta is of modules that {maker} put into the base"
        raise SparsifyError(f"{what}: take load_model(base, delta), and {plain}.")


def stored_name(name: str, config: Config) -> str:
    """A parameter's name in a delta: of a head that PEFT saves, the plain one, unless LoRA's wrapper is rebuilt."""
    plain = plain_name(name)
    inside = _SAVED.search(plain)
    settings = (config.get(PEFT_KEY) or {}).get(inside[1]) if inside else None
    return plain if settings and settings.get("modules_to_save", True) else _SAVED.sub("", plain)


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
    value = json.loads(text, object_pairs_hook=_without_repeats)
    _check_tree(value)
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise DeltaFormatError("an object has a key twice")
    return found


def _check_tree(value: Any, depth: int = 0) -> None:
    """Raises where objects and lists are too deep in each other, a number is beyond floats, or a text no Unicode."""
    if isinstance(value, str):
        value.encode()  # fails for half of a surrogate pair
    elif isinstance(value, (int, float)) and not abs(value) <= sys.float_info.max:  # nor is NaN
        raise DeltaFormatError(f"the number {value!r:.40} is not finite as a float")
    elif isinstance(value, (dict, list)):
        if depth == MAX_DEPTH:
            raise DeltaFormatError(f"objects and lists are more than {MAX_DEPTH} deep in each other")
        for item in chain(value, value.values()) if isinstance(value, dict) else value:
            _check_tree(item, depth + 1)


def to_bytes(
    tensors: TensorDeltas, whole: NamedTensors, config: Config, more: NamedTensors | None = None
) -> tuple[bytearray, dict[str, Any]]:
    """The bytes of a delta file, with ``more`` tensors by key, and its metadata; raises for what no reader takes."""
    check_names(tensors, whole)
    document = describe(tensors, whole, config)
    document[PAYLOAD_KEY] = placeholder = secrets.token_hex(32)
    payload = {f"{name}.whole": tensor for name, tensor in whole.items()} | dict(more or {})
    for name, part in tensors.items():
        payload |= {f"{name}.indices": entries.encode_indices(part.indices), f"{name}.values": part.values}
    # Cloned, since safetensors refuses tensors that share memory, as slices of one flat vector do.
    payload = {key: t.detach().cpu().clone(memory_format=torch.contiguous_format) for key, t in payload.items()}
    try:
        data = bytearray(safetensors.torch.save(payload, {METADATA_KEY: to_json(document)}))
    except KeyError as error:
        raise SparsifyError(f"safetensors has no dtype {error} of a tensor stored whole: convert it.") from error
    if (header_bytes := header_end(data) - 8) > MAX_HEADER_BYTES:
        most = f"more than the {MAX_HEADER_BYTES:,} that a reader accepts: shorten `config`, or split the delta."
        raise SparsifyError(f"the delta's header takes {header_bytes:,} bytes, {most}")
    document[PAYLOAD_KEY] = _payload_digest(data)
    fill_in(data, placeholder, document[PAYLOAD_KEY])
    return data, document


def fill_in(data: bytearray, placeholder: str, digest: str) -> None:
    """Puts a digest in the place of a random placeholder, which is there once."""
    start = data.index(placeholder.encode())
    data[start : start + len(digest)] = digest.encode()


def _payload_digest(data: bytes | bytearray) -> str:
    return hashlib.sha256(memoryview(data)[header_end(data) :]).hexdigest()


def header_end(data: bytes | bytearray) -> int:
    """The position of the payload's first byte in a file that begins with these bytes."""
    return 8 + int.from_bytes(data[:8], "little")


def replace_file(path: Path, data: bytes | bytearray) -> None:
    """Replaces a file atomically: whenever the process may die, the old or the new one is there, complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # in a folder of its own inside the target's: same file system, usual permissions, gone whatever error comes
    with uninterrupted(), tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        complete = Path(folder) / path.name
        with complete.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # else, after a power cut, some file systems have renamed and not written
        os.replace(complete, path)


def read(path: StrPath) -> DeltaParts:
    """Reads a delta file into memory; raises ``DeltaFormatError`` for anything that is not as ``format.md`` says."""
    with _opened(path) as file:
        return read_contents(file, *read_header(file))[0]


def payload_hash(path: StrPath) -> str:
    """The SHA-256 of the payload that a file records; raises as :func:`read`, for less."""
    with _opened(path) as file:
        return str(read_header(file)[1][PAYLOAD_KEY])


@contextmanager
def _opened(path: StrPath) -> Iterator[BinaryIO]:
    """Opens a file once, so that one that is replaced meanwhile is read as it was; errors in it name it."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # reading a pipe may never end
        raise DeltaFormatError(f"`{path}` is no regular file, so it is not read: copy what it gives into a file first.")
    with open(path, "rb") as file, refused(f"`{path}` is no delta that can be used", "download or save it again"):
        start = file.read(8)
        json_kind = _KINDS_OF_JSON.get(Path(path).name, "JSON text")
        kind = {b"{": json_kind, b"[": json_kind, b"P": "a zip file, as torch.save writes it"}.get(start.lstrip()[:1])
        if kind and header_end(start) > MAX_HEADER_BYTES:
            raise DeltaFormatError(f"it is {kind}, and a delta is `{FILE_NAME}`, or the folder of one")
        file.seek(0)
        yield file


@contextmanager
def refused(what: str, remedy: str) -> Iterator[None]:
    """Turns errors about a file's contents, whatever their type, into a ``DeltaFormatError``."""
    try:
        yield
    except _ERRORS as error:
        # `from None`: the library's own text may quote the file, terminal escapes and all.
        raise DeltaFormatError(f"{what}: {brief(error, 500)}. Nothing was loaded: {remedy}.") from None


def read_header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header, parsed, and the metadata in it, checked."""
    if (header_bytes := int.from_bytes(file.read(8), "little")) > MAX_HEADER_BYTES:
        raise DeltaFormatError(f"its header claims {header_bytes:,} bytes, more than {MAX_HEADER_BYTES:,}")
    text = file.read(header_bytes).decode()
    if not (text.startswith("{") and text.rstrip(" ").endswith("}")):  # safetensors accepts other space, too
        raise DeltaFormatError("its header does not begin with `{` and end in `}` and spaces")
    header = parse_json(text)  # strictly: safetensors takes the last of two equal keys
    del text  # which takes as much as the metadata to come
    return header, parse(header)


def read_contents(
    file: BinaryIO, header: Mapping[str, Any], document: Mapping[str, Any], optional: Set[str] = frozenset()
) -> tuple[DeltaParts, dict[str, Tensor]]:
    """Reads and checks what comes after :func:`read_header`: the delta, and the ``optional`` tensors by key."""
    records, whole = document["tensors"], document["whole"]
    present = set(header) - {"__metadata__"}
    expected = {f"{name}.{role}" for name in records for role in ("indices", "values")}
    expected |= {f"{name}.whole" for name in whole}
    if wrong := sorted(expected ^ (present - optional)):
        problem = "is missing" if wrong[0] in expected else "is there"
        raise DeltaFormatError(f"`{wrong[0]:.120}` {problem}, contrary to its metadata ({len(wrong)} such in all)")
    file.seek(0)
    data = file.read()
    if document[PAYLOAD_KEY] != _payload_digest(data):
        raise DeltaFormatError("its payload does not have the SHA-256 that its metadata records: it was damaged")
    with torch.device("cpu"):  # whatever the default device is
        try:
            stored = safetensors.torch.load(data)
        except KeyError:  # float4 and the like, which are read from a file alone
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, FILE_NAME).write_bytes(data)
                stored = safetensors.torch.load_file(Path(folder, FILE_NAME))
    tensors = {name: _restore(name, record, stored) for name, record in records.items()}
    dense = {name: stored[f"{name}.whole"] for name in whole}
    for name, tensor in dense.items():
        if tensor.dtype == torch.bool:  # of bytes that may be other than 0 and 1
            dense[name] = tensor.view(torch.uint8) != 0
    return (tensors, dense, document["config"]), {key: stored[key] for key in present & optional}


def _restore(name: str, record: Any, stored: Mapping[str, Tensor]) -> TensorDelta:
    """One tensor's entries from its record and the stored tensors; raises where these are not as ``format.md`` says."""
    try:
        check_object("its record", record, _RECORD_KEYS, optional={"kind", "quantization"})
        shape, dtype, count = (record.get(key) for key in ("shape", "dtype", "count"))
        is_list = isinstance(shape, list) and len(shape) <= _MAX_DIMS
        is_shape = is_list and all(type(size) is int and 0 <= size <= _MAX_NUMEL for size in shape)
        is_shape = is_shape and math.prod(shape) <= _MAX_NUMEL
        check(is_shape, "`shape` is", shape, f"a list of at most {_MAX_DIMS} sizes, with fewer than 2^63 entries")
        check(isinstance(dtype, str) and dtype in DTYPES, "`dtype` is", dtype, entries.one_of(DTYPES))
        check(type(count) is int, "`count` is", count, "an integer")
        indices, values = entries.decode_indices(stored[f"{name}.indices"], count), stored[f"{name}.values"]
        kind, sha, quantization = record.get("kind", "replace"), record["base_sha256"], record.get("quantization")
        return TensorDelta(indices, values, tuple(shape), DTYPES[dtype], kind, sha, quantization)
    except SparsifyError as error:
        raise DeltaFormatError(f"tensor `{name}`: {error}") from error
