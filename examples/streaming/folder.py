"""A model in training feeds followers through a folder that all of them see.

    python -m examples.streaming.folder

    snapshot        the newest whole version in the folder, for followers that start, or have missed an update
    CHAIN-000012    the update to version 12 of a run

A file is complete under its name or not there. A follower needs to know nothing but the folder: it may start late, be
killed, or be slow, and the trainer may be started again. Files with other names are left alone.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from examples.streaming.tiny_run import LATE, STEPS, TinyRun
from sparsify import DeltaSubscriber, DeltaUpdate, StaleUpdateError

SNAPSHOT = "snapshot"
SNAPSHOT_EVERY = 5  # versions
UPDATE = re.compile("([0-9a-f]{32})-([0-9]{6,})")


def publish(folder: Path, message: DeltaUpdate, keep: int = 10) -> None:
    """Puts a message into the folder; a snapshot takes the place of updates that are ``keep`` versions older."""
    name = SNAPSHOT if message.is_snapshot else f"{message.chain}-{message.version:06}"
    partial = folder / ".partial"
    with partial.open("wb") as file:
        file.write(bytes(message))
        file.flush()
        os.fsync(file.fileno())  # or a power cut may leave an empty file under the name
    partial.replace(folder / name)
    for path in folder.iterdir() if message.is_snapshot else ():
        update = UPDATE.fullmatch(path.name)
        if update and (update[1] != message.chain or int(update[2]) <= message.version - keep):
            path.unlink()


def follow(folder: Path, follower: DeltaSubscriber) -> Iterator[int]:
    """Brings a follower to each version that comes, and yields the message's bytes."""
    snapshot, seen = folder / SNAPSHOT, None
    while True:
        path = folder / f"{follower.chain}-{(follower.version or 0) + 1:06}"  # none before the first snapshot
        with suppress(FileNotFoundError, StaleUpdateError):  # removed since; a snapshot of what is there already
            if path.exists() or seen != (seen := changed(path := snapshot)):
                message = path.read_bytes()
                follower.apply(message)
                yield len(message)
                continue
        time.sleep(0.001)


def changed(path: Path) -> tuple[int, int]:
    """Tells a file from the one that had its name before."""
    return path.stat().st_ino, path.stat().st_mtime_ns


def main() -> None:
    run = TinyRun()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        publish(folder, run.publisher.snapshot())
        for version in range(1, STEPS + 1):
            publish(folder, run.step())
            if version % SNAPSHOT_EVERY == 0:
                publish(folder, run.publisher.snapshot())
            if version == LATE:
                run.start_follower(follow, folder)
            run.compare()


if __name__ == "__main__":
    main()
