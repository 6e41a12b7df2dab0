"""Finished runs: a line of JSON for each, found by its settings, and the processes that add the missing ones.

A line is appended as soon as its run has ended, by the process that ran it: what is cut off loses only the runs that
were under way. Two commands may share a file; each looks at it again before it starts a run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any, NamedTuple

from examples.paper.settings import Settings

Run = dict[str, Any]
ROOT = Path(__file__).parents[2]  # holds the package `examples`
WORKER = ("-m", "examples.paper.worker")
POLL_SECONDS = 0.2
SHOWN = 2_000  # characters of a failed run's messages


class Started(NamedTuple):
    """A run under way; its messages are shown only if it fails."""

    process: subprocess.Popen[bytes]
    messages: IO[bytes]


def settings_of(line: Run) -> Settings:
    """A line's settings; those that were added to :class:`Settings` later have their defaults."""
    known = {field.name for field in fields(Settings)}
    return Settings(**{name: value for name, value in line["settings"].items() if name in known})


def read(path: Path) -> dict[str, Run]:
    """The finished runs by their settings' key; a last line that was cut off is left out."""
    runs: dict[str, Run] = {}
    for text in path.read_text(encoding="utf-8").split("\n") if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        runs[settings_of(line).key] = line
    return runs


def append(path: Path, run: Run) -> None:
    """Adds a line, in one write that reaches the disk; a line that was cut off before it stays a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        broken = file.read(1) not in (b"", b"\n")
        file.write((b"\n" if broken else b"") + json.dumps(run).encode() + b"\n")
        os.fsync(file.fileno())


def run_missing(wanted: Sequence[Settings], path: Path, jobs: int, device: str, command: str) -> list[str]:
    """Runs what the file lacks, ``jobs`` at a time, each in a process of its own.

    A run that fails does not stop the others. Returns the keys of those that failed.
    """
    done = read(path)
    missing = [settings for settings in wanted if settings.key not in done]
    running: dict[str, Started] = {}
    failed: list[str] = []
    try:
        for number, settings in enumerate(missing, start=1):
            _wait(running, failed, fewer_than=jobs)
            if settings.key not in read(path):  # another command may have run it in the meantime
                print(f"{time.strftime('%H:%M')} {number} of {len(missing)}: {describe(settings)}", flush=True)
                running[settings.key] = _start(settings, path, jobs, device, command)
        _wait(running, failed, fewer_than=1)
    finally:
        for started in running.values():
            started.process.terminate()
    return failed


def describe(settings: Settings) -> str:
    """A run in a few words."""
    budget = f" {settings.budget:,}" if settings.budget else ""
    return f"{settings.task} {settings.method}{budget} at {settings.rate:g}, seed {settings.seed}"


def _start(settings: Settings, path: Path, jobs: int, device: str, command: str) -> Started:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    task = {"settings": asdict(settings), "path": str(path), "device": device, "command": command}
    messages = tempfile.TemporaryFile()  # noqa: SIM115, closed when the run has ended
    process = subprocess.Popen([sys.executable, *WORKER, json.dumps(task)], env=environment, stderr=messages)
    return Started(process, messages)


def _wait(running: dict[str, Started], failed: list[str], fewer_than: int) -> None:
    """Waits until fewer than so many processes run; notes those that failed, and shows what they said."""
    while len(running) >= fewer_than and running:
        for key, (process, messages) in list(running.items()):
            if (code := process.poll()) is None:
                continue
            del running[key]
            with messages:
                if code:
                    failed.append(key)
                    messages.seek(0)
                    print(messages.read().decode(errors="replace")[-SHOWN:], file=sys.stderr)
        time.sleep(POLL_SECONDS if len(running) >= fewer_than else 0)
