"""Reading a file takes at most 16 MiB + 32 x its header + 6 x its payload, as ``format.md`` promises."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from delta_bytes import join, rehashed, split, write

from sparsify.delta.entries import TensorDelta

ROOT = Path(__file__).parents[2]
MEGABYTE = 2**20
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_TRIM_THRESHOLD_": str(1 << 16)}  # else glibc keeps some
READ = """
import sys
from pathlib import Path
import torch
from delta_bytes import write
from limits import within_limits
from sparsify.delta.entries import TensorDelta
from sparsify.errors import DeltaFormatError
from sparsify.delta.format import read

small = Path(sys.argv[1]) / "small"
write(small, {"a": TensorDelta(torch.tensor([1, 2]), torch.ones(2), (9,), torch.float32, "add", "0" * 64)}, {}, {})
read(small)  # whatever is set up on first use is no part of a file's cost
for path in map(Path, sys.argv[2:]):
    size, outcome = path.stat().st_size, "valid"
    header = 8 + int.from_bytes(path.open("rb").read(8), "little")
    try:
        within_limits(lambda: read(path), 16 + (32 * header + 6 * max(size - header, 0)) / 2**20, seconds=200)
    except DeltaFormatError as error:
        outcome = "refused"
        print(path.name, "is refused:", error, file=sys.stderr)  # for the report of a test that fails
    print(path.name, "is", outcome)
"""


def with_metadata(config="{}", tensors="{}", whole="[]"):
    sha256 = hashlib.sha256().hexdigest()
    text = f'{{"format_version":2,"config":{config},"tensors":{tensors},"whole":{whole},"payload_sha256":"{sha256}"}}'
    return join(json.dumps({"__metadata__": {"sparse_delta": text}}, ensure_ascii=False).encode(), b"")


def with_config(text):
    return with_metadata(config=f'{{"a":{text}}}')


def repeated(item, n_bytes=MEGABYTE):
    return "[" + ",".join([item] * (n_bytes // (len(item) + 1))) + "]"


def keys(count):
    """Keys of characters of four bytes; after so many, Python has just made a dict four times as large."""
    letters = [chr(code) for code in range(0x80, 0x800)]
    pairs = itertools.islice(itertools.product(letters, letters), count)
    return ",".join(f'"{first}{second}":1000' for first, second in pairs) + ',"\U0001f600":0'


def empty_whole_tensors(count=30_000):
    header, _ = split(with_metadata(whole=json.dumps([str(number) for number in range(count)])))
    nothing = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    return join(header | {f"{number}.whole": nothing for number in range(count)}, b"")


HOSTILE_HEADERS = {
    "objects as many as are allowed": lambda: with_config(repeated('{"a":0},"aaaaaaaa"', 4 * MEGABYTE)),
    "far too many lists": lambda: with_config(repeated("[]")),
    "far too deep": lambda: with_config("[" * MEGABYTE),
    "floats": lambda: with_config(repeated("1e1")),
    "short strings": lambda: with_config(repeated('"ab"')),
    "a text of wide characters": lambda: with_config('"\U0001f600' + "a" * 4 * MEGABYTE + '"'),  # four bytes each
    "an object of very many keys": lambda: with_config("{" + keys(699_053) + "}"),
    "very many keys outside the metadata": lambda: join(f'{{"x":{{{keys(1_398_105)}}}}}'.encode(), b""),
    "a number of a million digits": lambda: with_config("1" * MEGABYTE),
    "very many empty tensors": empty_whole_tensors,
    "a million sizes": lambda: join({"x": {"dtype": "U8", "shape": [0] * MEGABYTE, "data_offsets": [0, 0]}}, b""),
}


REFUSED = ["far too many lists", "far too deep", "very many keys outside the metadata", "a number of a million digits"]
REFUSED += ["a million sizes"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and an address-space limit")


def part(count, stride, dtype):
    indices, values = torch.arange(count) * stride, torch.ones(count, dtype=dtype)
    return TensorDelta(indices, values, (count * stride,), dtype, "replace", "0" * 64)


def write_storm_of_escapes(path, count=4_000_000):
    """One entry, and a stream that has come to it through millions of escapes."""
    write(path, {"a": part(1, 2**62, torch.float32)}, {}, {})
    header, payload = split(path.read_bytes())
    assert header["a.indices"] == {"dtype": "U16", "shape": [1], "data_offsets": [4, 6]}
    header["a.indices"] = {"dtype": "U16", "shape": [count], "data_offsets": [4, 4 + 2 * count]}
    path.write_bytes(rehashed(join(header, payload[:4] + b"\xff\xff" * (count - 1) + b"\0\0")))


def outcomes(folder, paths):
    """Reads files within the promised bounds, each in a process of its own, and says what became of them."""
    environment = {**os.environ, **GIVE_BACK, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'helpers'}"}
    run = subprocess.run([sys.executable, "-c", READ, folder, *paths], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, f"{run.stdout[-300:]}: {run.stderr[-1000:]}"
    sys.stderr.write(run.stderr)
    return dict(line.rsplit(" is ", 1) for line in run.stdout.splitlines())


def test_hostile_headers_take_little(tmp_path):
    paths = [tmp_path / sort for sort in HOSTILE_HEADERS]
    for path in paths:
        path.write_bytes(HOSTILE_HEADERS[path.name]())
    found = outcomes(tmp_path, paths)
    assert list(found) == list(HOSTILE_HEADERS)
    assert [sort for sort, outcome in found.items() if outcome == "refused"] == REFUSED


def test_large_payloads_take_little(tmp_path):
    strides = {"U16": 3, "U32": 2000, "U64": 2**34}
    paths = []
    for (encoding, stride), dtype in itertools.product(strides.items(), (torch.bfloat16, torch.float64)):
        paths.append(tmp_path / f"{encoding} and {dtype}")
        write(paths[-1], {"a": part(1_000_000, stride, dtype)}, {}, {})
    write(tmp_path / "whole", {}, {"a": torch.zeros(5_000_000)}, {})
    write_storm_of_escapes(tmp_path / "storm")
    found = outcomes(tmp_path, [*paths, tmp_path / "whole", tmp_path / "storm"])
    assert len(found) == 8
    assert set(found.values()) == {"valid"}
