"""Several methods one after the other in one process, whose libraries are imported once.

argv    the settings of each (JSON, a list); the number of steps to measure; 1 to profile a step of each, otherwise 0
stdout  a line (JSON) for each: by the names of ``run.Measurement``, and ``profile``; or ``failed``, and why
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from dataclasses import replace
from typing import Any

import torch

from sparsify.errors import brief

from .methods import METHODS
from .profiling import profile_step
from .run import OUT_OF_MEMORY
from .settings import Settings
from .worker import Worker, fill


def measure(settings: Settings, steps: int, profiled: bool) -> dict[str, Any]:
    """Measures one method; the first steps, and the filling of its buffers, build the kernels."""
    if settings.is_cuda:
        torch.cuda.reset_peak_memory_stats(settings.device)
    started = time.perf_counter()
    worker = Worker(replace(settings, fill=0.0))
    warm_up = time.perf_counter() - started
    if METHODS[settings.method].starts_filled:
        fill(worker.trainee.model, settings, worker.step)
    worker.unmasked = worker.trainee.unmasked()
    found = worker.measure(steps) | {"warm_up": warm_up}
    try:
        return found | {"profile": profile_step(worker) if profiled else {}}
    except RuntimeError:  # the profiler's library may lack the GPU; what was measured stays
        traceback.print_exc()
        return found


def main() -> None:
    methods, steps, profiled = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"
    for method in methods:
        settings = Settings(**method)
        try:
            found = measure(settings, steps, profiled)
        except Exception as error:  # the next one may work
            traceback.print_exc()
            found = {"failed": OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else brief(error)}
        print(json.dumps(found), flush=True)
        gc.collect()
        if settings.is_cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
