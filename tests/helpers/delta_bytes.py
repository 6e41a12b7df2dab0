"""Takes a delta file apart into header and payload, changes it, and puts it together again."""

import hashlib
import json
import struct

import safetensors.torch

from sparsify.delta.format import replace_file, to_bytes


def write(path, *delta):
    replace_file(path, to_bytes(*delta)[0])


def split(data):
    n_bytes = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n_bytes]), data[8 + n_bytes :]


def join(header, payload):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def edited(data, change):
    """The file with ``change(metadata)`` applied to its JSON document; a result that is not None replaces it."""
    header, payload = split(data)
    document = json.loads(header["__metadata__"]["sparse_delta"])
    result = change(document)
    header["__metadata__"]["sparse_delta"] = json.dumps(document if result is None else result)
    return join(header, payload)


def rewritten(data, **replaced):
    """The file with some tensors replaced; None takes one out. Dots in keys are written as two underscores."""
    tensors = safetensors.torch.load(data)
    for key, tensor in replaced.items():
        tensors[key.replace("__", ".")] = tensor
    metadata = split(data)[0]["__metadata__"]
    return rehashed(safetensors.torch.save({k: t for k, t in tensors.items() if t is not None}, metadata))


def rehashed(data):
    return edited(data, set_in("payload_sha256", to=hashlib.sha256(split(data)[1]).hexdigest()))


def set_in(*keys, to):
    def change(document):
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = to

    return change
