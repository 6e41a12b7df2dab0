"""What the demo shows: the data, a live progress bar, and the table at the end."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sparsify.cli.demo.docstrings import LABELS, Example
from sparsify.cli.demo.flow import Result, Settings
from sparsify.training.summary import Summary

SMOOTHING = 0.9  # of the shown loss
LINES = 5  # where there is no terminal to draw a bar on


class RichReporter:
    """Draws on a console while it is entered as a context.

    Args:
        console: where to draw.
        steps: how many training steps there will be.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps
        self.loss: float | None = None
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            expand=True,
        )
        self.task = self.progress.add_task("starting", total=None, state="")

    def __enter__(self) -> RichReporter:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.stop()

    def data(self, training: list[Example], held_out: list[Example]) -> None:
        """Shows how many examples there are, and one of each label."""
        labels = ", ".join(f"{sum(e.label == label for e in training)} {name}" for label, name in enumerate(LABELS))
        self.console.print(
            "Task: what does a docstring of Python's standard library document?\n"
            f"{len(training):,} docstrings to train on ({labels}), {len(held_out):,} from other files held out"
        )
        for label, name in enumerate(LABELS):
            text = next((e.text for e in training if e.label == label), "")
            self.console.print(f"  {name:<9} {text}", markup=False, no_wrap=True, overflow="ellipsis", style="dim")

    def stage(self, text: str) -> None:
        """Names what is going on."""
        self.progress.reset(self.task, description=text, total=None, state="")

    def step(self, step: int, loss: float, state: Summary) -> None:
        """Moves the bar; where there is no terminal, prints a line now and then."""
        self.loss = loss if self.loss is None else SMOOTHING * self.loss + (1 - SMOOTHING) * loss
        text = (
            f"loss {self.loss:.2f}  unmasked {state.unmasked:,}/{state.budget:,}  "
            f"tensor sparsity {state.tensor_sparsity:.2f}"
        )
        self.progress.update(self.task, total=self.steps, completed=step, state=text)
        if not self.console.is_terminal and step % max(1, self.steps // LINES) == 0:
            self.console.print(f"step {step:,}/{self.steps:,}  {text}")


def make_table(settings: Settings, result: Result) -> Table:
    """The numbers at the end."""
    state = result.summary
    table = Table(title=f"{settings.strategy}, {settings.steps:,} steps, seed {settings.seed}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = [
        ("held-out accuracy, frozen baseline", f"{result.frozen_accuracy:.1%}"),
        (f"held-out accuracy, {settings.strategy}", f"{result.accuracy:.1%}"),
        (
            "trained entries",
            f"{state.unmasked:,} of {state.num_candidates:,} ({state.unmasked / state.num_candidates:.3%})",
        ),
        ("trained head, beside them", f"{state.num_dense:,}"),
        ("tensor sparsity", f"{state.tensor_sparsity:.2f}"),
        ("delta on disk", megabytes(result.delta_bytes)),
        (
            "full checkpoint on disk",
            f"{megabytes(result.checkpoint_bytes)} ({result.checkpoint_bytes / result.delta_bytes:,.0f} x)",
        ),
        ("delta on a fresh base", "same predictions, bit for bit"),
        ("training time", f"{result.training_seconds:.0f} s"),
        ("total time", f"{result.seconds:.0f} s"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def megabytes(size: int) -> str:
    """A size in bytes for people."""
    return f"{size / 1e6:,.2f} MB"
