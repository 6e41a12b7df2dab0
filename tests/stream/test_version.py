"""The bytes of a stream's messages, as ``format.md`` specifies them."""

import copy
import hashlib
import json

import pytest
import torch
from delta_bytes import join, split
from fuzz_stream import resealed
from safetensors.torch import load
from streams import Run

from sparsify.common.raw_bits import digest
from sparsify.errors import DeltaFormatError
from sparsify.stream.version import read_message


@pytest.fixture(scope="module")
def run():
    return Run("mlp", 100, "random", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def few(run):
    run.updates(1)
    run.model.sparse_values.data[::20] += 1
    return bytes(run.publisher.update())


@pytest.fixture(scope="module")
def all_values(run):
    return run.updates(1)[0]


def document_of(data):
    return json.loads(split(data)[0]["__metadata__"]["sparse_delta"])


def stream_of(data):
    return document_of(data)["config"]["stream"]


def rewritten(data, change=lambda header, stream, document: None, add=()):
    """The message with another header, and more tensors after its payload; its hashes fit."""
    header, payload = split(data)
    for key, dtype, tensor in add:
        begin, payload = len(payload), payload + bytes(tensor.view(torch.uint8).numpy())
        header[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, len(payload)]}
    document = document_of(data)
    document["payload_sha256"] = hashlib.sha256(payload).hexdigest()
    change(header, document["config"]["stream"], document)
    header["__metadata__"]["sparse_delta"] = json.dumps(document)
    return resealed(join(header, payload))


def test_messages_are_as_the_format_says(run, few, all_values):
    snapshot, state = bytes(run.publisher.snapshot()), run.publisher._last[1]
    kinds = [(few, 2, False), (all_values, 3, False), (snapshot, 3, True)]
    for data, version, is_snapshot in kinds:
        stream = stream_of(data)
        stated = stream.pop("header_sha256")
        assert len(stream.pop("chain")) == 32
        assert stream == {"format_version": 1, "version": version, "snapshot": is_snapshot}
        header_end = 8 + int.from_bytes(data[:8], "little")
        zeroed = data[:header_end].replace(stated.encode(), b"0" * 64)
        assert hashlib.sha256(zeroed).hexdigest() == stated
    assert {stream_of(data)["chain"] for data, *_ in kinds} == {stream_of(few)["chain"]}
    known = torch.cat([state.tensors[name].values for name in sorted(state.tensors)])
    tensors = load(all_values)
    assert set(tensors) == {"BF16.known"}
    assert torch.equal(tensors["BF16.known"], known)
    tensors = load(few)
    assert set(tensors) == {"BF16.known", "BF16.places"}
    assert tensors["BF16.known"].numel() == 5
    assert {key for key in load(snapshot) if key.startswith("BF16")} == set()


CHANGES = {
    "its config has no `stream`, so it belongs to no stream": lambda h, s, d: d["config"].pop("stream"),
    "its stream's format version is 2, expected 1": lambda h, s, d: s.update(format_version=2),
    "expected a JSON object with exactly the keys": lambda h, s, d: s.update(more=1),
    "its chain or hash is no text of hex digits": lambda h, s, d: s.update(chain="0" * 31),
    "`stream`: its version or kind is none": lambda h, s, d: s.update(version=True),
    "exactly the keys .*payload_sha256": lambda h, s, d: d.pop("payload_sha256"),
    "`BF16.known` is there, contrary to its metadata": lambda h, s, d: s.update(snapshot=True),
    "`BF16.places` has no `BF16.known` next to it": lambda h, s, d: h.update({"F16.places": h.pop("BF16.known")}),
    r"`F32.known` is torch.bfloat16 of shape \(5,\), expected \(n,\) torch.float32": lambda h, s, d: h.update(
        {"F32.known": h.pop("BF16.known"), "F32.places": h.pop("BF16.places")}
    ),
    r"of shape \(5, 1\), expected \(n,\) torch.bfloat16": lambda h, s, d: h["BF16.known"].update(shape=[5, 1]),
}  # fmt: skip


@pytest.mark.parametrize("text", CHANGES)
def test_a_header_that_the_format_does_not_allow(few, text):
    data = rewritten(few, CHANGES[text])
    with pytest.raises(DeltaFormatError, match=text) as raised:
        read_message(data)
    assert "Nothing was loaded: have it sent again, or ask for `snapshot()`." in str(raised.value)


def test_what_does_not_go_with_the_version_before(run, few):
    follower = run.follower()
    before = copy.deepcopy(follower.model.state_dict())

    def next_one(add=(), *, change=lambda document: None):
        def renumber(header, stream, document):
            stream.update(chain=follower.chain, version=follower.version + 1)
            document.update(tensors={}, whole=[])
            change(document)

        return rewritten(few, renumber, add)

    more = [("F32.known", "F32", torch.ones(3))]
    with pytest.raises(DeltaFormatError, match=r"its 3 values are not of the 0 known entries. Nothing was ch"):
        follower.apply(next_one(more))
    name = next(iter(run.publisher._last[1].tensors))
    head = [(f"{name}.whole", "BF16", torch.ones_like(before[name]))]
    with pytest.raises(DeltaFormatError, match=f"it has all of `{name}`, of which entries are trained"):
        follower.apply(next_one(head, change=lambda document: document.update(whole=[name])))
    snapshot = document_of(run.snapshot())["tensors"][name]
    entries = run.publisher._last[1].tensors[name]
    snapshot["base_sha256"] = digest(entries.values)
    again = [(f"{name}.indices", "U64", entries.indices.to(torch.uint64)), (f"{name}.values", "BF16", entries.values)]
    with pytest.raises(DeltaFormatError, match=f"it has other entries of `{name}`"):
        follower.apply(next_one(again, change=lambda document: document.update(tensors={name: snapshot})))
    assert all(torch.equal(value, before[key]) for key, value in follower.model.state_dict().items())
