"""A follower in a process of its own, fed through a folder, which may be killed at any moment and started again.

    publish(folder, publisher)      the newest snapshot and all updates, each complete under its name or not there
    follow(folder, base, report)    applies them in order, and reports the version and the model's hash of each

A follower that is started begins with the newest snapshot.
"""

import hashlib
import os
import time

from deltas import bits

from sparsify import DeltaSubscriber

SNAPSHOT = "snapshot"


def publish(folder, publisher, *, snapshot):
    """Writes the next update, and a snapshot where it is due."""
    update = publisher.update()
    put(folder / f"{update.version:06}", bytes(update))
    if snapshot:
        put(folder / SNAPSHOT, bytes(publisher.snapshot()))


def put(path, data):
    """A file that is there completely or not at all."""
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(data)
    partial.rename(path)


def model_hash(model):
    return hashlib.sha256(repr(sorted(bits(model).items())).encode()).hexdigest()


def follow(folder, base, report, until):
    """Follows to version ``until``; ``report(version, hash)`` after each message."""
    follower = DeltaSubscriber(base)
    while follower.version is None or follower.version < until:
        path = folder / (SNAPSHOT if follower.version is None else f"{follower.version + 1:06}")
        if not path.exists():
            time.sleep(0.001)
            continue
        follower.apply(path.read_bytes())
        report(follower.version, model_hash(follower.model))


def forked_follower(folder, base, log, until):
    """Starts a follower as a fork of this process; it appends a line to ``log`` after each version. Its process id."""
    child = os.fork()
    if child:
        return child
    try:
        with open(log, "a") as file:

            def report(version, digest):
                file.write(f"{version} {digest}\n")
                file.flush()

            follow(folder, base, report, until)
        os._exit(0)
    except BaseException as error:
        with open(log, "a") as file:
            file.write(f"failed: {error!r}\n")
        os._exit(1)
