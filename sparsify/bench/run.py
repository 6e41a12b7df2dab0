"""Runs the workers of all methods side by side, round by round, and makes one table of them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparsify.bench.filling import load_state, state_path
from sparsify.bench.methods import is_profiled, starts_filled, window_of
from sparsify.bench.settings import ERROR, HEAPS, PROFILE, WARM_UP, Settings
from sparsify.errors import SparsifyError

Progress = Callable[[str], None]
# memory is measured in a process of its own, in which glibc gives back to the system whatever is freed
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
AHEAD_UNIT = 50  # steps ahead are rounded up to it, so that a few steps more do not ask for other filled buffers


@dataclass
class Measurement:
    """What one method took.

    Attributes:
        settings: the method and the model.
        parameters: numbers in the model.
        trained: numbers that the method trains.
        unmasked: entries unmasked before the first step, where the method chooses entries.
        initialisations: seconds to make the built model train what the method trains, in each process.
        forward_backward: seconds of forward and backward of each measured step, or of a mean step in a window of them.
        updates: likewise, seconds of the update: the optimizer's step with all that the method does about it.
        library_bytes: the resident set after the imports, before there is a model; 0 on a GPU.
        peak_bytes: the process's largest resident set, beyond ``library_bytes``; on a GPU, the most in tensors.
        held_bytes: likewise, of a process in which freed memory goes back to the system at once.
        work: what the last measured step looked at to choose entries, in words.
        sparse: seconds of the sparse part of as many more steps, where there is one: taking what is needed of the
            masked weights' gradients, choosing included.
    """

    settings: Settings
    parameters: int = 0
    trained: int = 0
    unmasked: int = 0
    initialisations: list[float] = field(default_factory=list)
    forward_backward: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    library_bytes: int = 0
    peak_bytes: int = 0
    held_bytes: int = 0
    work: str = ""
    sparse: list[float] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """The median of whole steps."""
        return statistics.median(map(sum, zip(self.forward_backward, self.updates, strict=True)))

    @property
    def update_seconds(self) -> float:
        """The median of updates."""
        return statistics.median(self.updates)

    @property
    def sparse_seconds(self) -> float | None:
        """The median, where there is one."""
        return statistics.median(self.sparse) if self.sparse else None

    @property
    def initialisation(self) -> float:
        """The median over processes."""
        return statistics.median(self.initialisations)


def steps_ahead(methods: Sequence[str], rounds: int, steps: int) -> int:
    """How many steps a process may do in all: the warm-up's, those of all rounds, as many profiled ones; rounded up.

    Example:
        >>> steps_ahead(["full", "id3"], rounds=5, steps=2), steps_ahead(["id3-every-10"], rounds=5, steps=2)
        (50, 100)
    """
    windows = [window_of(method) for method in methods]
    most = WARM_UP + rounds * max(2 * steps, *(-(-steps // window) * window for window in windows))
    return -(-most // AHEAD_UNIT) * AHEAD_UNIT


def measure(
    methods: Sequence[Settings],
    rounds: int = 5,
    steps: int = 3,
    progress: Progress = lambda text: None,
    *,
    together: bool = True,
) -> list[Measurement]:
    """Measures the methods in interleaved rounds, so that what else the machine does hits all of them.

    Args:
        methods: what to measure, each in its own process.
        rounds: how often each method has its turn.
        steps: training steps a turn.
        progress: told what is being done.
        together: whether all processes live from the first round to the last; otherwise one lives at a time, and a
            method starts anew, warm-up included, at each turn.
    """
    fill_buffers(methods, progress)
    results = [Measurement(settings) for settings in methods]
    for result in results:
        _measure_memory(result, progress)
    with ExitStack() as stack:
        workers = [stack.enter_context(_prepared(result, progress)) for result in results] if together else []
        for number in range(1, rounds + 1):
            for place, result in enumerate(results):
                with ExitStack() as turn:
                    worker = workers[place] if together else turn.enter_context(_prepared(result, progress))
                    progress(f"round {number} of {rounds}: {result.settings.method}")
                    _take_turn(worker, result, steps)
                    if not together:
                        _profile(worker, result, steps)
        if together:
            for number in range(1, rounds + 1):  # after all else, since the profiler takes memory
                progress(f"round {number} of {rounds}: profiled")
                for worker, result in zip(workers, results, strict=True):
                    _profile(worker, result, steps)
    return results


def _take_turn(worker: subprocess.Popen[str], result: Measurement, steps: int) -> None:
    said = _ask(worker, str(steps))
    for forward_backward, update in said["seconds"]:
        result.forward_backward.append(forward_backward)
        result.updates.append(update)
    result.peak_bytes = max(result.peak_bytes, said["peak_bytes"])
    result.work = said["work"]


def _profile(worker: subprocess.Popen[str], result: Measurement, steps: int) -> None:
    if is_profiled(result.settings):
        result.sparse += _ask(worker, f"{PROFILE} {steps}")["sparse"]


def fill_buffers(methods: Sequence[Settings], progress: Progress = lambda text: None) -> None:
    """Sees to it that the states that the methods start from are in the cache; each is made in a process of its own."""
    needed = {state_path(settings): settings for settings in methods if starts_filled(settings.method)}
    for settings in needed.values():
        if load_state(settings) is None:
            progress(f"ID3 fills the index buffers to {settings.start / 10:g} % of {settings.budget:,}")
            with _start("sparsify.bench.filling") as process:
                _ask(process, settings.to_json())


def _measure_memory(result: Measurement, progress: Progress) -> None:
    """What the method holds in memory, in a process of its own that takes its time."""
    if result.settings.is_cuda:
        return  # where tensors are counted
    progress(f"{result.settings.method}: memory")
    with _ready(result, GIVE_BACK) as worker:
        result.held_bytes = _ask(worker, "1")["peak_bytes"]
    result.initialisations.clear()


def _prepared(result: Measurement, progress: Progress) -> AbstractContextManager[subprocess.Popen[str]]:
    progress(f"{result.settings.method}: preparing")
    return _ready(result, HEAPS[result.settings.heap])


@contextmanager
def _ready(result: Measurement, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A worker that has said that it is ready; it ends with the block."""
    with _start("sparsify.bench.worker", **environment) as worker:
        try:
            ready = _ask(worker, result.settings.to_json())
            result.initialisations.append(ready.pop("initialisation"))
            for name, value in ready.items():
                setattr(result, name, value)
            yield worker
        finally:
            worker.kill()


def to_json(results: Sequence[Measurement]) -> str:
    """The raw measurements with the conditions they were made under."""
    rows = [asdict(result) for result in results]
    for row in rows:
        row["settings"]["tokens"] = Path(row["settings"]["tokens"]).name  # wherever the cache is
    return json.dumps({"conditions": conditions(), "results": rows}, indent=2)


def conditions() -> dict[str, Any]:
    """What a measurement depends on beside its settings."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def _start(module: str, **more: str) -> subprocess.Popen[str]:
    # what other libraries say would run into the progress
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment = {**inherited, "PYTHONWARNINGS": "ignore", "KINETO_LOG_LEVEL": "99", **more}
    return subprocess.Popen(
        [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def _ask(worker: subprocess.Popen[str], line: str) -> dict[str, Any]:
    assert worker.stdin is not None
    worker.stdin.write(line + "\n")
    worker.stdin.flush()
    return answer(worker)


def answer(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line (JSON) that a worker says.

    Raises:
        SparsifyError: the worker's, where it ended with one.
    """
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"the worker ended with exit code {worker.wait()}; its error is above.")
    result: dict[str, Any] = json.loads(line)
    if ERROR in result:
        raise SparsifyError(result[ERROR])
    return result
