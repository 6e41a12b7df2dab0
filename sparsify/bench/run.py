"""Runs the workers of all methods side by side, round by round, and makes one table of them."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from sparsify.bench.worker import Settings


@dataclass
class Measurement:
    """What one method took.

    Attributes:
        settings: the method and the model.
        initialisation: seconds for everything before the first step.
        unmasked: entries unmasked before the first measured step.
        seconds: of each measured step.
        library_bytes: the resident set after the imports, before there is a model.
        peak_bytes: the process's largest resident set, beyond ``library_bytes``.
    """

    settings: Settings
    initialisation: float = 0.0
    unmasked: int = 0
    library_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds)


def measure(
    methods: Sequence[Settings], rounds: int = 5, steps: int = 3, progress: Callable[[str], None] = lambda text: None
) -> list[Measurement]:
    """Measures the methods in interleaved rounds, so that what else the machine does hits all of them.

    Args:
        methods: what to measure, each in its own process; all are alive at once.
        rounds: how often each method has its turn.
        steps: training steps a turn.
        progress: told what is being done.
    """
    results = [Measurement(settings) for settings in methods]
    with ExitStack() as stack:
        workers = []
        for result in results:
            progress(f"{result.settings.method}: preparing")
            worker = stack.enter_context(_start(result.settings))
            stack.callback(worker.kill)
            ready = _ask(worker, result.settings.to_json())
            result.initialisation, result.unmasked = ready["initialisation"], ready["unmasked"]
            result.library_bytes = ready["library_bytes"]
            workers.append(worker)
        for number in range(1, rounds + 1):
            for worker, result in zip(workers, results, strict=True):
                progress(f"round {number} of {rounds}: {result.settings.method}")
                turn = _ask(worker, str(steps))
                result.seconds += turn["seconds"]
                result.peak_bytes = turn["peak_bytes"]
    return results


def to_json(results: Sequence[Measurement]) -> str:
    """The raw measurements with the conditions they were made under."""
    return json.dumps({"conditions": conditions(), "results": [asdict(result) for result in results]}, indent=2)


def conditions() -> dict[str, Any]:
    """What a measurement depends on beside its settings."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def _start(settings: Settings) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sparsify.bench.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(worker: subprocess.Popen[str], line: str) -> dict[str, Any]:
    assert worker.stdin is not None
    worker.stdin.write(line + "\n")
    worker.stdin.flush()
    return answer(worker)


def answer(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line (JSON) that a worker says."""
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"the worker ended with exit code {worker.wait()}; its error is above.")
    result: dict[str, Any] = json.loads(line)
    return result
