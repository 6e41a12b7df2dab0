"""A model in training, its publisher, and what its followers have to hold."""

import copy
import time

import torch
from deltas import bits
from models import build, run_steps

from sparsify import DeltaPublisher, DeltaSubscriber, SparseDelta, sparsify

BUDGET, STEPS = 60, 6


class Run:
    def __init__(self, name="mlp", budget=BUDGET, strategy="id3", *, dtype=torch.float32, lr=0.01, **options):
        model, self.batches = build(name, dtype=dtype)
        self.base = copy.deepcopy(model)
        self.model = sparsify(model, budget, strategy, steps=STEPS, **options)
        self.lr, self.done = lr, 0
        self.publisher = DeltaPublisher(self.model)

    def step(self):
        optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], self.lr)
        run_steps(self.model, [self.batches[self.done % len(self.batches)]], optimizer)
        self.done += 1
        return self

    def updates(self, number):
        """Makes steps, and the bytes of an update after each."""
        return [bytes(self.step().publisher.update()) for _ in range(number)]

    def snapshot(self):
        return bytes(self.publisher.snapshot())

    def follower(self):
        follower = DeltaSubscriber(copy.deepcopy(self.base))
        follower.apply(self.snapshot())
        return follower

    def expected(self, base=None):
        """The bits of a base with the delta that the model would be saved as now."""
        return bits(SparseDelta.from_model(self.model).apply(copy.deepcopy(base or self.base)))


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.001)
