"""What the examples of transports have in common: a tiny training, a follower's process, and the comparison of both.

    trainer   TinyRun().step() -> update -> the example's transport
    follower  the example's follow() -> report() -> version, bytes, digest -> TinyRun.check()

The reports take a way of their own, since a real follower sends nothing back.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import torch
from torch import nn

from sparsify import DeltaPublisher, DeltaSubscriber, DeltaUpdate, SparseDelta, sparsify

STEPS = 12  # the last version
LATE = 8  # the version after which a follower starts, where it may start late
Report = tuple[int, int, str]  # version, bytes of the message, digest of the follower's weights
Follow = Callable[[Any, DeltaSubscriber], Iterator[int]]  # from a place; yields each message's bytes


def make_base() -> nn.Module:
    """The pretrained model that trainer and followers have."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).bfloat16()


def digest(model: nn.Module) -> str:
    """SHA-256 of a model's weights."""
    sha256 = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha256.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return sha256.hexdigest()


class TinyRun:
    """The trainer's side: a sparsified model, and the digest that a follower has to have at each version."""

    def __init__(self) -> None:
        self.model = sparsify(make_base(), 6_000, "id3", steps=STEPS)
        self.optimizer = torch.optim.AdamW([self.model.sparse_values], lr=1e-2)
        self.publisher = DeltaPublisher(self.model)
        self.expected = {0: self._digest()}
        self.reports: list[Queue[Report]] = []  # of each follower

    def step(self) -> DeltaUpdate:
        """Makes an optimizer step, and the update of its version."""
        self.model(torch.randn(16, 256, dtype=torch.bfloat16)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        update = self.publisher.update()
        self.expected[update.version] = self._digest()
        return update

    def start_follower(self, follow: Follow, place: Any) -> None:
        """Starts a follower as a process of its own."""
        context = multiprocessing.get_context("spawn")
        reports = context.Queue()
        context.Process(target=report, args=(follow, place, reports), daemon=True).start()
        self.reports.append(reports)

    def compare(self) -> None:
        """Waits until all followers have the last version."""
        for reports in self.reports:
            while self.check(reports.get(timeout=120)) < max(self.expected):
                pass

    def check(self, report: Report) -> int:
        """Prints whether a follower had the trainer's weights; returns the version."""
        version, nbytes, found = report
        if found != self.expected[version]:
            raise SystemExit(f"version {version}: the follower's weights are not the trainer's")
        print(
            f"version {version:2}: {nbytes:6,} bytes, the follower's weights are bit-equal ({found[:12]})", flush=True
        )
        return version

    def _digest(self) -> str:
        return digest(SparseDelta.from_model(self.model).apply(make_base()))


def report(follow: Follow, place: Any, reports: Queue[Report]) -> None:
    """The follower's process: follows to the last version, and reports each."""
    follower = DeltaSubscriber(make_base())
    for nbytes in follow(place, follower):
        reports.put((follower.version, nbytes, digest(follower.model)))
        if follower.version == STEPS:
            return
