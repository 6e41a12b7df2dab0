"""Followers that are killed, and messages that are lost, doubled, late or damaged: never a mixed or a wrong model."""

import hashlib
import os
import random
import signal
import time

import pytest
from deltas import bits
from limits import needs_limits
from streams import Run

from examples.streaming.folder import follow, publish
from sparsify import DeltaFormatError, DeltaSubscriber, MissingUpdateError, StaleUpdateError


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


@pytest.mark.parametrize("seed", range(3))
def test_messages_that_are_lost_doubled_late_or_damaged(seed):
    rng, run = random.Random(seed), Run("mlp", strategy="id3")
    follower = run.follower()
    states = {0: bits(follower.model)}
    on_the_way, outcomes = [], set()

    def deliver(message):
        try:
            follower.apply(message)
            outcomes.add(None)
        except (StaleUpdateError, DeltaFormatError, MissingUpdateError) as error:
            outcomes.add(type(error))
            if isinstance(error, MissingUpdateError):
                follower.apply(run.snapshot())
        assert bits(follower.model) == states[follower.version]

    for version in range(1, 120):
        (update,) = run.updates(1)
        states[version] = run.expected()
        on_the_way += [update] * rng.choice([0, 1, 1, 1, 1, 1, 2])
        while on_the_way and rng.random() < 0.7:
            message = on_the_way.pop(0 if rng.random() < 0.9 else rng.randrange(len(on_the_way)))
            if rng.random() < 0.1:
                position = rng.randrange(len(message))
                flipped = bytes([message[position] ^ 1 << rng.randrange(8)]) + message[position + 1 :]
                message = message[:position] + rng.choice([b"", flipped])
            deliver(message)
    run.updates(1)
    follower.apply(run.snapshot())
    assert bits(follower.model) == run.expected()
    assert outcomes == {None, StaleUpdateError, DeltaFormatError, MissingUpdateError}
