"""A model in training, its publisher, and what its followers have to hold."""

import copy
import time

import torch
from deltas import bits
from models import build, train

from sparsify import DeltaPublisher, DeltaSubscriber, SparseDelta, sparsify

BUDGET, STEPS = 60, 6


class Run:
    def __init__(self, name="mlp", budget=BUDGET, strategy="id3", *, dtype=torch.float32, prepare=None, **options):
        model, self.batches = build(name, dtype=dtype)
        self.base, self.done = prepare(model) if prepare else model, 0
        self.model = sparsify(copy.deepcopy(self.base), budget, strategy, steps=STEPS, **options)
        self.publisher = DeltaPublisher(self.model)

    def step(self):
        train(self.model, [self.batches[self.done % len(self.batches)]])
        self.done += 1
        return self

    def updates(self, number):
        return [bytes(self.step().publisher.update()) for _ in range(number)]

    def snapshot(self):
        return bytes(self.publisher.snapshot())

    def follower(self, *messages):
        """A subscriber that has taken messages, or a snapshot."""
        follower = DeltaSubscriber(copy.deepcopy(self.base))
        for message in messages or [self.snapshot()]:
            follower.apply(message)
        return follower

    def expected(self, base=None):
        return bits(SparseDelta.from_model(self.model).apply(copy.deepcopy(base or self.base)))


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.001)
