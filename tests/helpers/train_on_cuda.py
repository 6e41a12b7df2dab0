"""Trains small BERTs on CUDA devices and on the CPU, streams two, and prints a line of JSON for each run.

    PYTHONPATH=FOLDER TRITON_INTERPRET=1 python tests/helpers/train_on_cuda.py simulated
    python tests/helpers/train_on_cuda.py real

Simulated devices need a process of their own: the folder's ``fake_cuda.py`` takes the place of torch's CUDA for good.
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import streams
import torch
from accelerate.utils import send_to_device
from deltas import bits
from models import build, loss_of
from oracle import DenseOracle, unmasked_sets
from peft import LoraConfig, get_peft_model
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from sparsify import DeltaPublisher, DeltaSubscriber, SparseDelta, base_weights, register_importance, sparsify
from sparsify.common.ranks import Ranks
from sparsify.core.importance import D3
from sparsify.strategies.importance import SNIP, Fisher, Magnitude
from sparsify.strategies.strategy import Increment, Prune, Repeat, Static, Strategy

BUDGET, STEPS, LR = 60, 3, 1e-2
CUDA = (torch.device("cuda", 0), torch.device("cuda", 1))


@functools.cache
def stream(device, name):
    """A stream that is not the default one; the same for all runs, so that their races have the same names."""
    return torch.Stream(device)


@dataclasses.dataclass(frozen=True)
class Place:
    devices: tuple = ()
    side: bool = False  # on a stream of its own for each device
    two_streams: bool = False  # the second layer on one of its own, which the first layer's waits for

    def put(self, model):
        for device in self.devices[:1]:
            model.to(device)
        if len(self.devices) == 2:
            for module in (model.bert.encoder.layer[1], model.bert.pooler, model.classifier):
                module.to(self.devices[1])
                module.register_forward_pre_hook(self.bring, with_kwargs=True)
        if self.two_streams:
            self.move_to_stream(model.bert.encoder.layer[1])
        return model

    def bring(self, module, args, kwargs):
        return send_to_device(args, self.devices[1]), send_to_device(kwargs, self.devices[1])

    def move_to_stream(self, layer):
        own = stream(self.devices[0], "second layer")

        def enter(module, args):
            own.wait_stream(torch.accelerator.current_stream(self.devices[0]))
            own.__enter__()

        def leave(module, args, output):
            own.__exit__(None, None, None)
            torch.accelerator.current_stream(self.devices[0]).wait_stream(own)

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)

    def batch(self, batch):
        if not self.devices:
            return batch
        return {**send_to_device(batch, self.devices[0]), "labels": batch["labels"].to(self.devices[-1])}

    @contextlib.contextmanager
    def current(self):
        with contextlib.ExitStack() as stack:
            for device in self.devices if self.side else ():
                stream(device, "side").wait_stream(torch.accelerator.current_stream(device))
                stack.enter_context(stream(device, "side"))
            yield
        for device in self.devices:
            torch.accelerator.synchronize(device)


PLACES = {
    "cpu": Place(),
    "default": Place(CUDA[:1]),
    "side": Place(CUDA[:1], side=True),
    "two streams": Place(CUDA[:1], side=True, two_streams=True),
    "two devices": Place(CUDA),
    "side on two devices": Place(CUDA, side=True),
}


@dataclasses.dataclass(frozen=True)
class Case:
    strategy: Strategy | str | None = "id3"  # None: full fine-tuning
    budget: int | None = BUDGET
    everything: bool = False  # accumulation, checkpointing, the base's losses, a state that goes on
    lora: bool = False  # a LoRA's entries, by PEFT
    autocast: torch.dtype | None = None
    oracle: bool = False  # dense gradients and masks instead of the library
    ranks: bool = False  # whether two ranks select together; the other one, which is mocked, has this one's gradients

    def model(self, place, seed=0):
        model, batches = build("bert", seed)
        place.put(model)
        if self.lora:
            model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False))
        return model, [place.batch(batch) for batch in batches]

    def prepared(self, place, seed=0):
        model, batches = self.model(place, seed)
        if self.strategy is not None and not self.oracle:
            calibration = batches[-2:] if self.strategy in CALIBRATED else None
            sparsify(model, self.budget, self.strategy, steps=STEPS, calibration=calibration)
        return model, batches


custom = register_importance("squared")(lambda weight, grad: grad.square())
SELECTIONS = {
    "d3-repeat": "d3-repeat", "fish": "fish", "random": "random",
    "d3 exp=1": Strategy(D3(exp=1, eps=1e-3), Increment()), "d3 static": Strategy(D3(), Static()),
    "fisher": Strategy(Fisher(), Increment()), "snip": Strategy(SNIP(), Increment()),
    "snip repeat": Strategy(SNIP(), Repeat()), "magnitude": Strategy(Magnitude(), Increment()),
    "custom": Strategy(custom, Increment()),
    **{name: Strategy(Magnitude(largest=True), Static(name)) for name in ("uniform", "spread")},
}  # fmt: skip
SPARSEADAPTER = Strategy(SNIP(), Prune(pretrained=True))
CALIBRATED = [SELECTIONS[name] for name in ("fish", "d3 static")] + [SPARSEADAPTER]
CASES = {
    "full": Case(None), "id3": Case(), "pafi": Case("pafi"), "everything": Case(everything=True),
    "lora": Case(lora=True), "float16": Case(autocast=torch.float16), "bfloat16": Case(autocast=torch.bfloat16),
    "float16 oracle": Case(autocast=torch.float16, oracle=True),
    "bfloat16 oracle": Case(autocast=torch.bfloat16, oracle=True), "exact ranks": Case(ranks=True),
    **{name: Case(strategy) for name, strategy in SELECTIONS.items()}, "bitfit": Case("bitfit", None),
    "sparseadapter": Case(SPARSEADAPTER, 2000),
}  # fmt: skip
AUTOCAST = ["float16", "bfloat16"]
ORACLES = [f"{name} oracle" for name in AUTOCAST]
STREAMED = ["full", "id3", "pafi"]
RUNS = {
    "cpu": [name for name in CASES if name not in AUTOCAST + ORACLES],  # a CPU casts other operators
    "default": list(CASES),
    "side": [*STREAMED, "everything", "lora", *AUTOCAST, "exact ranks"],
    "two streams": [*STREAMED, "lora", *AUTOCAST],
    "two devices": [*STREAMED, "everything", "lora", *AUTOCAST, "fish"],
    "side on two devices": STREAMED,
}


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)


def resumed(model, optimizer, case, place):
    fresh, _ = case.prepared(place, seed=1)
    fresh.load_state_dict(model.state_dict())
    fresh_optimizer = optimizer_of(fresh)
    fresh_optimizer.load_state_dict(optimizer.state_dict())
    return fresh, fresh_optimizer


def train(model, batches, case, place, counted):
    optimizer, losses, steps = optimizer_of(model), [], [counted() for _ in range(STEPS)]
    if case.everything:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    scaler = torch.amp.GradScaler("cuda", enabled=case.autocast == torch.float16)

    def optimizer_step():
        scaler.step(optimizer)
        scaler.update()

    scaled = SimpleNamespace(zero_grad=optimizer.zero_grad, step=optimizer_step)
    oracle = DenseOracle(model, scaled, BUDGET, STEPS) if case.oracle else None
    per_step = 2 if case.everything else 1
    for step, seen in enumerate(steps):
        with seen:
            if case.everything:
                with base_weights(model), torch.no_grad():
                    losses.append(loss_of(model, batches[step]))
            if case.everything and step == STEPS // 2:
                model, optimizer = resumed(copy.deepcopy(model), optimizer, case, place)
            optimizer.zero_grad()
            for batch in batches[step * per_step : (step + 1) * per_step]:
                with torch.autocast("cuda", case.autocast, enabled=case.autocast is not None):
                    loss = loss_of(model, batch)
                losses.append(loss.detach())
                if oracle is None:
                    scaler.scale(loss).backward()
            if oracle is None:
                optimizer_step()
            else:
                oracle.step(scaler.scale(loss))
    sets = {} if case.strategy is None else (oracle.unmasked_sets() if oracle else unmasked_sets(model))
    return losses, sets, model, steps


def is_restored(model, case, place):
    with tempfile.TemporaryDirectory() as folder:
        SparseDelta.from_model(model).save(folder)
        delta = SparseDelta.load(folder)
    fresh, _ = case.model(place)
    base = {name: parameter.detach().clone() for name, parameter in fresh.named_parameters()}
    trained = dict(model.named_parameters())
    with delta.applied(fresh):
        equal = all(torch.equal(parameter, trained[name]) for name, parameter in fresh.named_parameters())
    return equal and all(torch.equal(parameter, base[name]) for name, parameter in fresh.named_parameters())


def gather(ranks, own, gather=Ranks.gather):
    """What the ranks gather; the candidates of the first one alone, which has those of all entries."""
    everyone = gather(ranks, own)
    if own.is_floating_point():
        everyone[1:].zero_()
    return everyone


@contextlib.contextmanager
def two_ranks(mocked):
    """A process group in which nothing is added to what this rank sends; its share of a mean is all of it."""
    if not mocked:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mocks = {
            "gather": gather,
            "mean_share": lambda _, own, group=None: lambda: own / 2,
            "_range": lambda _, own: (own, own),
        }
        with patch.multiple(Ranks, **mocks):
            yield
    finally:
        dist.destroy_process_group()


class NotCounted(contextlib.nullcontext):
    races, waits = Counter(), Counter()


def run(case, place, counted):
    restoring = counted()
    with two_ranks(case.ranks):
        model, batches = case.prepared(place)
        with place.current():
            losses, sets, model, steps = train(model, batches, case, place, counted)
        with place.current(), restoring:
            restored = bool(case.strategy is None or case.oracle or is_restored(model, case, place))
    return {
        "losses": [loss.item() for loss in losses],
        "sets": sets,
        "races": sum((seen.races for seen in [*steps, restoring]), Counter()),
        "waits": sum(steps[-1].waits.values()),
        "restored": restored,
    }


def publish(strategy, place, counted):
    """Whether a follower on the device had each version, and of the last one what the host waited for, by call."""
    run = streams.Run("bert", strategy=strategy, dtype=torch.bfloat16, modules_to_save=["classifier"])
    base = place.put(copy.deepcopy(run.base))
    model, batches = place.put(run.model), [place.batch(batch) for batch in run.batches]
    optimizer, equal, races = optimizer_of(model), [], Counter()
    with place.current():
        publisher, follower = DeltaPublisher(model), DeltaSubscriber(base)
        follower.apply(publisher.snapshot())
        for step in range(streams.STEPS + 1):  # nothing is unmasked in the last one
            seen = {call: counted() for call in ("step", "update", "bytes", "apply", "read")}
            with seen["step"]:
                loss_of(model, batches[step]).backward()
                optimizer.step()
                optimizer.zero_grad()
            with seen["update"]:
                update = publisher.update()
            with seen["bytes"]:
                message = bytes(update)
            with seen["apply"]:
                follower.apply(message)
            with seen["read"], follower.reading(), torch.no_grad():
                loss_of(follower.model, batches[step])
            races += sum((each.races for each in seen.values()), Counter())
            expected = SparseDelta.from_model(model).apply(copy.deepcopy(run.base))
            equal.append(bits(follower.model) == bits(expected))
    waits = {call: sum(seen[call].waits.values()) for call in ("update", "bytes", "apply")}
    return {"equal": equal, "races": races, "waits": waits}


def main(device):
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if device == "simulated":
        import fake_cuda

        fake_cuda.install()
        counted, bytes_on_devices = fake_cuda.Counted, lambda: torch.ops.fake_cuda.memory()[0]
    else:
        counted, bytes_on_devices = NotCounted, lambda: 0  # cuBLAS keeps workspaces
    for place, names in RUNS.items():
        for name in names if len(PLACES[place].devices) <= torch.cuda.device_count() else ():
            before = bytes_on_devices()
            try:
                result = run(CASES[name], PLACES[place], counted)
            except Exception:
                result = {"error": traceback.format_exc(limit=-4)}
            gc.collect()
            result["left"] = bytes_on_devices() - before
            print(json.dumps({"run": [name, place], **result}), flush=True)
    for strategy in ("id3", "pafi"):  # entries are added at each step; at none
        print(json.dumps({"run": [strategy, "stream"], **publish(strategy, PLACES["side"], counted)}), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # autograd's threads for the fake devices cannot be joined
