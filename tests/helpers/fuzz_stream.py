"""Messages of a stream, damaged on the way or built to attack, by the thousand: no follower ever holds a wrong model.

    python tests/helpers/fuzz_stream.py --number 10000 --seed 0

Snapshots and updates (new entries, a head, all values, the changed ones alone, differences on a quantized base) go
through the attacks of ``fuzz_attacks.py`` and two of their own, to a follower at the version before. The promise: what
was damaged on the way is refused by a ``SparsifyError`` with a printable message, and the model stays as it was, to the
bit; a message whose hashes were made to fit is refused in the same way, or else applied as a whole.
"""

import copy
import hashlib
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import fuzz_attacks
import torch
from deltas import bits
from fuzz_attacks import ANYTHING, ATTACKS, DTYPES, INTEGERS
from fuzzing import count, examine, main
from streams import Run

from sparsify import DeltaSubscriber

STREAM_FIELDS = ["format_version", "chain", "version", "snapshot", "header_sha256", "more"]


class Case(NamedTuple):
    message: bytes
    follower: DeltaSubscriber
    before: dict
    after: dict


def make_cases():
    """Followers at version 3, and for each the messages that bring it to version 4."""
    torch.manual_seed(0)
    runs = [Run("bert", modules_to_save=["classifier"]), Run("mlp", dtype=torch.bfloat16), Run("mlp", 100, "random")]
    cases = []
    for run in runs:
        history = [run.snapshot(), *run.updates(3)]
        if run is runs[-1]:  # few values change, so that their places are sent
            run.model.sparse_values.data[::20] += 1
        else:
            run.step()
        update = bytes(run.publisher.update())
        for message in (update, run.snapshot()):
            follower, after = run.follower(*history), run.follower(*history, message)
            cases.append(Case(message, follower, bits(follower.model), bits(after.model)))
    return cases


def resealed(data):
    end = 8 + int.from_bytes(data[:8], "little")
    found = re.search(rb'header_sha256\\+": *\\+"([0-9a-f]{64})', data[:end])
    if found is None:
        return data
    header = data[:end].replace(found[1], b"0" * 64)
    return data[:end].replace(found[1], hashlib.sha256(header).hexdigest().encode()) + data[end:]


def damaged(rng, parts, other):
    data, other = parts.data, other.data
    begin, end = sorted(rng.randrange(len(data)) for _ in range(2))
    flipped = bytes([data[begin] ^ 1 << rng.randrange(8)])
    return rng.choice([
        data[:begin], data[:begin] + data[end:], data[:begin] + bytes(end - begin) + data[end:],
        data[:end] + data[begin:], data[:begin] + other[begin:], data[:begin] + flipped + data[begin + 1 :],
        data + other,
    ])  # fmt: skip


def attack_stream(rng, parts, other):
    stream = parts.document["config"]["stream"]
    keys = [key for key in parts.keys if key.endswith((".known", ".places"))]
    action = rng.randrange(3)
    if action == 0 or not keys:
        value = rng.choice([*ANYTHING, *INTEGERS, "0" * 64, "0" * 32, 3, 4, 5])
        stream[rng.choice(STREAM_FIELDS)] = copy.deepcopy(value)
    elif action == 1:
        key = rng.choice(keys)
        size = parts.header[key]["shape"][0] + rng.choice([-1, 0, 1, 70_000])
        dtype = rng.choice([parts.header[key]["dtype"], rng.choice(list(DTYPES)), "U16", "U32"])
        parts.replace_tensor(key, dtype, rng.choice([[size], [size, 1]]), rng.randbytes(size * DTYPES[dtype]))
    else:
        key = rng.choice(keys)
        new = f"{rng.choice(['F32', 'BF16', 'F64', 'U8'])}.{rng.choice(['known', 'places'])}"
        parts.header[new] = parts.header.pop(key) if rng.random() < 0.5 else {**parts.header[key]}


def attacked(number, seed, cases):
    messages, kinds = [case.message for case in cases], [damaged, attack_stream, *ATTACKS]
    kind, chosen, data = fuzz_attacks.attacked(number, seed, messages, kinds)
    return kind, cases[chosen], data if kind == "damaged" else resealed(data)


def follow(case, *, genuine):
    """A target: applies a message to a case's follower; whatever becomes of it must be one whole version."""

    def target(path, world):
        version = case.follower.version
        try:
            case.follower.apply(path.read_bytes())
        except BaseException:
            if bits(case.follower.model) != case.before or case.follower.version != version:
                raise AssertionError("a refused message has changed the model") from None
            raise
        if genuine and bits(case.follower.model) != case.after:
            raise AssertionError("a damaged message was applied")

    return target


def fuzz(number, seed, first=0):
    cases = make_cases()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "message")

        def attempt(number):
            kind, case, data = attacked(number, seed, cases)
            path.write_bytes(data)
            return kind, examine(path, {"applied": follow(case, genuine=kind == "damaged")}, None)

        return count(attempt, range(first, first + number))


if __name__ == "__main__":
    main(fuzz, __doc__)
