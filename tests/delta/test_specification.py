"""The written specification is executed: its example to the byte, and its reader against files that sparsify writes."""

import json
import re
import tempfile
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from delta_bytes import split
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsify.common.names import MAX_NAME_CHARACTERS
from sparsify.common.raw_bits import digest
from sparsify.delta.entries import DTYPES
from sparsify.delta.format import MAX_DEPTH, MAX_HEADER_BYTES
from sparsify.delta.sparse_delta import SparseDelta, TensorDelta

SPECIFICATION = files("sparsify").joinpath("delta/format.md").read_text(encoding="utf-8")
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLAT = re.sub(r"\s+", " ", SPECIFICATION)
PROPERTY = settings(max_examples=150)


def block(language):
    found = re.findall(rf"```{language}\n(.*?)\n```", SPECIFICATION, flags=re.DOTALL)
    assert len(found) == 1
    return found[0]


def golden():
    data = b""
    for line in block("hex").splitlines():
        offset, as_hex, as_text = re.fullmatch(r"([0-9a-f]{6})  ([0-9a-f ]+?) +\|(.*)\|", line).groups()
        row = bytes.fromhex(as_hex)
        assert int(offset, 16) == len(data)
        assert as_text == "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        data += row
    return data


def described():
    def part(indices, values, shape, kind, base):
        values = torch.tensor(values, dtype=base.dtype)
        return TensorDelta(torch.tensor(indices), values, shape, base.dtype, kind, digest(base))

    w = part([2, 65_538, 65_539], [1.0, -2.0, 0.5], (2, 50_000), "replace", torch.full((3,), 0.25))
    b = part([1], [0.5], (3,), "add", torch.ones(1, dtype=torch.bfloat16))
    return SparseDelta({"w": w, "b": b}, {"n": torch.tensor(7)}, {"strategy": "id3"})


@pytest.fixture(scope="module")
def reader():
    names = {}
    exec(block("python"), names)
    return names


def test_the_described_delta_is_written_as_exactly_these_bytes_and_read_from_them(tmp_path):
    described().save(tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").read_bytes() == golden()
    read = SparseDelta.load(tmp_path / "x.safetensors")
    assert read == described()
    assert (list(read.tensors), read.config) == (["w", "b"], {"strategy": "id3"})


def test_the_reader_notices_a_changed_bit_in_the_payload_and_another_base(reader):
    _, _, record = reader["read_delta"](golden())[0]["w"]
    assert reader["fits_base"](record, bytes.fromhex("0000803e") * 3)
    assert not reader["fits_base"](record, bytes.fromhex("0000803f") * 3)
    data = bytearray(golden())
    data[8 + int.from_bytes(data[:8], "little") + 8] ^= 1  # the first bit of w's first value
    with pytest.raises(AssertionError):
        reader["read_delta"](bytes(data))


def test_the_metadata_is_the_one_that_is_shown_and_the_limits_are_those_of_the_code():
    header, _ = split(golden())
    assert json.loads(header["__metadata__"]["sparse_delta"]) == json.loads(block("json"))
    for number in (MAX_HEADER_BYTES, MAX_NAME_CHARACTERS):
        assert f"{number:,} " in SPECIFICATION
    assert f"more than {MAX_DEPTH} deep in each other" in FLAT


GAPS = {  # by the encoding that is smallest
    "U16": st.one_of(st.integers(0, 300), st.sampled_from([65_534, 65_535, 65_536])),
    "U32": st.integers(200_000, 2**26),
    "U64": st.integers(2**34, 2**50),
}
NAMES = r"w w.values w.indices a.whole __metadata__ вес ../../outside /etc/x C:\x ~ %s{}".split()  # noqa: SIM905
NAMES = st.one_of(st.sampled_from(NAMES), st.text("ab./ é😀", min_size=1))


@st.composite
def tensor_deltas(draw):
    dtype, kind = draw(st.sampled_from(list(DTYPES.values()))), draw(st.sampled_from(["replace", "add"]))
    stored_in = dtype if kind == "replace" else draw(st.sampled_from(list(DTYPES.values())))
    gaps = draw(st.lists(GAPS[draw(st.sampled_from(list(GAPS)))], min_size=1, max_size=30))
    indices = (torch.tensor(gaps) + 1).cumsum(0) - 1
    number = st.floats(-60_000, 60_000, width=16)
    values = torch.tensor(draw(st.lists(number, min_size=len(gaps), max_size=len(gaps)))).to(stored_in)
    shape = (int(indices[-1]) + draw(st.integers(1, 9)),)
    return TensorDelta(indices, values, shape, dtype, kind, digest(values))


ROW = torch.tensor([[1.5, float("nan"), -0.0, float("inf")]])
WHOLE = [torch.tensor(True), torch.zeros(0, 3), ROW, ROW[:, 1:], torch.arange(3), torch.ones(2).half()]
WHOLE = st.sampled_from([*WHOLE, torch.arange(6.0).reshape(2, 3).t(), torch.tensor(3)])


@PROPERTY
@given(
    tensors=st.dictionaries(NAMES, tensor_deltas(), max_size=4),
    whole=st.dictionaries(NAMES, WHOLE, max_size=3),
    config=st.dictionaries(st.text("ab"), st.one_of(st.integers(), st.booleans(), st.text(max_size=3)), max_size=3),
)
def test_the_reader_agrees_with_sparsify_on_every_entry(reader, tensors, whole, config):
    whole = {name: tensor for name, tensor in whole.items() if name not in tensors}
    delta = SparseDelta(tensors, whole, config)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        delta.save(path)
        entries, read_whole, read_config = reader["read_delta"](path.read_bytes())
        again = SparseDelta.load(path)
        assert list(Path(folder).iterdir()) == [path], "names are not paths"
    assert again == delta
    assert list(entries) == list(tensors) == list(again.tensors)
    for name, part in tensors.items():
        indices, values, record = entries[name]
        assert (indices, values) == (part.indices.tolist(), part.values.tolist())
        assert (tuple(record["shape"]), record["dtype"]) == (part.shape, DTYPE_NAMES[part.dtype])
        assert (record.get("kind", "replace"), record["base_sha256"]) == (part.kind, part.base_sha256)
    assert read_whole.keys() == whole.keys()
    for name, tensor in whole.items():
        _, shape, data = read_whole[name]
        assert (tuple(shape), data) == (tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    assert read_config == config == again.config
