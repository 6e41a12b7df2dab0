"""Followers that are killed, and messages that are damaged: never a mixed or a wrong model."""

import hashlib
import os
import random
import signal
import time

import pytest
from deltas import bits, unchanged
from limits import needs_limits
from streams import Run

from examples.streaming.folder import follow, publish
from sparsify import DeltaFormatError, DeltaSubscriber


def model_hash(model):
    return hashlib.sha256(repr(sorted(bits(model).items())).encode()).hexdigest()


def forked_follower(folder, base, log, until):
    """Starts a follower as a fork of this process; it appends a line to ``log`` after each version. Its process id."""
    child = os.fork()
    if child:
        return child
    with open(log, "a", buffering=1) as file:
        try:
            follower = DeltaSubscriber(base)
            for _ in follow(folder, follower):
                file.write(f"{follower.version} {model_hash(follower.model)}\n")
                if follower.version == until:
                    os._exit(0)
        except BaseException as error:
            file.write(f"failed: {error!r}\n")
            os._exit(1)


@needs_limits
@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_follower_that_is_killed_and_started_again_holds_whole_versions(tmp_path, kills):
    rng, log = random.Random(kills), tmp_path / "log"
    run = Run("bert", 200, modules_to_save=["classifier"])
    publish(tmp_path, run.publisher.snapshot())
    hashes, last = {0: model_hash(run.follower().model)}, 3 * kills
    twin = run.follower()
    child = forked_follower(tmp_path, run.base, log, last)
    for version in range(1, last + 1):
        update = run.step().publisher.update()
        publish(tmp_path, update)
        if version % 5 == 0:
            publish(tmp_path, run.publisher.snapshot(), keep=2)
        twin.apply(bytes(update))
        hashes[version] = model_hash(twin.model)
        if version % 3 == 1:
            time.sleep(rng.random() * 0.1)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            child = forked_follower(tmp_path, run.base, log, last)
    assert os.waitpid(child, 0)[1] == 0
    lines = log.read_text().splitlines()
    assert not [line for line in lines if line.startswith("failed")]
    found = [line.split() for line in lines if len(line.split()) == 2]  # a follower may be killed while it writes one
    assert found[-1] == [str(last), hashes[last]]
    assert all(hashes[int(version)] == digest for version, digest in found)
    assert bits(twin.model) == run.expected()


def test_a_message_that_is_damaged_anywhere_is_refused_and_changes_nothing():
    rng, run = random.Random(0), Run("mlp")
    follower = run.follower()
    (update,) = run.updates(1)
    for end in [len(update), 8 + int.from_bytes(update[:8], "little")] * 40:  # of the message, and of its header
        position = rng.randrange(end)
        flipped = bytes([update[position] ^ 1 << rng.randrange(8)])
        damaged = update[:position] + rng.choice([b"", flipped + update[position + 1 :]])
        with unchanged(follower.model), pytest.raises(DeltaFormatError, match="this is no update that can be used"):
            follower.apply(damaged)
    follower.apply(update)
    assert bits(follower.model) == run.expected()
