"""A model in training feeds the other ranks by ``torch.distributed.broadcast``: one rank trains, the others follow.

    python -m examples.streaming.broadcast

Trainer and followers are a group of their own. They must not be the default group, whose ranks sparsify takes for those
of one training: their backward passes would wait for each other. Each message is two broadcasts, its length and its
bytes. No rank can start late or miss one. With nccl, make a ``ProcessGroupNCCL``, and have the tensors on the GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import distributed as dist

from examples.streaming.tiny_run import STEPS, TinyRun
from sparsify import DeltaSubscriber

RANKS = 3  # of which the first trains


def join(meeting: Path, rank: int) -> dist.ProcessGroup:
    """The group, once all its ranks are there; across machines they meet in a ``TCPStore``."""
    return dist.ProcessGroupGloo(dist.FileStore(str(meeting), RANKS), rank, RANKS)


def send(group: dist.ProcessGroup, message: bytes) -> None:
    """The trainer's side of :func:`receive`."""
    dist.broadcast(torch.tensor([len(message)]), group=group, group_src=0)
    dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), group=group, group_src=0)


def receive(group: dist.ProcessGroup) -> bytes:
    """The next message."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(length, group=group, group_src=0)
    message = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(message, group=group, group_src=0)
    return message.numpy().tobytes()


def follow(place: tuple[Path, int], follower: DeltaSubscriber) -> Iterator[int]:
    """Brings a follower to each version that comes, and yields the message's bytes."""
    group = join(*place)
    while True:
        message = receive(group)
        follower.apply(message)
        yield len(message)


def main() -> None:
    run = TinyRun()
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        for rank in range(1, RANKS):
            run.start_follower(follow, (meeting, rank))
        group = join(meeting, 0)
        send(group, bytes(run.publisher.snapshot()))
        run.compare()
        for _ in range(STEPS):
            send(group, bytes(run.step()))
            run.compare()


if __name__ == "__main__":
    main()
