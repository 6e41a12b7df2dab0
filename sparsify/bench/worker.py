"""One method in one process: builds the model, then does training steps on request and reports their times.

stdin   one line with the settings (JSON), then one with a number of steps per turn, with or without ``profile`` before
stdout  one line (JSON) when ready, then one per turn: for each step the seconds of forward and backward, and of the
        update, with the peak memory so far; or, under torch's profiler, the seconds of backward's sparse part

With the argument ``fill`` it writes the state of filled buffers instead, and answers once.
"""

from __future__ import annotations

import importlib
import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from sparsify.api import get_unmasker, sparsify, trained_state
from sparsify.bench.methods import METHODS, PEFT_CONFIGS, starts_filled, window_of
from sparsify.bench.settings import PLANNED_STEPS, WARM_UP, Settings
from sparsify.bench.shapes import SHAPES, build
from sparsify.bench.tokens import Batches
from sparsify.errors import SparsifyError
from sparsify.training.backward import COLLECT, COMMIT
from sparsify.training.flat_delta import SETTINGS

FILL, PROFILE, ERROR = "fill", "profile", "error"
FILL_STEPS = 24
Seconds = tuple[float, ...]  # of forward and backward, and of the update


class Worker:
    """A method that is ready to be measured; the attributes are those of :class:`run.Measurement`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        SHAPES[settings.shape].model_class()
        if settings.method in PEFT_CONFIGS:
            importlib.import_module("peft")
        self.library_bytes = 0 if settings.is_cuda else peak_bytes()
        model = build(settings)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.batches = Batches(settings, model, seed=settings.seed + 2)
        started = self._now()
        self.trainee = METHODS[settings.method](model, settings)
        self.initialisation = self._now() - started
        if starts_filled(settings.method) and settings.start:
            self.trainee.resume(load_file(settings.state_file))
        self.unmasked = self.trainee.unmasked()
        torch.manual_seed(settings.seed)
        for _ in range(WARM_UP):
            self.step()

    def peak_bytes(self) -> int:
        """The largest memory so far: of tensors on a GPU, otherwise of the process beyond its libraries."""
        if self.settings.is_cuda:
            return torch.cuda.max_memory_allocated(self.settings.device)
        return peak_bytes() - self.library_bytes

    def turn(self, steps: int) -> list[Seconds]:
        """Does at least ``steps`` steps; where they differ in a cycle, a measurement is the mean over a whole cycle."""
        window = window_of(self.settings.method)
        cycles = ([self.step() for _ in range(window)] for _ in range(-(-steps // window)))
        return [tuple(sum(part) / window for part in zip(*cycle, strict=True)) for cycle in cycles]

    def sparse_seconds(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps for collecting the masked weights' gradients, selection and commit."""
        seconds = []
        for _ in range(steps):
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                self.step()
            ranges = [event for event in profiled.key_averages() if event.key in (COLLECT, COMMIT)]
            seconds.append(sum(event.cpu_time_total for event in ranges) / 1e6)  # microseconds
        return seconds

    def step(self) -> Seconds:
        """One whole training step."""
        trainee, batch = self.trainee, self.batches.next()
        started = self._now()
        trainee.model(**batch).loss.backward()
        between = self._now()
        trainee.before_step()
        if trainee.optimizer is not None:
            trainee.optimizer.step()
            trainee.optimizer.zero_grad()
        return between - started, self._now() - between

    def _now(self) -> float:
        if self.settings.is_cuda:
            torch.cuda.synchronize(self.settings.device)
        return time.perf_counter()


def fill(model: nn.Module, settings: Settings, step: Callable[[], None], fill_steps: int = FILL_STEPS) -> None:
    """Unmasks the settings' share of the budget by ID3, in steps that stand for many of a long run each."""
    engine = get_unmasker(model)
    engine.steps = PLANNED_STEPS
    for done in range(1, fill_steps + 1) if settings.start else ():
        engine.step = max(0, settings.start * done // fill_steps - 1)
        step()
    engine.step = settings.start


def make_state(settings: Settings) -> dict[str, Tensor]:
    """Trains a new model by ID3 until its buffers are as they are late in a run; returns the trained state.

    The first steps of a run have almost nothing unmasked and would flatter. The support resembles a real run's without
    being one: a real run takes a thousandth of its budget from each of hundreds of batches, here :data:`FILL_STEPS`
    batches give some twenty times as many entries each. So an entry has to be less of an outlier to get in, those that
    stay masked have closer scores, and the bound on a tensor's scores rules out less, to ID3's disadvantage; entries
    of one batch share more rows and columns, to the advantage of methods that gather by rows.
    """
    model = build(settings)
    batches = Batches(settings, model, seed=settings.seed + 1)
    sparsify(model, settings.budget, "id3", steps=FILL_STEPS)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step() -> None:
        model(**batches.next()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    fill(model, settings, step)
    state = trained_state(model)
    del state[SETTINGS]  # methods with other schedules start from it too
    return state


def status_bytes(field: str) -> int:
    """A field of ``/proc/self/status`` in bytes; Linux only."""
    (kilobytes,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def peak_bytes() -> int:
    """The largest resident set that this process has had."""
    if sys.platform == "linux":  # where ru_maxrss includes the parent's memory before exec
        return status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def errors_as_answers() -> Iterator[None]:
    """Turns a ``SparsifyError`` into an answer and exit status 1."""
    try:
        yield
    except SparsifyError as error:
        say({ERROR: str(error)})
        sys.exit(1)


@errors_as_answers()
def main() -> None:
    settings = Settings(**json.loads(sys.stdin.readline()))
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if FILL in sys.argv[1:]:
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in make_state(settings).items()}
        save_file(state, settings.state_file)
        say({})
        return
    worker = Worker(settings)
    ready = {name: getattr(worker, name) for name in ("initialisation", "parameters", "unmasked", "library_bytes")}
    say(ready | {"trained": worker.trainee.trained})
    for line in sys.stdin:
        *how, steps = line.split()
        if how == [PROFILE]:
            say({"sparse": worker.sparse_seconds(int(steps))})
        else:
            say({"seconds": worker.turn(int(steps)), "peak_bytes": worker.peak_bytes()})


def say(message: dict[str, Any]) -> None:
    """Answers the parent process."""
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
