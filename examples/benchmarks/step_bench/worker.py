"""One method in one process: builds the model, does some training steps, and reports their times and the memory.

argv    the settings (JSON); then the number of steps to measure, or ``fill``
stdout  one line (JSON): lists and numbers by the names of ``run.Measurement``

With ``fill`` it writes the state of filled buffers instead.
"""

from __future__ import annotations

import importlib
import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from sparsify import get_engine, trained_state
from sparsify.training.engine import COLLECT, COMMIT

from .methods import METHODS
from .models import SHAPES, build, make_batches
from .settings import SEED, WARM_UP, Settings

FILL = "fill"
FILL_STEPS = 24


class Worker:
    """A method that is ready to be measured, its warm-up done."""

    def __init__(self, settings: Settings, seed: int = SEED + 2) -> None:
        self.settings, self.method = settings, METHODS[settings.method]
        SHAPES[settings.shape].model_class()
        if self.method.uses_peft:
            importlib.import_module("peft")
        self.library_bytes = 0 if settings.is_cuda else peak_bytes()
        model = build(settings)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.batches: Iterator[dict[str, Tensor]] = make_batches(settings, model.config.vocab_size, seed)
        started = self._mark()
        self.trainee = self.method.prepare(model, settings)
        self.initialisation = seconds_between(started, self._mark())
        if self.method.starts_filled and settings.start:
            self.trainee.resume(load_file(settings.state_file))
        self.unmasked = self.trainee.unmasked()
        torch.manual_seed(SEED)
        for _ in range(WARM_UP):
            self.step()

    def measure(self, steps: int) -> dict[str, Any]:
        """Does ``steps`` steps, and as many under torch's profiler, which takes memory of its own."""
        ahead = list(islice(self.batches, steps))  # so that the host waits for no copy between the steps
        self.batches = chain(ahead, self.batches)
        marks = [self.step() for _ in range(steps)]
        return {
            "parameters": self.parameters,
            "trained": self.trainee.trained,
            "unmasked": self.unmasked,
            "initialisations": [self.initialisation],
            "forward_backward": [seconds_between(started, between) for started, between, _ in marks],
            "updates": [seconds_between(between, ended) for _, between, ended in marks],
            "library_bytes": self.library_bytes,
            "peak_bytes": self.peak_bytes(),
            "sparse": self.sparse_seconds(steps),
        }

    def peak_bytes(self) -> int:
        """The largest memory so far: of tensors on a GPU, otherwise of the process beyond its libraries."""
        if self.settings.is_cuda:
            return torch.cuda.max_memory_allocated(self.settings.device)
        return peak_bytes() - self.library_bytes

    def sparse_seconds(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps for collecting the masked weights' gradients, selection and commit.

        None where the method has no such part, and on a GPU, which runs asynchronously.
        """
        seconds = []
        for _ in range(steps if self.method.has_sparse_part and not self.settings.is_cuda else 0):
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                self.step()
            ranges = [event for event in profiled.key_averages() if event.key in (COLLECT, COMMIT)]
            seconds.append(sum(event.cpu_time_total for event in ranges) / 1e6)  # microseconds
        return seconds

    def step(self) -> tuple[Any, Any, Any]:
        """One whole training step; returns marks of its start, of the end of backward, and of its end."""
        trainee, batch = self.trainee, next(self.batches)
        started = self._mark()
        trainee.model(**batch).loss.backward()
        between = self._mark()
        trainee.before_step()
        if trainee.optimizer is not None:
            trainee.optimizer.step()
            trainee.optimizer.zero_grad()
        return started, between, self._mark()

    def _mark(self) -> Any:
        """This moment; on a GPU a moment in its stream, which the host does not wait for."""
        if not self.settings.is_cuda:
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self.settings.device))
        return mark


def seconds_between(start: Any, end: Any) -> float:
    """The seconds between two marks."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3  # milliseconds


def fill(model: nn.Module, settings: Settings, step: Callable[[], object], fill_steps: int = FILL_STEPS) -> None:
    """Unmasks the settings' share of the budget by ID3, in steps that stand for many of a long run each."""
    engine = get_engine(model)
    for done in range(1, fill_steps + 1) if settings.start else ():
        engine.entries.step = max(0, settings.start * done // fill_steps - 1)
        step()
    engine.entries.step = settings.start


def make_state(settings: Settings) -> dict[str, Tensor]:
    """The trained state of a new model that ID3 has trained until its buffers are as they are late in a run.

    The first steps of a run have almost nothing unmasked and would flatter. The support resembles a real run's without
    being one: a real run takes a thousandth of its budget from each of hundreds of batches, here :data:`FILL_STEPS`
    batches give some twenty times as many entries each. So an entry has to be less of an outlier to get in, those that
    stay masked have closer scores, and the bound on a tensor's scores rules out less, to ID3's disadvantage; entries
    of one batch share more rows and columns, to the advantage of methods that gather by rows.
    """
    worker = Worker(replace(settings, method="id3", fill=0.0), seed=SEED + 1)
    fill(worker.trainee.model, settings, worker.step)
    return trained_state(worker.trainee.model)


def status_bytes(field: str) -> int:
    """A field of ``/proc/self/status`` in bytes; Linux only."""
    (kilobytes,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def peak_bytes() -> int:
    """The largest resident set that this process has had."""
    if sys.platform == "linux":  # where ru_maxrss includes the parent's memory before exec
        return status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    settings, task = Settings(**json.loads(sys.argv[1])), sys.argv[2]
    if task == FILL:
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in make_state(settings).items()}
        save_file(state, settings.state_file)
    else:
        print(json.dumps(Worker(settings).measure(int(task))))


if __name__ == "__main__":
    main()
