"""Trains small BERTs on fake CUDA devices and on the CPU, and prints a line of JSON for each run.

    PYTHONPATH=FOLDER TRITON_INTERPRET=1 python tests/helpers/train_on_fake_cuda.py

It needs a process of its own: the folder's ``fake_cuda.py`` takes the place of torch's CUDA for good.
"""

import contextlib
import copy
import dataclasses
import gc
import json
import logging
import os
import traceback
import warnings

import fake_cuda
import torch
from accelerate.utils import send_to_device
from models import build, loss_of
from oracle import unmasked_sets

from sparsify import base_weights, sparsify

BUDGET, STEPS, LR = 60, 3, 1e-2
SIDE, OTHER = 7, 5  # streams that are not the default ones
CUDA = (torch.device("cuda", 0), torch.device("cuda", 1))


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a run is: which devices, and which of their streams."""

    devices: tuple = ()
    streams: tuple = ()
    second_layer: int | None = None  # a stream of its own, which the first layer's waits for

    def put(self, model):
        for device in self.devices[:1]:
            model.to(device)
        if len(self.devices) == 2:
            for module in (model.bert.encoder.layer[1], model.bert.pooler, model.classifier):
                module.to(self.devices[1])
                module.register_forward_pre_hook(self.bring, with_kwargs=True)
        if self.second_layer is not None:
            self.move_to_stream(model.bert.encoder.layer[1])
        return model

    def bring(self, module, args, kwargs):
        return send_to_device(args, self.devices[1]), send_to_device(kwargs, self.devices[1])

    def move_to_stream(self, layer):
        before = []

        def enter(module, args):
            before.append(torch.ops.fake_cuda.stream(0, self.second_layer))
            fake_cuda.wait_stream(self.second_layer, before[-1])

        def leave(module, args, output):
            torch.ops.fake_cuda.stream(0, before[-1])
            fake_cuda.wait_stream(before.pop(), self.second_layer)

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)

    def batch(self, batch):
        if not self.devices:
            return batch
        return {**send_to_device(batch, self.devices[0]), "labels": batch["labels"].to(self.devices[-1])}

    @contextlib.contextmanager
    def current(self):
        """The run's own streams, after the default ones."""
        with contextlib.ExitStack() as stack:
            for index, number in enumerate(self.streams):
                fake_cuda.wait_stream(number, 0, index)
                stack.enter_context(fake_cuda.stream(number, index))
            yield


PLACES = {
    "cpu": Place(),
    "default": Place(CUDA[:1]),
    "side": Place(CUDA[:1], (SIDE,)),
    "two streams": Place(CUDA[:1], (SIDE,), OTHER),
    "two devices": Place(CUDA),
    "side on two devices": Place(CUDA, (SIDE, OTHER)),
}


def prepared(strategy, place, seed=0):
    model, batches = build("bert", seed)
    place.put(model)
    if strategy != "full":
        sparsify(model, BUDGET, strategy, steps=STEPS if strategy == "id3" else None)
    return model, [place.batch(batch) for batch in batches]


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)


def resumed(model, optimizer, place):
    """A copy, and an optimizer, that go on where these are."""
    fresh, _ = prepared("id3", place, seed=1)
    fresh.load_state_dict(model.state_dict())
    fresh_optimizer = optimizer_of(fresh)
    fresh_optimizer.load_state_dict(optimizer.state_dict())
    return fresh, fresh_optimizer


def run(strategy, place, everything):
    """Plain training; or ``everything``: accumulation, checkpointing, the base's losses, a state that goes on."""
    model, batches = prepared(strategy, place)
    optimizer, losses = optimizer_of(model), []
    if everything:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    per_step = 2 if everything else 1
    with place.current(), fake_cuda.Counted() as seen:
        for step in range(STEPS):
            if everything:
                with base_weights(model), torch.no_grad():
                    losses.append(loss_of(model, batches[step]))
            if everything and step == STEPS // 2:
                model, optimizer = resumed(copy.deepcopy(model), optimizer, place)
            optimizer.zero_grad()
            for batch in batches[step * per_step : (step + 1) * per_step]:
                loss = loss_of(model, batch)
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
    for device in place.devices:
        torch.accelerator.synchronize(device)
    return {
        "losses": [loss.item() for loss in losses],
        "sets": {} if strategy == "full" else unmasked_sets(model),
        "races": seen.races,
        "waits": sum(seen.waits.values()),
    }


RUNS = [(strategy, place, False) for place in PLACES for strategy in ("full", "id3", "pafi")]
RUNS += [("id3", place, True) for place in ("cpu", "side", "two devices")]


def bytes_on_devices():
    return torch.ops.fake_cuda.memory()[0]


def main():
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    fake_cuda.install()
    for strategy, place, everything in RUNS:
        before = bytes_on_devices()
        result = run(strategy, PLACES[place], everything)
        gc.collect()
        result["left"] = bytes_on_devices() - before
        print(json.dumps({"run": [strategy, place, everything], **result}), flush=True)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # autograd's threads for the fake devices cannot be joined
