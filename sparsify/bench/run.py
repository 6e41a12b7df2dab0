"""Runs the workers of all methods side by side, round by round."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparsify.bench.methods import is_profiled, starts_filled, window_of
from sparsify.bench.settings import HEAPS, WARM_UP, Settings
from sparsify.bench.worker import ERROR, FILL, PROFILE
from sparsify.errors import SparsifyError

Progress = Callable[[str], None]
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}  # memory is measured where glibc returns all freed memory
SHARE = 0.5  # of the available memory that all processes together may take, the heap's holes apart


@dataclass
class Measurement:
    """Times (seconds) and memory (bytes) of one method."""

    settings: Settings
    parameters: int = 0  # numbers in the model
    trained: int = 0  # numbers that the method trains
    unmasked: int = 0  # entries unmasked before the first step, where the method selects entries
    initialisations: list[float] = field(default_factory=list)  # from the built model to the method's, in each process
    forward_backward: list[float] = field(default_factory=list)  # of each step, or of a mean step in each cycle
    updates: list[float] = field(default_factory=list)  # of the same steps: the optimizer's step, and the method's part
    library_bytes: int = 0  # the resident set after the imports, before there is a model; 0 on a GPU
    peak_bytes: int = 0  # the largest resident set beyond library_bytes; on a GPU, the most in tensors
    held_bytes: int = 0  # the same, in a process in which freed memory is returned to the system at once
    sparse: list[float] = field(default_factory=list)  # of more steps: the masked weights' gradients, and selection

    @property
    def step_seconds(self) -> float:
        """The median of whole steps."""
        return statistics.median(map(sum, zip(self.forward_backward, self.updates, strict=True)))


class Process:
    """A process that is asked line by line; as a context, it ends with the block."""

    def __init__(self, module_or_file: Sequence[str], environment: Mapping[str, str]) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        quiet = {"PYTHONWARNINGS": "ignore", "KINETO_LOG_LEVEL": "99"}  # messages would run into the progress display
        command, pipe = [sys.executable, *module_or_file], subprocess.PIPE
        everything = {**inherited, **quiet, **environment}
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=everything)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.__exit__(None, None, None)

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """The next line (JSON); raises the process's ``SparsifyError`` where it ended with one."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with exit code {self._process.wait()}; its error is above.")
        answer: dict[str, Any] = json.loads(line)
        if ERROR in answer:
            raise SparsifyError(answer[ERROR])
        return answer

    def ask(self, line: str) -> dict[str, Any]:
        self.send(line)
        return self.answer()


def steps_ahead(methods: Sequence[str], rounds: int, steps: int) -> int:
    """The most steps that one process does: the warm-up's, those of all rounds, and as many profiled ones.

    Example:
        >>> steps_ahead(["full", "id3"], rounds=5, steps=2), steps_ahead(["id3-every-10"], rounds=5, steps=2)
        (22, 52)
    """
    return WARM_UP + rounds * max(2 * steps, *(-(-steps // window_of(name)) * window_of(name) for name in methods))


def measure(
    points: Sequence[Sequence[Settings]],
    rounds: int = 5,
    steps: int = 3,
    progress: Progress = lambda text: None,
    *,
    one_at_a_time: bool = False,
) -> list[Measurement]:
    """Measures the methods in interleaved rounds, so that other load on the machine affects all of them.

    All processes live from the first round to the last where memory holds them: those of all points together, otherwise
    of one point after the other, otherwise one process at a time, which starts anew, warm-up included, at each turn.

    ``points`` are the methods to measure at each point (layers, budget); ``steps`` is the number per turn.
    """
    results = [[Measurement(settings) for settings in point] for point in points]
    everything = [result for point in results for result in point]
    _fill_buffers([result.settings for result in everything], progress)
    for result in everything:  # in a process of its own, which is slower for it
        progress(f"{result.settings.method}: memory")
        with _ready(result, GIVE_BACK) as worker:
            result.held_bytes = worker.ask("1")["peak_bytes"]
        result.initialisations.clear()
    for group in [everything] if _fit_together(everything) else results:
        _take_turns(group, rounds, steps, progress, together=_fit_together(group) and not one_at_a_time)
    return everything


def _take_turns(group: Sequence[Measurement], rounds: int, steps: int, progress: Progress, together: bool) -> None:
    def prepared(result: Measurement) -> Process:
        progress(f"{result.settings.method}: preparing")
        return _ready(result, HEAPS[result.settings.heap])

    with ExitStack() as stack:
        workers = [stack.enter_context(prepared(result)) for result in group] if together else []
        for number in range(1, rounds + 1):
            for place, result in enumerate(group):
                with ExitStack() as turn:
                    worker = workers[place] if together else turn.enter_context(prepared(result))
                    progress(f"round {number} of {rounds}: {result.settings.method}")
                    said = worker.ask(str(steps))
                    result.forward_backward += [forward_backward for forward_backward, _ in said["seconds"]]
                    result.updates += [update for _, update in said["seconds"]]
                    result.peak_bytes = max(result.peak_bytes, said["peak_bytes"])
                    if not together:
                        _profile(worker, result, steps)
        for number in range(1, rounds + 1):  # after all else, since the profiler takes memory
            for worker, result in zip(workers, group, strict=False):
                progress(f"round {number} of {rounds}: profiled")
                _profile(worker, result, steps)


def _profile(worker: Process, result: Measurement, steps: int) -> None:
    if is_profiled(result.settings):
        result.sparse += worker.ask(f"{PROFILE} {steps}")["sparse"]


def _fill_buffers(methods: Sequence[Settings], progress: Progress) -> None:
    """Writes the states that the methods start from, each in a process of its own."""
    needed = {one.state_file: one for one in methods if starts_filled(one.method) and one.start}
    for settings in needed.values():
        progress(f"ID3 fills the index buffers to {settings.start / 10:g} % of {settings.budget:,}")
        with Process(["-m", "sparsify.bench.worker", FILL], {}) as worker:
            worker.ask(settings.to_json())


def _ready(result: Measurement, environment: Mapping[str, str]) -> Process:
    """A worker that is ready for its first turn."""
    worker = Process(["-m", "sparsify.bench.worker"], environment)
    ready = worker.ask(result.settings.to_json())
    result.initialisations.append(ready.pop("initialisation"))
    for name, value in ready.items():
        setattr(result, name, value)
    return worker


def _fit_together(group: Sequence[Measurement]) -> bool:
    return sum(one.held_bytes + one.library_bytes for one in group) < SHARE * available_bytes(group[0].settings)


def available_bytes(settings: Settings) -> int:
    """Memory of the GPU, or what the system has left."""
    if settings.is_cuda:
        return torch.cuda.get_device_properties(settings.device).total_memory
    if Path("/proc/meminfo").exists():
        return 1024 * int(re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def to_json(results: Sequence[Measurement]) -> str:
    """The raw measurements and the conditions they were made under."""
    rows = [asdict(result) for result in results]
    for row in rows:
        del row["settings"]["folder"]
    return json.dumps({"conditions": conditions(), "results": rows}, indent=2)


def conditions() -> dict[str, Any]:
    """What a measurement depends on, apart from its settings."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {**versions, "machine": platform.machine(), "threads": torch.get_num_threads()}
