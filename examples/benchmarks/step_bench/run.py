"""Runs all methods in interleaved rounds, each turn in a process of its own."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparsify.errors import SparsifyError, brief

from .methods import METHODS
from .settings import Settings
from .worker import FILL

# By default glibc returns some of the freed memory to the system and gets it back page by page, which takes up to a
# tenth of a step and varies from run to run. These are its limits for keeping all of it.
KEEP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
OUT_OF_MEMORY = "out of memory"
FOLDER = str(Path(__file__).parents[1])  # of this package
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}  # memory is measured where glibc returns all freed memory


@dataclass
class Measurement:
    """Times (seconds) and memory (bytes) of one method."""

    settings: Settings
    parameters: int = 0  # numbers in the model
    trained: int = 0  # numbers that the method trains
    unmasked: int = 0  # entries unmasked before the first step, where the method selects entries
    initialisations: list[float] = field(default_factory=list)  # from the built model to the method's, in each process
    forward_backward: list[float] = field(default_factory=list)  # of each step; none where the method failed
    updates: list[float] = field(default_factory=list)  # of the same steps: the optimizer's step, and the method's part
    library_bytes: int = 0  # the resident set after the imports, before there is a model; 0 on a GPU
    peak_bytes: int = 0  # the largest resident set beyond library_bytes; on a GPU, the most in tensors
    held_bytes: int = 0  # the same, in a process in which freed memory is returned to the system at once
    sparse: list[float] = field(default_factory=list)  # of more steps: the masked weights' gradients, and selection
    warm_up: float = 0.0  # seconds until the steps to be measured, where the process measures several methods
    profile: dict[str, Any] = field(default_factory=dict)  # of one step (profiling.py), where it was taken
    failed: str = ""  # why the method is not measured to its end

    @property
    def step_seconds(self) -> float:
        """The median of whole steps."""
        return statistics.median(map(sum, zip(self.forward_backward, self.updates, strict=True)))

    def add(self, turn: Mapping[str, Any]) -> None:
        """Adds what a worker has measured in one turn."""
        for name, value in turn.items():
            own = getattr(self, name)
            setattr(self, name, own + value if isinstance(value, list) else max(own, value))


def measure(methods: Sequence[Settings], rounds: int, steps: int, progress: Callable[[str], None]) -> list[Measurement]:
    """Measures each method ``rounds`` times, in turns, so that other load on the machine affects all of them.

    A method whose process fails has no further turn.
    """
    results = [Measurement(settings) for settings in methods]

    def turn(one: Measurement, task: str, heap: Mapping[str, str]) -> str:
        if not one.failed:
            try:
                return run_worker(one.settings, task, heap)
            except SparsifyError as error:
                one.failed = str(error)
        return "{}"

    filled: dict[Path, Measurement] = {}
    for one in results:
        settings = one.settings
        if METHODS[settings.method].starts_filled and settings.start:
            if settings.state_file not in filled:
                progress(f"ID3 fills the index buffers to {settings.start / 10:g} % of {settings.budget:,}")
                turn(filled.setdefault(settings.state_file, one), FILL, {})
            one.failed = filled[settings.state_file].failed
    for one in results:
        if not one.settings.is_cuda:  # in a process of its own, which is slower for it
            progress(f"{one.settings.method}: memory")
            one.held_bytes = json.loads(turn(one, "1", GIVE_BACK)).get("peak_bytes", 0)
    for number in range(1, rounds + 1):
        for one in results:
            progress(f"round {number} of {rounds}: {one.settings.method}")
            one.add(json.loads(turn(one, str(steps), KEEP)))
            if one.settings.is_cuda:
                one.held_bytes = one.peak_bytes
    return results


def run_worker(settings: Settings, task: str, heap: Mapping[str, str]) -> str:
    """Runs a worker to its end, with glibc's limits for the heap; returns its answer.

    Raises ``SparsifyError``: ``OUT_OF_MEMORY`` on a GPU, or the process's error.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [FOLDER, inherited.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "step_bench.worker", json.dumps(asdict(settings)), task]
    done = subprocess.run(command, capture_output=True, text=True, env={**inherited, **heap})
    if done.returncode:
        errors = re.findall(r"^[\w.]+(?:Error|Exception): .*", done.stderr, re.MULTILINE)
        if errors and "OutOfMemoryError" in errors[-1]:
            raise SparsifyError(OUT_OF_MEMORY)
        ending = brief([*(done.stderr.splitlines() or ["no error message"]), *errors][-1])
        raise SparsifyError(
            f"the process of method {settings.method!r} ended with exit code {done.returncode}: {ending} If it cannot "
            "work here, leave the method out (--methods)."
        )
    return done.stdout


def to_json(results: Sequence[Measurement]) -> str:
    """The raw measurements and the conditions they were made under."""
    rows = [asdict(result) for result in results]
    for row in rows:
        del row["settings"]["folder"]
    return json.dumps({"conditions": conditions(), "results": rows}, indent=2)


def conditions() -> dict[str, Any]:
    """What a measurement depends on, apart from its settings."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {**versions, "machine": platform.machine(), "threads": torch.get_num_threads(), **gpu}
