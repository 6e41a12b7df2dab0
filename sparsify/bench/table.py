"""What a benchmark says: its conditions in words, and a table with the columns of the paper's, and ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sparsify.bench.methods import FLOOR, FULL, window_of
from sparsify.bench.run import Measurement
from sparsify.bench.shapes import note

MB = 2**20


def headline(results: Sequence[Measurement], rounds: int, steps: int, text: str) -> str:
    """What was measured, and how."""
    settings = results[0].settings
    parts = [f"{settings.shape} ({results[0].parameters:,} parameters)", note(settings), text]
    parts += [settings.dtype, settings.device, f"batch {settings.batch} x {settings.length}"]
    parts += ["activation checkpointing"] if settings.checkpointing else []
    parts += ["heap as it comes"] if settings.heap == "system" else []
    parts += [f"budget {settings.budget:,}", f"buffers filled to {settings.start / 10:g} %"]
    memory = (
        "memory of tensors on the GPU"
        if settings.is_cuda
        else f"memory beyond the {results[0].library_bytes / MB:,.0f} MB of libraries; resident: with the heap's holes"
    )
    windows = (
        "; id3-every-10 by means of 10 steps" if any(window_of(one.settings.method) > 1 for one in results) else ""
    )
    return (
        f"{', '.join(part for part in parts if part)}: medians of {rounds * steps} steps in {rounds} interleaved rounds"
        f"{windows}; {memory}"
    )


def make_table(results: Sequence[Measurement]) -> Table:
    """A row a method, with its ratios to full fine-tuning and to the floor where these were measured."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    bases = [(name, one) for name in (FULL, FLOOR) for one in results if one.settings.method == name]
    ratios = [f"/ {name}" for name, _ in bases]
    columns = ["trained", "unmasked", "memory (MB)", *ratios, "resident (MB)"]
    columns += ["init (s)", "sparse (s)", "update (s)", "step (s)", *ratios]
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(column.replace(" (", "\n("), justify="right", no_wrap=True)
    for one in results:
        table.add_row(
            one.settings.method,
            f"{one.trained:,}" if one.trained else "-",
            f"{one.unmasked:,}" if one.unmasked else "-",
            f"{memory_of(one) / MB:,.0f}",
            *(f"{ratio_to(base, one, memory_of):.2f}" for _, base in bases),
            f"{one.peak_bytes / MB:,.0f}",
            f"{one.initialisation:.2f}",
            "-" if one.sparse_seconds is None else f"{one.sparse_seconds:.3f}",
            f"{one.update_seconds:.3f}",
            f"{one.step_seconds:.3f}",
            *(f"{ratio_to(base, one, seconds_of):.2f}" for _, base in bases),
        )
    return table


def memory_of(one: Measurement) -> float:
    """The most that is held in memory, in bytes."""
    return one.held_bytes or one.peak_bytes


def seconds_of(one: Measurement) -> float:
    """Seconds of a step."""
    return one.step_seconds


def ratio_to(base: Measurement, one: Measurement, what: Callable[[Measurement], float]) -> float:
    """How many times the base's it is."""
    return what(one) / what(base)
