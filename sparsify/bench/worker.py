"""One method in one process: builds the model, then does training steps on request and reports their times.

stdin   one line with the settings (JSON), then a line with a number of steps for each turn, after ``profile`` or not
stdout  one JSON line when ready, then one a round: of each step the seconds of forward and backward, and those of the
        update; the peak memory so far; and what the last step looked at to choose, in words; or, of steps under torch's
        profiler, which takes memory itself, the seconds of the sparse part of their backward
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from sparsify.bench.filling import load_state
from sparsify.bench.memory import peak_bytes
from sparsify.bench.methods import PEFT_CONFIGS, prepare, starts_filled, window_of
from sparsify.bench.settings import PROFILE, WARM_UP, Settings, errors_as_answers
from sparsify.bench.shapes import SHAPES, build
from sparsify.bench.tokens import Batches
from sparsify.errors import SparsifyError
from sparsify.training.backward import COLLECT, COMMIT

Seconds = tuple[float, float]  # of forward and backward, of the update


class Worker:
    """A method that is ready to be measured.

    Args:
        settings: what is measured.

    Attributes:
        initialisation: seconds to make the built model train what the method trains.
        parameters: of the model, in numbers.
        unmasked: entries that are unmasked before the first step, where a method chooses entries.
        library_bytes: the resident set before there is a model; 0 on a GPU, where only tensors are counted.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        _import_libraries(settings)
        self.library_bytes = 0 if settings.is_cuda else peak_bytes()
        model = build(settings)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.batches = Batches(settings, model, seed=settings.seed + 2)
        started = self._now()
        self.trainee = prepare(model, settings)
        self.initialisation = self._now() - started
        self._resume()
        self.unmasked = self.trainee.unmasked()
        torch.manual_seed(settings.seed)
        for _ in range(WARM_UP):
            self.step()

    def _resume(self) -> None:
        state = load_state(self.settings) if starts_filled(self.settings.method) else {}
        if state is None:
            raise SparsifyError("the filled buffers are gone from the cache; run the benchmark again.")
        if state:
            self.trainee.resume(state)

    def peak_bytes(self) -> int:
        """The largest memory so far: of tensors on a GPU, otherwise of the process beyond its libraries."""
        if self.settings.is_cuda:
            return torch.cuda.max_memory_allocated(self.settings.device)
        return peak_bytes() - self.library_bytes

    def turn(self, steps: int) -> list[Seconds]:
        """Does at least so many steps.

        Where steps differ in a cycle, as those of a method that chooses at each tenth, a measurement is the mean over
        a whole cycle. Medians are taken over such means: over single steps they would not see the tenth.
        """
        window = window_of(self.settings.method)
        return [mean_of([self.step() for _ in range(window)]) for _ in range(-(-steps // window))]

    def sparse_seconds(self, steps: int) -> list[float]:
        """Of so many steps each: collecting the masked weights' gradients, choosing included, and the commit."""
        return [self._sparse_seconds() for _ in range(steps)]

    def _sparse_seconds(self) -> float:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            self.step()
        ranges = [event for event in profiled.key_averages() if event.key in (COLLECT, COMMIT)]
        return sum(event.cpu_time_total for event in ranges) / 1e6  # microseconds

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


def mean_of(measured: list[Seconds]) -> Seconds:
    """The mean of each of the two.

    Example:
        >>> mean_of([(1.0, 0.0), (3.0, 1.0)])
        (2.0, 0.5)
    """
    first, second = (sum(part) / len(measured) for part in zip(*measured, strict=True))
    return first, second


def _import_libraries(settings: Settings) -> None:
    module = SHAPES[settings.shape].module
    importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    if settings.method in PEFT_CONFIGS:
        importlib.import_module("peft")


@errors_as_answers()
def main() -> None:
    settings = Settings(**json.loads(sys.stdin.readline()))
    if settings.threads:
        torch.set_num_threads(settings.threads)
    worker = Worker(settings)
    _say(
        {
            "initialisation": worker.initialisation,
            "parameters": worker.parameters,
            "trained": worker.trainee.trained,
            "unmasked": worker.unmasked,
            "library_bytes": worker.library_bytes,
        }
    )
    for line in sys.stdin:
        *how, steps = line.split()
        if how == [PROFILE]:
            _say({"sparse": worker.sparse_seconds(int(steps))})
        else:
            seconds = worker.turn(int(steps))
            _say({"seconds": seconds, "peak_bytes": worker.peak_bytes(), "work": worker.trainee.work()})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
