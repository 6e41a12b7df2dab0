"""The delta file: encodings, bytes, and that a damaged file is always an error that says what is wrong."""

import json
import math
import os
import signal
import sys

import pytest
import torch
from delta_bytes import edited, join, rewritten, set_in, split, write
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import needs_limits, within_limits

from sparsify.delta import entries as sparsify_entries
from sparsify.delta import format as delta_format
from sparsify.delta.entries import TensorDelta, decode_indices, encode_indices
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import DeltaFormatError, SparsifyError

ESCAPE = 0xFFFF
read = SparseDelta.load
SHA = "0" * 64
PROPERTY = settings(max_examples=150)


def entries(indices=(1, 4, 70_000), values=(1.0, -2.0, 0.5), shape=(2, 40_000), kind="replace", dtype=torch.bfloat16):
    indices, values = torch.tensor(indices, dtype=torch.int64), torch.tensor(values, dtype=dtype)
    return TensorDelta(indices, values, shape, dtype, kind, base_sha256=SHA)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "delta.safetensors"


@pytest.fixture
def good(path):
    tensors = {"a": entries(), "b.values": entries((0, 2), (3.0, 4.0), (3,), "add", torch.float32)}
    write(path, tensors, {"head.weight": torch.tensor([[1.0, math.nan]])}, {"steps": 3})
    return path.read_bytes()


def read_bytes(path, data):
    path.write_bytes(data)
    return read(path)


def positions_from(gaps):
    return (torch.tensor(gaps, dtype=torch.int64) + 1).cumsum(0) - 1


def u16(*numbers):
    return torch.tensor(numbers).to(torch.uint16)


SMALL_GAP = st.integers(0, 300)
ESCAPING_GAP = st.one_of(SMALL_GAP, st.sampled_from([65_533, 65_534, 65_535, 65_536, 131_069, 131_070, 131_071]))
HUGE_GAP = st.one_of(ESCAPING_GAP, st.integers(0, 2**40))


@PROPERTY
@given(st.one_of(*(st.lists(gap, max_size=60) for gap in (SMALL_GAP, ESCAPING_GAP, HUGE_GAP))))
def test_indices_survive_the_round_trip_in_the_smallest_encoding(gaps):
    indices = positions_from(gaps)
    stored = encode_indices(indices)
    assert torch.equal(decode_indices(stored, len(gaps)), indices)
    sizes = {torch.uint16: 2 * sum(1 + gap // ESCAPE for gap in gaps), torch.uint64: 8 * len(gaps)}
    if not gaps or indices[-1] < 2**32:
        sizes[torch.uint32] = 4 * len(gaps)
    assert stored.numel() * stored.element_size() == min(sizes.values()) == sizes[stored.dtype]
    if sizes[torch.uint16] == min(sizes.values()):
        assert stored.dtype == torch.uint16


@pytest.mark.parametrize("indices", [[2**62], [2**62, 2**63 - 1]])
def test_positions_whose_gap_stream_would_fill_the_memory_are_encoded(indices):
    assert encode_indices(torch.tensor(indices)).tolist() == indices


@PROPERTY
@given(st.lists(ESCAPING_GAP, min_size=1, max_size=60), st.integers(1, 7))
def test_a_gap_stream_is_decoded_alike_whatever_the_chunks(gaps, chunk):
    stored = torch.tensor([n for gap in gaps for n in [ESCAPE] * (gap // ESCAPE) + [gap % ESCAPE]]).to(torch.uint16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparsify_entries, "_CHUNK", chunk)
        assert torch.equal(decode_indices(stored, len(gaps)), positions_from(gaps))


def test_a_changed_bit_anywhere_in_the_payload_is_noticed(path, good):
    payload_start = len(good) - len(split(good)[1])
    for at in range(payload_start, len(good)):
        damaged = bytearray(good)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(DeltaFormatError, match=r"its payload does not have the SHA-256 that its metadata records"):
            read_bytes(path, bytes(damaged))


def test_files_get_the_usual_permissions(path, good):
    plain = path.with_name("plain")
    plain.write_bytes(b"")
    assert path.stat().st_mode == plain.stat().st_mode


LISTS = {"log": [[]] * 50_000}
ENDLESS = {}
ENDLESS["a"] = ENDLESS


def nested(depth):
    return [nested(depth - 1)] if depth > 1 else []


@pytest.mark.parametrize(("whole", "config", "message"), [
    ((), {"a": {1, 2}}, "config does not go into JSON"),
    ((), {"a": math.nan}, "config does not go into JSON"),
    ((), {1: "x", "1": "y"}, "a key twice"),
    ((), LISTS, "open more objects and lists than a reader accepts"),
    ((), {"a": nested(63)}, "more than 64 deep in each other"),
    ((), ENDLESS, "into JSON"),
    ((), {"note": "x" * 2000}, r"header takes 2,.* bytes, more than the 1,500 that a reader accepts"),
    *(([name], {}, "a tensor's name is") for name in ("\ud800", "a\nb", "n" * 1001, "\x9b")),
    (["a"], {}, "tensor `a` is there twice"),
], ids=range(12))  # fmt: skip
def test_what_a_reader_refuses_is_not_written(path, monkeypatch, whole, config, message):
    monkeypatch.setattr(delta_format, "MAX_HEADER_BYTES", 1_500)
    with pytest.raises(SparsifyError, match=message):
        write(path, {"a": entries()}, {name: torch.zeros(1) for name in whole}, config)
    assert not path.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": (1, 1, 7)}, "not strictly increasing"),
        ({"indices": (-1, 1, 7)}, "out of range: they go from -1 to 7, in a tensor of 80000 entries"),
        ({"values": (1.0, math.nan, math.inf)}, "2 of 3 values are not finite"),
        ({"values": (1.0, 2.0)}, r"indices have shape \(3,\) and values \(2,\)"),
        ({"indices": (), "values": ()}, "at least one entry"),
        ({"kind": "scale"}, "kind is 'scale', expected one of replace, add"),
        ({"dtype": torch.int32, "values": (1, 2, 3)}, "dtype is torch.int32, expected one of torch.float64"),
    ],
)
def test_entries_that_make_no_sense_cannot_be_built(change, message):
    with pytest.raises(SparsifyError, match=message):
        entries(**change)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not begin with `{`"),
        (b"not a delta at all, but a text that is long enough", "its header claims .* bytes, more than"),
        (join({"__metadata__": {"format": "pt"}}, b""), "no metadata `sparse_delta`"),
        (join(b"[]", b""), "its header does not begin with"),
        (join({"__metadata__": {"sparse_delta": "{"}}, b""), "Expecting"),
        (join({"__metadata__": {"sparse_delta": "[" * 4000}}, b""), "(recursion|Expecting)"),  # by Python's version
        (join({"__metadata__": {"sparse_delta": "{}"}}, b""), "format version is None"),
    ],
)
def test_files_that_are_something_else_are_refused(path, data, message):
    with pytest.raises(DeltaFormatError, match=f"`.*delta.safetensors` is no delta that can be used: .*{message}"):
        read_bytes(path, data)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_or_a_device_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", "/dev/zero"):
        for refuses in (read, delta_format.payload_hash):
            with pytest.raises(DeltaFormatError, match="is no regular file, so it is not read: copy what it gives"):
                refuses(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in("format_version", to=3), "format version is 3, this sparsify reads 2: upgrade it"),
        (set_in("format_version", to=True), "format version is True, this sparsify reads 2"),
        (lambda d: d.pop("payload_sha256") and None, "expected a JSON object with exactly the keys .*payload_sha256"),
        (set_in("config", "steps", to="\ud800"), "surrogates not allowed"),
        (set_in("config", "steps", to=nested(64)), "more than 64 deep in each other"),
        (set_in("config", "log", to=LISTS["log"]), "open more objects and lists than a reader accepts"),
        (set_in("config", "steps", to=10**1000), "the number 1000.* is not finite as a float"),
        (set_in("config", "steps", to=math.nan), "the number nan is not finite as a float"),
        (set_in("whole", to=["a\x1b[31m"]), r"name is 'a\\x1b\[31m', expected a string of 1 to 1,000 ch"),
        (set_in("whole", to=["head.weight", "other"]), "`other.whole` is missing"),
        (set_in("config", to=[]), "`tensors` and `config` have to be objects"),
        (set_in("tensors", "a", to=None), "tensor `a`: its record: expected a JSON object"),
        (set_in("tensors", "a", "more", to=1), "tensor `a`: .* with exactly the keys base_sha256"),
        (set_in("tensors", "a", "shape", to=[2, -1]), "tensor `a`: `shape`"),
        (set_in("tensors", "a", "shape", to=[1] * 65), "tensor `a`: `shape`"),
        (set_in("tensors", "a", "shape", to=[2**40, 2**40]), "fewer than 2.63 entries"),
        (set_in("tensors", "a", "shape", to=[2, 35_000]), "tensor `a`: indices are out of range"),
        (set_in("tensors", "a", "dtype", to="F16"), "tensor `a`: values are torch.bfloat16, expected .* torch.float16"),
        (set_in("tensors", "a", "base_sha256", to="G" * 64), "tensor `a`: base_sha256 is 'GGG.*, expected 64 lower"),
        (set_in("tensors", "a", "quantization", to="x" * 101), "tensor `a`: quantization is 'xxx"),
        ({"other": torch.zeros(1)}, "`other` is there, contrary to its metadata"),
        ({"b__values__values": torch.ones(2).long()}, "tensor `b.values`: values are torch.int64, expected"),
        ({"a__indices": torch.tensor([1, 2, 3])}, "tensor `a`: indices are torch.int64 .*, expected one dimension"),
        ({"a__indices": u16(1, 2)}, "tensor `a`: indices hold 2 entries, expected 3"),
        ({"a__indices": u16(1, 2, 3, ESCAPE)}, "tensor `a`: indices end in the escape 0xFFFF"),
        ({"a__indices": u16(1, ESCAPE, 9, 0)[:, None]}, r"tensor `a`: indices are torch.uint16 of shape \(4, 1\)"),
        ({"a__indices": u16(1, 20_000, ESCAPE, 0)}, "tensor `a`: indices are out of range: they go from 1 to 85538"),
        ({"a__indices": torch.tensor([-3, -2, -1]).to(torch.uint64)}, "tensor `a`: indices are out of range"),
    ],
)
def test_metadata_and_tensors_that_are_wrong_are_refused_by_name(path, good, change, message):
    data = edited(good, change) if callable(change) else rewritten(good, **change)
    with pytest.raises(DeltaFormatError, match=message):
        read_bytes(path, data)


def test_a_config_at_the_limits_is_read_exactly(path):
    config = {"a": int(sys.float_info.max), "b": 2**53 + 1, "c": nested(62)}
    write(path, {}, {}, config)
    assert read(path).config == config


@pytest.mark.parametrize(("before", "after"), [(b" ", b""), (b"\n", b""), (b"", b"\n")])
def test_other_space_around_the_header_than_spaces_after_it_is_refused(path, good, before, after):
    header, payload = split(good)
    with pytest.raises(DeltaFormatError, match=r"does not begin with `\{` and end in `\}` and spaces"):
        read_bytes(path, join(before + json.dumps(header).encode() + after, payload))


def test_a_key_twice_in_the_header_or_in_the_metadata_is_refused(path, good):
    header, payload = split(good)
    text = json.dumps(header).encode()[:-1] + b', "a.values": {}}'
    header["__metadata__"]["sparse_delta"] = header["__metadata__"]["sparse_delta"].replace('"b.values":', '"a":')
    for twice in (text, header):
        with pytest.raises(DeltaFormatError, match="an object has a key twice"):
            read_bytes(path, join(twice, payload))


def test_nothing_unprintable_from_a_file_gets_into_a_message(path, good):
    header, payload = split(good)
    for key in ("\x1b[2J\u202e", "k" * 10_000):
        with pytest.raises(DeltaFormatError) as caught:
            read_bytes(path, join({**header, key: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, payload))
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000
        assert caught.value.__suppress_context__  # a traceback does not show the library's own words


@pytest.mark.parametrize("indices", [u16(1, ESCAPE, 9, 0), torch.tensor([1, 65_546, 65_547]).to(torch.uint64)])
def test_any_encoding_is_read_not_only_the_smallest(path, good, indices):
    assert read_bytes(path, rewritten(good, a__indices=indices)).tensors["a"].indices.tolist() == [1, 65_546, 65_547]


def test_a_file_cut_short_anywhere_or_with_more_at_its_end_is_refused(path, good):
    payload_start = len(good) - len(split(good)[1])
    lengths = [*range(0, payload_start, 5), *range(payload_start - 9, len(good))]
    for data in [*(good[:length] for length in lengths), good + b"\0"]:
        with pytest.raises(DeltaFormatError, match="is no delta that can be used"):
            read_bytes(path, data)


def version(number):
    return SparseDelta({}, {"w": torch.full((200_000,), float(number))}, {"version": number})


@needs_limits
@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_writer_killed_before_the_rename_leaves_the_old_file_whole(tmp_path, where):
    version(0).save(tmp_path)
    names = [path.name for path in tmp_path.iterdir()]
    before = (tmp_path / delta_format.FILE_NAME).read_bytes()

    def write():
        setattr(os, where, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        version(1).save(tmp_path)

    with pytest.raises(AssertionError, match="killed"):
        within_limits(write)
    assert (tmp_path / delta_format.FILE_NAME).read_bytes() == before
    (leftover,) = [path.name for path in tmp_path.iterdir() if path.name not in names]  # so it was at work
    assert leftover.startswith(f".{delta_format.FILE_NAME}.")
    version(2).save(tmp_path)
    assert SparseDelta.load(tmp_path) == version(2)
    assert len(list(tmp_path.iterdir())) == len(names) + 1


def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(tmp_path, monkeypatch):
    for number in (0, 1):
        version(number).save(tmp_path / str(number))

    def replace(header, parse=delta_format.parse):
        os.replace(tmp_path / "1" / delta_format.FILE_NAME, tmp_path / "0" / delta_format.FILE_NAME)
        return parse(header)

    monkeypatch.setattr(delta_format, "parse", replace)
    assert SparseDelta.load(tmp_path / "0") == version(0)
    assert not (tmp_path / "1" / delta_format.FILE_NAME).exists()
