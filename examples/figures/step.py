"""Draws one training step: the memory of tensors over its CPU time, for full fine-tuning, LoRA and ID3.

    python -m examples.figures.step

Measured, not sketched: torch's profiler reports each allocation. The model is BERT-base's shape with fewer layers, so
that single gradients can be seen, with random weights and tokens, on one thread. Time is that of the CPU, which other
programs on the machine do not lengthen. Takes less than a minute on a free core.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from examples.benchmarks.step_bench.settings import Settings
from examples.benchmarks.step_bench.worker import Worker
from examples.figures.look import FOLDER, FULL, INK, LORA, OURS, save

METHODS = {"full": ("full fine-tuning", FULL), "lora": ("LoRA r = 8", LORA), "id3": ("ID3", OURS)}
MB = 2**20
POLL_SECONDS = 0.002
SMALLEST = 0.008  # of the largest memory: a change that is drawn


class Step(NamedTuple):
    """One measured step: memory in MB after each allocation and release, at CPU seconds from the step's start."""

    seconds: np.ndarray
    memory: np.ndarray
    weights: float  # MB of the model, which live all the time
    kept: float  # with the optimizer's state
    forward_ends: float
    backward_ends: float


def measure(settings: Settings) -> Step:
    """One step after the warm-up, with the optimizer's state made and no gradients left."""
    trainee, batches = (worker := Worker(settings)).trainee, worker.batches
    batch, marks = next(batches), []
    tensors = [*trainee.model.parameters(), *trainee.model.buffers()]
    weights = _bytes(tensors)
    moments = _bytes(value for state in trainee.optimizer.state.values() for value in state.values())
    with _cpu_clock() as clock, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        marks.append(time.process_time())
        loss = trainee.model(**batch).loss
        marks.append(time.process_time())
        loss.backward()
        marks.append(time.process_time())
        trainee.optimizer.step()
        trainee.optimizer.zero_grad()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events = [event for event in events if event.device_type() == DeviceType.CPU]
    at = np.interp([event.start_ns() for event in events], *zip(*clock, strict=True)) - marks[0]
    memory = weights + moments + np.cumsum([event.nbytes() for event in events])
    return Step(at, memory / MB, weights / MB, (weights + moments) / MB, marks[1] - marks[0], marks[2] - marks[0])


def _bytes(tensors: Any) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@contextmanager
def _cpu_clock() -> Iterator[list[tuple[int, float]]]:
    """Pairs of the clock's nanoseconds and the process's CPU seconds, taken all the time by a thread."""
    pairs, ended = [(time.time_ns(), time.process_time())], threading.Event()

    def poll() -> None:
        while not ended.wait(POLL_SECONDS):
            pairs.append((time.time_ns(), time.process_time()))

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield pairs
    finally:
        ended.set()
        thread.join()
        pairs.append((time.time_ns(), time.process_time()))


def draw(steps: dict[str, Step]) -> Figure:
    """A panel for each method, in the same axes."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, len(steps), sharex=True, sharey=True)
    for ax, (method, step) in zip(panels, steps.items(), strict=True):
        name, color = METHODS[method]
        end = step.seconds[-1]
        ax.fill_between([0, end], step.weights, color=INK, alpha=0.35, linewidth=0)
        ax.fill_between([0, end], step.weights, step.kept, color=INK, alpha=0.75, linewidth=0)
        seconds, memory = _visible(step)
        ax.fill_between(seconds, step.kept, memory, step="post", color=color, alpha=0.55, linewidth=0)
        ax.plot(seconds, memory, drawstyle="steps-post", color=color, linewidth=1)
        for at in (step.forward_ends, step.backward_ends):
            ax.axvline(at, color=INK, linewidth=0.8, linestyle=":")
        ax.set_title(f"{name}: {step.memory.max():,.0f} MB, {end:.1f} s")
    top = max(step.memory.max() for step in steps.values())
    longest = max(step.seconds[-1] for step in steps.values())
    panels[0].set(ylim=(0, 1.12 * top), xlim=(0, 1.25 * longest), ylabel="memory of tensors (MB)")
    panels[len(panels) // 2].set_xlabel("CPU seconds")
    for ax, step in zip(panels, steps.values(), strict=True):
        for text, start in (("forward", 0), ("backward", step.forward_ends), ("update", step.backward_ends)):
            ax.text(start + 0.02 * longest, 1.1 * top, text, fontsize=8, va="top")
    return figure


def _visible(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and memory without the changes that are too small to be seen."""
    shown = [0]
    for at, value in enumerate(step.memory):
        if abs(value - step.memory[shown[-1]]) > SMALLEST * step.memory.max():
            shown.append(at)
    shown.append(len(step.memory) - 1)
    return step.seconds[shown], step.memory[shown]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="bert-base", help="as in examples/benchmarks/step.py")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--budget", type=int, default=320_000)
    parser.add_argument("--out", type=Path, default=FOLDER / "step.svg")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settings = {"shape": options.shape, "layers": options.layers, "budget": options.budget, "fill": 0.0}
    save(draw({method: measure(Settings(method, **settings)) for method in METHODS}), options.out)


if __name__ == "__main__":
    main()
