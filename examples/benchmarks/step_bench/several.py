"""Several methods in turns in one process, whose libraries are imported once.

argv    the settings of each turn's method (JSON, a list); the number of steps of a turn; 1 to profile, otherwise 0
stdout  a line (JSON) for each turn: by the names of ``run.Measurement``, and ``profile``; or ``failed``, and why

A method's first turn builds it, the others measure it; the last one also profiles a step, and frees the method.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from sparsify.errors import brief

from .methods import METHODS
from .profiling import profile_step
from .run import OUT_OF_MEMORY
from .settings import Settings
from .worker import Worker, fill


class SharedWorker(Worker):
    """A worker in a process with others, whose tensors on a GPU are not counted as its own."""

    own_bytes = other_bytes = 0  # in tensors on a GPU before a turn: this worker's, and all others

    def __init__(self, settings: Settings) -> None:
        """Does the first steps, and fills the buffers, which builds the kernels."""
        self.settings = settings
        with self._counted():
            started = time.perf_counter()
            super().__init__(replace(settings, fill=0.0))
            self.built = {"warm_up": time.perf_counter() - started}
            if METHODS[settings.method].starts_filled:
                fill(self.trainee.model, settings, self.step)
            self.unmasked = self.trainee.unmasked()
            self.built["peak_bytes"] = self.peak_bytes()
            gc.collect()

    def turn(self, steps: int, profiled: bool) -> dict[str, Any]:
        """Measures ``steps`` steps, after one that fills the caches again."""
        with self._counted():
            self.step()
            found = self.measure(steps)
        try:
            return found | ({"profile": profile_step(self)} if profiled else {})
        except RuntimeError:  # the profiler's library may lack the GPU; what was measured stays
            traceback.print_exc()
            return found

    def peak_bytes(self) -> int:
        return super().peak_bytes() - self.other_bytes

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts the tensors from here on."""
        if self.settings.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.settings.device)
            self.other_bytes = torch.cuda.memory_allocated(self.settings.device) - self.own_bytes
        yield
        if self.settings.is_cuda:
            self.own_bytes = torch.cuda.memory_allocated(self.settings.device) - self.other_bytes


def main() -> None:
    turns, steps, profiled = [Settings(**one) for one in json.loads(sys.argv[1])], int(sys.argv[2]), sys.argv[3] == "1"
    workers: dict[Settings, SharedWorker] = {}
    while turns:
        settings = turns.pop(0)
        try:
            if settings in workers:
                found = workers[settings].turn(steps, profiled and settings not in turns)
            else:
                workers[settings] = SharedWorker(settings)
                found = workers[settings].built
        except Exception as error:  # the others may work
            traceback.print_exc()
            found = {"failed": OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else brief(error)}
            turns = [other for other in turns if other != settings]
        print(json.dumps(found), flush=True)
        if settings not in turns:
            workers.pop(settings, None)
            gc.collect()
            if settings.is_cuda:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
