"""Damaged delta files by the thousand: each must be refused, or be a valid delta; nothing else may happen.

    python tests/helpers/fuzz_format.py --files 10000 --seed 0

Good files are damaged by structured mutations. Worker processes with a bounded address space and a time limit read
each result; what loads is saved and loaded again, and put onto a small model. The promise: a `SparsifyError`, or a
delta that comes back from a second file as it was; a model that is bit for bit as before after any error, and after a
revert; no death, hang, other exception or great allocation. The first file that breaks it is kept: exit status 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import random
import resource
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

from sparsify.common.initializers import InitializerRecipe
from sparsify.common.raw_bits import digest
from sparsify.delta.sparse_delta import SparseDelta, TensorDelta
from sparsify.errors import DeltaFormatError, SparsifyError

ALLOWANCE = (
    48 * 2**20
)  # bytes of address space beyond what the libraries take: 16 MiB are promised, the rest is malloc's
SECONDS = 20  # per file; far more than one takes, so that a busy machine is no failure
BATCH = 500  # files of one worker
MODEL_SHAPES = {"a": (40, 50), "b": (300_000,), "c": (3, 4, 5), "head": (2, 3), "n": ()}

HOSTILE = [
    0, 1, -1, 2, 3, 7, 255,
    2**16, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30,
    -(2**63), 1.0, 2.5, 1e308, -0.0, True, False, None, "", "1", "F32", "F16", "BF16", "F64", "I8", "U16",
    "F8_E4M3", "F4",
    "C64", "uniform",
    "normal", "replace", "add", "0" * 64, "f" * 64, "G" * 64, "../../x", "/etc/passwd", "a\0b", "a\nb", "\x1b[2J",
    "\ud800",
    "\u202e", "é" * 2000, "x" * 100_000, [], {}, [[]], [0], [1, 1], [2**62, 4], [0, 2**63], [0, 2**62, 2**62], [-2, -3],
    [True, 2000], [1] * 65, [2.0], ["2"], [40, 50], [2000], [8, 0], [0, 8], [8, 4], [0, 2**64], {"a": 1}, "a", "b", "c",
]  # fmt: skip
RAW_JSON = [
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "0." + "1" * 2000, "1" * 5000, "1" + "0" * 200_000,
    "[" * 900 + "]" * 900,
    "[" * 200_000, '{"a":' * 100_000, "[" + "[],"  * 100_000 + "[]]", "[" + "0," * 200_000 + "0]",
    '{"a":1,"a":2}', "\\ud800",
    '"\\ud800"', '"\\u0000"', "tru", "", '"', "01", "+1", "0x10", "[1,]", "\ufeff1", "9" * 999, "1e-999",
    "[" * 70 + "]" * 70,
]  # fmt: skip


def make_model() -> nn.Module:
    """A model with every tensor that the good files name."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    for name in ("a", "b", "c", "head"):
        value = torch.randn(MODEL_SHAPES[name], generator=generator)
        model.register_parameter(name, nn.Parameter(value.bfloat16() if name == "b" else value))
    model.register_buffer("n", torch.tensor(3))
    return model


def good_files() -> list[bytes]:
    """Files that load and apply: all encodings, both kinds, tensors stored whole or drawn."""
    model = make_model()

    def part(name: str, indices: list[int], kind: str = "replace", stored_in: torch.dtype | None = None) -> TensorDelta:
        base = getattr(model, name).detach()
        positions = torch.tensor(indices)
        old = base.flatten()[positions]
        values = (old + 1).to(stored_in or base.dtype)
        return TensorDelta(positions, values, tuple(base.shape), base.dtype, kind, digest(old))

    def drawn(name: str, distribution: str, indices: list[int]) -> TensorDelta:
        draw = InitializerRecipe(distribution, 0.5, seed=1)
        initial = draw.values(name, MODEL_SHAPES[name], getattr(model, name).dtype)
        positions = torch.tensor(indices, dtype=torch.int64)
        values = initial.flatten()[positions] + 1
        return TensorDelta(positions, values, MODEL_SHAPES[name], initial.dtype, "replace", digest(initial), draw)

    many = sorted(random.Random(0).sample(range(300_000), 300))
    deltas = [
        SparseDelta({"a": part("a", [0, 7, 1999]), "b": part("b", many)}, {"n": torch.tensor(9)}, {"steps": 3}),
        SparseDelta({"b": part("b", [5, 70_000, 299_999], "add", torch.float32)}, {"head": torch.ones(2, 3)}),
        SparseDelta({"c": part("c", list(range(60))), "b": part("b", [290_000])}, {}, {"strategy": {"name": ["id3"]}}),
        SparseDelta({}, {"head": torch.full((2, 3), math.nan), "n": torch.tensor(1)}),
        SparseDelta({"a": part("a", list(range(0, 2000, 3)), "add", torch.float64)}, {}, {"note": "é" * 40}),
        SparseDelta(
            {"a": drawn("a", "uniform", [3, 4]), "b": drawn("b", "normal", []), "c": drawn("c", "constant", [])}
        ),
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        files = []
        for delta in deltas:
            delta.save(path)
            files.append(path.read_bytes())
    return [*files, as_version_1(files[0])]


def as_version_1(data: bytes) -> bytes:
    """The file as format version 1 had it, without a hash of the payload."""
    parts = Parts(data)
    parts.document["format_version"] = 1
    del parts.document["payload_sha256"]
    return parts.join(rehash=False)


class Parts:
    """A delta file taken apart: header, metadata document, and the payload's tensors, each of which may be changed."""

    def __init__(self, data: bytes) -> None:
        size = int.from_bytes(data[:8], "little")
        self.header = json.loads(data[8 : 8 + size])
        self.payload = data[8 + size :]
        self.document = json.loads(self.header["__metadata__"]["sparse_delta"])
        self.stated = self.document.get("payload_sha256")

    @property
    def keys(self) -> list[str]:
        return [key for key in self.header if key != "__metadata__"]

    def rehash(self) -> None:
        """Makes the payload's hash fit, unless it was itself changed: an attack is to get past it."""
        if self.stated is not None and self.document.get("payload_sha256") == self.stated:
            self.document["payload_sha256"] = hashlib.sha256(self.payload).hexdigest()

    def join(self, document_text: str | None = None, header_text: str | None = None, rehash: bool = True) -> bytes:
        if rehash:
            self.rehash()
        if isinstance(self.header.get("__metadata__"), dict):
            text = json.dumps(self.document) if document_text is None else document_text
            self.header["__metadata__"]["sparse_delta"] = text
        text = json.dumps(self.header) if header_text is None else header_text
        header = text.encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(header)) + header + self.payload

    def replace_tensor(self, key: str, dtype: str, shape: list[int], data: bytes) -> None:
        """Puts other bytes in place of a tensor's; the others move, so that only this one is wrong."""
        begin, end = self.header[key]["data_offsets"]
        self.payload = self.payload[:begin] + data + self.payload[end:]
        moved = len(data) - (end - begin)
        for other in self.keys:
            low, high = self.header[other]["data_offsets"]
            if other != key and low >= end:
                self.header[other]["data_offsets"] = [low + moved, high + moved]
        self.header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(data)]}


def places(value: object, path: tuple = ()) -> list[tuple]:
    """The paths of everything in a JSON value, itself apart."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in [(*path, key), *places(item, (*path, key))]]


def change_at(rng: random.Random, root: object, path: tuple) -> None:
    """Replaces, removes, renames or repeats what is at a path."""
    for key in path[:-1]:
        root = root[key]
    key = path[-1]
    action = rng.randrange(6)
    if action == 0:
        del root[key]
    elif action == 1 and isinstance(root, dict):
        root[str(rng.choice(HOSTILE))] = root.pop(key)
    elif action == 2 and isinstance(root, list):
        root.append(root[key])
    elif action == 3 and isinstance(root[key], int):
        root[key] += rng.choice([-1, 1, 2, -2, 65_535, 2**32, -(2**40)])
    else:
        root[key] = rng.choice(HOSTILE)


def some(rng: random.Random) -> int:
    return rng.choice([1, 1, 1, 2, 3])


def mutate_metadata(rng: random.Random, parts: Parts, _: Parts) -> bytes:
    for _ in range(some(rng)):
        if found := places(parts.document):
            change_at(rng, parts.document, rng.choice(found))
    return parts.join()


def mutate_header(rng: random.Random, parts: Parts, _: Parts) -> bytes:
    text = json.dumps(parts.document)
    for _ in range(some(rng)):
        if found := places(parts.header):
            change_at(rng, parts.header, rng.choice(found))
    return parts.join(text) if isinstance(parts.header.get("__metadata__"), dict) else parts.join()


def raw_metadata(rng: random.Random, parts: Parts, _: Parts) -> bytes:
    """Text that JSON libraries disagree on, in place of a value of the metadata."""
    *path, key = rng.choice(places(parts.document))
    holder = parts.document
    for step in path:
        holder = holder[step]
    holder[key] = "@@"
    return parts.join(json.dumps(parts.document).replace('"@@"', rng.choice(RAW_JSON)))


def raw_header(rng: random.Random, parts: Parts, _: Parts) -> bytes:
    parts.join()
    *path, key = rng.choice(places(parts.header))
    holder = parts.header
    for step in path:
        holder = holder[step]
    holder[key] = "@@"
    return parts.join(header_text=json.dumps(parts.header).replace('"@@"', rng.choice(RAW_JSON), 1))


def repeat_key(rng: random.Random, parts: Parts, other: Parts) -> bytes:
    """A key twice in the header, the second time with another entry."""
    parts.join()
    extra = {rng.choice(parts.keys): rng.choice([*other.header.values(), *(parts.header[key] for key in parts.keys)])}
    return parts.join(header_text=json.dumps(parts.header)[:-1] + "," + json.dumps(extra)[1:])


def flip_payload(rng: random.Random, parts: Parts, _: Parts) -> bytes:
    payload = bytearray(parts.payload)
    for _ in range(some(rng)):
        payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
    parts.payload = bytes(payload)
    return parts.join(rehash=rng.random() < 0.7)


def flip_anywhere(rng: random.Random, parts: Parts, _: Parts) -> bytes:
    data = bytearray(parts.join())
    for _ in range(some(rng)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def cut(rng: random.Random, parts: Parts, _: Parts) -> bytes:
    data = parts.join()
    return data[: rng.randrange(len(data))]


def extend(rng: random.Random, parts: Parts, other: Parts) -> bytes:
    return parts.join() + rng.choice([b"\0", b"\0" * 4096, other.join(), rng.randbytes(rng.randrange(1, 64))])


def header_length(rng: random.Random, parts: Parts, _: Parts) -> bytes:
    data = parts.join()
    size = int.from_bytes(data[:8], "little")
    wrong = rng.choice(
        [0, 1, 2, size - 1, size + 1, size + 8, len(data), 2**25, 2**25 + 1, 2**31, 2**63, 2**64 - 1, 2**64 - 8]
    )
    return struct.pack("<Q", wrong) + data[8:]


def corrupt_indices(rng: random.Random, parts: Parts, _: Parts) -> bytes:
    """Another stream of numbers: storms of escapes, repeated, descending, huge or too many, in any encoding."""
    keys = [key for key in parts.keys if key.endswith(".indices")]
    if not keys:
        return flip_payload(rng, parts, parts)
    key = rng.choice(keys)
    record = parts.document["tensors"][key.removesuffix(".indices")]
    dtype, code = rng.choice([("U16", "H"), ("U32", "I"), ("U64", "Q"), ("I64", "q"), ("U8", "B"), ("F32", "f")])
    count = rng.choice([record["count"], record["count"], 0, 1, 2 * record["count"], 100_000])
    top = {"H": 2**16, "I": 2**32, "Q": 2**64, "q": 2**63, "B": 256, "f": 2}[code]
    draw = rng.choice([
        lambda i: top - 1, lambda i: 0, lambda i: i % top, lambda i: (count - i) % top, lambda i: rng.randrange(top),
        lambda i: rng.choice([0, top - 1]), lambda i: (top // 2 + i) % top, lambda i: min(i * 7, top - 1),
        lambda i: top - 1 if i + 1 < count else 0,
    ])  # fmt: skip
    numbers = [draw(i) for i in range(count)]
    if rng.random() < 0.3:
        record["shape"] = [rng.choice([2**62, 2**40, 2**63 - 1, 10**7])]
    if rng.random() < 0.3:
        record["count"] = max(count, 1)
    parts.replace_tensor(key, dtype, [count], struct.pack(f"<{count}{code}", *numbers))
    return parts.join()


def corrupt_values(rng: random.Random, parts: Parts, _: Parts) -> bytes:
    """NaN, infinities, other dtypes and other counts; now and then with a count that agrees."""
    key = rng.choice(parts.keys)
    dtype, size = rng.choice(
        [("F32", 4), ("F64", 8), ("BF16", 2), ("F16", 2), ("I32", 4), ("BOOL", 1), ("F8_E5M2", 1), ("C64", 8)]
    )
    name, _, role = key.rpartition(".")
    count = rng.choice([0, 1, 3, 60, 300])
    if role == "values" and rng.random() < 0.7:
        count = parts.document["tensors"][name]["count"]
    fill = rng.choice([b"\xff", b"\0", b"\x7f\x80", b"\x80\x7f", b"\x01\xfc", b"\x3f"])
    parts.replace_tensor(key, dtype, [count], (fill * (size * count))[: size * count])
    return parts.join()


def alias_offsets(rng: random.Random, parts: Parts, _: Parts) -> bytes:
    """Tensors that overlap, leave gaps or lie outside the payload."""
    first, second = rng.choice(parts.keys), rng.choice(parts.keys)
    begin, end = parts.header[second]["data_offsets"]
    parts.header[first]["data_offsets"] = rng.choice([
        [begin, end], [begin + 1, end + 1], [end, begin], [0, len(parts.payload)], [0, 2**63], [2**64 - 8,
        2**64], [begin, begin],
    ])  # fmt: skip
    return parts.join()


def swap_fields(rng: random.Random, parts: Parts, other: Parts) -> bytes:
    """A whole part of one file in another."""
    what = rng.randrange(5)
    if what == 0:
        parts.document, parts.stated = other.document, other.stated
    elif what == 1:
        parts.payload = other.payload
    elif what == 2:
        field = rng.choice(["tensors", "whole", "config"])
        parts.document[field] = other.document[field]
    elif what == 3:
        parts.header[rng.choice(parts.keys)] = other.header[rng.choice(other.keys)]
    else:
        left, right = rng.choice(parts.keys), rng.choice(parts.keys)
        parts.header[left], parts.header[right] = parts.header[right], parts.header[left]
    return parts.join()


def many_small(rng: random.Random, parts: Parts, _: Parts) -> bytes:
    """Much structure in few bytes, where parsers take most memory."""
    count = rng.choice([1000, 20_000])
    what = rng.randrange(5)
    if what == 0:
        parts.document["config"] = {"x": [rng.choice([[], {}, 0, 1.5, "ab", {"a": 0}, [0]])] * count}
    elif what == 1:
        parts.document["whole"] = [str(i) for i in range(count)]
    elif what == 2:
        record = {"shape": [1] * rng.choice([1, 64, 65]), "dtype": "F32", "count": 1, "base_sha256": "0" * 64}
        parts.document["tensors"] = {str(i): record for i in range(count // 10)}
    elif what == 3:
        empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        parts.header |= {f"{i}.whole": empty for i in range(count // 5)}
        parts.document["whole"] += [str(i) for i in range(count // 5)]
    else:
        parts.header[rng.choice(parts.keys)]["shape"] = [rng.choice([0, 1])] * count
    return parts.join()


MUTATIONS = [
    mutate_metadata, mutate_header, raw_metadata, raw_header, repeat_key, flip_payload, flip_anywhere, cut, extend,
    header_length, corrupt_indices, corrupt_values, alias_offsets, swap_fields, many_small,
]  # fmt: skip


def damaged(number: int, seed: int, good: list[bytes]) -> tuple[str, bytes]:
    """The kind and the bytes of one damaged file; the same for the same number and seed."""
    rng = random.Random(f"{seed}/{number}")
    mutation = MUTATIONS[number % len(MUTATIONS)]
    return mutation.__name__, mutation(rng, Parts(rng.choice(good)), Parts(rng.choice(good)))


def bits(model: nn.Module) -> dict[str, tuple]:
    return {name: (tensor.dtype, tensor.shape, digest(tensor)) for name, tensor in model.state_dict().items()}


FIELDS = ("shape", "dtype", "kind", "base_sha256", "initializer")


def contents(delta: SparseDelta) -> tuple:
    """Everything that a delta holds, to the bit."""
    tensors = {
        name: (
            digest(p.indices),
            p.values.dtype,
            digest(p.values),
            p.shape,
            p.dtype,
            p.kind,
            p.base_sha256,
            p.initializer,
        )
        for name, p in delta.tensors.items()
    }
    whole = {name: (tensor.dtype, tensor.shape, digest(tensor)) for name, tensor in delta.whole.items()}
    return tensors, whole, delta.config


def examine(path: Path, model: nn.Module, untouched: dict[str, tuple]) -> str:
    """What becomes of a file; raises where the promise is broken."""
    try:
        delta = SparseDelta.load(path)
    except DeltaFormatError as error:
        if not str(error).isprintable() or len(str(error)) > 2000:
            raise AssertionError("the message quotes the file unchecked") from None
        return "refused"
    again = path.with_name("again.safetensors")
    delta.save(again)
    if contents(SparseDelta.load(again)) != contents(delta):
        raise AssertionError("saved and loaded again, the delta is another")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            delta.apply(model)
            delta.revert(model)
        outcome = "valid, applied"
    except SparsifyError:
        outcome = "valid, not of this model"
    if bits(model) != untouched:
        raise AssertionError("the model has changed")
    return outcome


def address_space() -> int:
    """Bytes of address space that this process takes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def limit_address_space(most: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def work(numbers: list[int], seed: int, folder: str, results: Connection) -> None:
    """One worker: examines files, and says before each which one it is, in case it does not live to say more."""
    torch.set_num_threads(1)
    good, model = good_files(), make_model()
    untouched = bits(model)
    path = Path(folder) / "damaged.safetensors"
    for data in good:  # whatever is set up on first use is no part of a file's cost
        path.write_bytes(data)
        assert examine(path, model, untouched) == "valid, applied"
    taken = address_space()
    for number in numbers:
        kind, data = damaged(number, seed, good)
        results.send((number, "started", kind))
        path.write_bytes(data)
        limit_address_space(taken + ALLOWANCE + 32 * len(data))
        try:
            outcome = examine(path, model, untouched)
        except BaseException as error:
            outcome = f"BROKEN: {type(error).__name__}: {str(error)[:300]!a}"
        finally:
            limit_address_space(resource.RLIM_INFINITY)
        results.send((number, outcome, kind))


def run_batch(
    numbers: list[int], seed: int, counts: dict[str, Counter], worker_main: Callable | None = None
) -> tuple[int, str] | None:
    """Examines some files in a worker of their own; the number of the first that breaks the promise, and how."""
    context = multiprocessing.get_context("spawn")
    results, worker_end = context.Pipe(duplex=False)  # not a queue, whose thread would take address space of its own
    with tempfile.TemporaryDirectory() as folder:
        worker = context.Process(target=worker_main or work, args=(numbers, seed, folder, worker_end))
        worker.start()
        worker_end.close()
        try:
            return watch(results, numbers, counts)
        finally:
            worker.kill()
            worker.join()


def watch(results: Connection, numbers: list[int], counts: dict[str, Counter]) -> tuple[int, str] | None:
    """Follows a worker until its last file, its death, or a file that takes too long."""
    current, done, patience, kind = numbers[0], 0, SECONDS + 100, ""  # for the imports
    while done < len(numbers):
        if not results.poll(patience):
            return current, f"BROKEN: it takes more than {SECONDS} seconds ({kind})"
        try:
            current, outcome, kind = results.recv()
        except EOFError:
            return current, "BROKEN: the worker died" + (f" ({kind})" if kind else "")
        patience = SECONDS
        if outcome.startswith("BROKEN"):
            return current, outcome
        if outcome != "started":
            counts.setdefault(kind, Counter())[outcome] += 1
            done += 1
    return None


def fuzz(files: int, seed: int) -> tuple[dict[str, Counter], tuple[int, str] | None]:
    """Tries that many files: outcomes by kind of mutation, and the first failure if there is one."""
    counts: dict[str, Counter] = {}
    for start in range(0, files, BATCH):
        failure = run_batch(list(range(start, min(start + BATCH, files))), seed, counts)
        if failure:
            return counts, failure
    return counts, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("broken.safetensors"), help="where to keep a file that fails")
    arguments = parser.parse_args()
    start = time.monotonic()
    counts, failure = fuzz(arguments.files, arguments.seed)
    outcomes = ["refused", "valid, not of this model", "valid, applied"]
    print(f"{'mutation':<18}" + "".join(f"{outcome:>26}" for outcome in outcomes))
    for kind, counter in [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]:
        print(f"{kind:<18}" + "".join(f"{counter[outcome]:>26,}" for outcome in outcomes))
    print(f"{sum(map(sum, (c.values() for c in counts.values()))):,} files in {time.monotonic() - start:.0f} seconds")
    if failure:
        number, reason = failure
        kind, data = damaged(number, arguments.seed, good_files())
        arguments.keep.write_bytes(data)
        print(f"file {number} ({kind}): {reason}; kept as {arguments.keep}")
        return 1
    print("the promise held for every file")
    return 0


if __name__ == "__main__":
    sys.exit(main())
