"""``sparsify demo``: its options, its steps, and what it shows."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from safetensors.torch import save_model
from torch import Tensor

from sparsify import SparseDelta, sparsify, summary
from sparsify.cli.demo.classifier import default_model, load_classifier, quiet_transformers, tokenize
from sparsify.cli.demo.docstrings import LABELS, Example, load_examples
from sparsify.cli.demo.training import accuracy, all_rows, frozen_baseline_accuracy, train
from sparsify.errors import SparsifyError
from sparsify.training.summary import Summary

DEFAULT_BUDGET = 38_000
SMOOTHING = 0.9  # of the shown loss
LINES = 5  # printed in training where there is no terminal for a bar


def demo(
    model: Annotated[str, typer.Option(help="An encoder's name or path; by default all-MiniLM-L6-v2, offline.")] = "",
    strategy: Annotated[str, typer.Option(help="id3, pafi, random or bitfit.")] = "id3",
    budget: Annotated[
        str, typer.Option(help=f"Entries to train, or a share in (0, 1); {DEFAULT_BUDGET} unless bitfit.")
    ] = "",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 250,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    out: Annotated[Path, typer.Option(help="Folder for the delta.")] = Path("sparsify-demo"),
    seed: Annotated[int, typer.Option(help="Of the head, the batches and dropout.")] = 0,
) -> None:
    """Fine-tune a real model on real text, save the delta, load it onto a fresh base, compare."""
    entries = parse_budget(budget, strategy)
    path = model or default_model()
    quiet_transformers()
    console = Console()
    with Display(console, steps) as display:
        rows = run(path, strategy, entries, steps, lr, out, seed, display)
    table = Table(title=f"{strategy}, {steps:,} steps, seed {seed}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, value in rows.items():
        table.add_row(label, value)
    console.print(table)
    console.print(f"The delta is in {out}: SparseDelta.load({str(out)!r}).apply(model)", markup=False, highlight=False)


def parse_budget(text: str, strategy: str) -> int | float | None:
    """Entries, or a share of the candidates; by default ``DEFAULT_BUDGET``, or all of bitfit's biases.

    Example:
        >>> parse_budget("20_000", "id3"), parse_budget("0.01", "id3"), parse_budget("", "bitfit")
        (20000, 0.01, None)
    """
    if not text:
        return None if strategy == "bitfit" else DEFAULT_BUDGET
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise SparsifyError(f"budget={text!r}; expected a number of entries, or a share of the candidates in (0, 1).")


class Display(Progress):
    """A live progress bar, above it what is worth keeping; entered as a context."""

    def __init__(self, console: Console, steps: int) -> None:
        bar, state = BarColumn(bar_width=None), TextColumn("{task.fields[state]}")
        columns = TextColumn("{task.description}"), bar, MofNCompleteColumn(), state, TimeElapsedColumn()
        super().__init__(*columns, console=console, transient=True, expand=True)
        self.steps, self.loss = steps, 0.0
        self.bar = self.add_task("starting", total=None, state="")

    def show_data(self, training: list[Example], held_out: list[Example]) -> None:
        """Prints how many examples there are, and one of each label."""
        labels = ", ".join(f"{sum(e.label == label for e in training)} {name}" for label, name in enumerate(LABELS))
        self.console.print(
            "Task: what does a docstring of Python's standard library document?\n"
            f"{len(training):,} docstrings to train on ({labels}), {len(held_out):,} from other files held out"
        )
        for label, name in enumerate(LABELS):
            text = next((e.text for e in training if e.label == label), "")
            self.console.print(f"  {name:<9} {text}", markup=False, no_wrap=True, overflow="ellipsis", style="dim")

    def show_stage(self, text: str) -> None:
        """Names what takes time now."""
        self.reset(self.bar, description=text, total=None, state="")

    def show_step(self, step: int, loss: float, state: Summary) -> None:
        """Moves the bar after a training step; without a terminal, prints a line now and then."""
        self.loss = loss if step == 1 else SMOOTHING * self.loss + (1 - SMOOTHING) * loss
        text = (
            f"loss {self.loss:.2f}  unmasked {state.unmasked:,}/{state.budget:,}  "
            f"tensor sparsity {state.tensor_sparsity:.2f}"
        )
        self.update(self.bar, total=self.steps, completed=step, state=text)
        if not self.console.is_terminal and step % max(1, self.steps // LINES) == 0:
            self.console.print(f"step {step:,}/{self.steps:,}  {text}")


def run(
    path: str, strategy: str, budget: int | float | None, steps: int, lr: float, out: Path, seed: int, display: Display
) -> dict[str, str]:
    """Runs the demo; returns the table's rows."""
    started = time.perf_counter()
    if strategy == "full":
        raise SparsifyError("the demo ends with a sparse delta, and strategy 'full' has none; try id3, pafi or random.")
    display.show_stage("reading docstrings and loading the model")
    examples = load_examples()
    display.show_data(*examples)
    training, held_out = tokenize(path, *examples)
    model = load_classifier(path, seed)

    # 1. Convert: one line. The new head is trained dense, outside the budget. No weight has changed yet.
    sparsify(model, budget, strategy, steps=steps, modules_to_save=["head"], seed=seed)
    display.show_stage("frozen baseline: a head on the pretrained features")
    frozen_accuracy = frozen_baseline_accuracy(model, training, held_out)

    # 2. Train: any loop will do.
    display.show_stage(strategy)
    training_started = time.perf_counter()
    show = lambda step, loss: display.show_step(step, loss, summary(model))  # noqa: E731
    train(model, training, steps=steps, lr=lr, seed=seed, on_step=show)
    training_seconds = time.perf_counter() - training_started
    display.show_stage("evaluating")
    logits = all_rows(model, held_out)

    # 3. Save, and load onto a fresh base, whose own head is another one.
    SparseDelta.from_model(model).save(out)
    display.show_stage("loading the delta onto a fresh base")
    fresh = load_classifier(path, seed + 1).eval()
    SparseDelta.load(out).apply(fresh)
    check_same(logits, all_rows(fresh, held_out))

    with tempfile.TemporaryDirectory() as folder:
        save_model(fresh, f"{folder}/model.safetensors")
        whole = Path(folder, "model.safetensors").stat().st_size
    state = summary(model)
    share = state.unmasked / state.num_candidates
    delta = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return {
        "held-out accuracy, frozen baseline": f"{frozen_accuracy:.1%}",
        f"held-out accuracy, {strategy}": f"{accuracy(logits, held_out.labels):.1%}",
        "trained entries": f"{state.unmasked:,} of {state.num_candidates:,} ({share:.3%})",
        "trained head, in addition": f"{state.num_dense:,}",
        "tensor sparsity": f"{state.tensor_sparsity:.2f}",
        "delta on disk": f"{delta / 1e6:,.2f} MB",
        "full checkpoint on disk": f"{whole / 1e6:,.2f} MB ({whole / delta:,.0f} x)",
        "delta on a fresh base": "same predictions, bit for bit",
        "training time": f"{training_seconds:.0f} s",
        "total time": f"{time.perf_counter() - started:.0f} s",
    }


def check_same(logits: Tensor, others: Tensor) -> None:
    """Raises ``SparsifyError`` unless two tensors of logits are equal bit for bit."""
    if not torch.equal(logits, others):
        raise SparsifyError(
            f"the loaded delta does not predict what the trained model did: {int((logits != others).sum()):,} of "
            f"{logits.numel():,} logits differ, by up to {(logits - others).abs().max().item():.3g}. "
            "This is a bug in sparsify; please report it."
        )
