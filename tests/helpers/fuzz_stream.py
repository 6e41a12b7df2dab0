"""Messages of a stream that are built to attack, by the thousand: no follower ever holds a model that is no version.

    python tests/helpers/fuzz_stream.py --number 10000 --seed 0

Snapshots and updates (new entries, a head, all values, the changed ones alone, differences on a quantized base) go
through the attacks of ``fuzz_attacks.py`` and one of their own, to a follower at the version before, with hashes that
were made to fit. The promise: each is applied as a whole, or else refused by a ``SparsifyError`` with a printable
message, and the model stays as it was, to the bit. What is damaged on the way: ``test_stream_faults.py``.
"""

import copy
import hashlib
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from deltas import bits
from fuzz_attacks import ANYTHING, ATTACKS, DTYPES, INTEGERS, attacked
from fuzzing import count, examine, main
from streams import Run

from sparsify import DeltaSubscriber

STREAM_FIELDS = ["format_version", "chain", "version", "snapshot", "header_sha256", "more"]


class Case(NamedTuple):
    message: bytes
    follower: DeltaSubscriber
    before: dict


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
            follower = run.follower(*history)
            cases.append(Case(message, follower, bits(follower.model)))
    return cases


def resealed(data):
    end = 8 + int.from_bytes(data[:8], "little")
    found = re.search(rb'header_sha256\\+": *\\+"([0-9a-f]{64})', data[:end])
    if found is None:
        return data
    header = data[:end].replace(found[1], b"0" * 64)
    return data[:end].replace(found[1], hashlib.sha256(header).hexdigest().encode()) + data[end:]


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


def follow(case):
    """A target: applies a message to a case's follower, which keeps the version before if the message is refused."""

    def target(path, world):
        version = case.follower.version
        try:
            case.follower.apply(path.read_bytes())
        except BaseException:
            if bits(case.follower.model) != case.before or case.follower.version != version:
                raise AssertionError("a refused message has changed the model") from None
            raise

    return target


def fuzz(number, seed, first=0):
    cases = make_cases()
    messages, kinds = [case.message for case in cases], [attack_stream, *ATTACKS]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "message")

        def attempt(number):
            kind, chosen, data = attacked(number, seed, messages, kinds)
            path.write_bytes(resealed(data))
            return kind, examine(path, {"applied": follow(cases[chosen])}, None)

        return count(attempt, range(first, first + number))


if __name__ == "__main__":
    main(fuzz, __doc__)
