"""``sparsify demo``: its options, its steps, and what it shows."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import save_model

from sparsify import SparseDelta, sparsify, summary
from sparsify.cli.demo.classifier import default_model, load_classifier, quiet_transformers, tokenize
from sparsify.cli.demo.docstrings import LABELS, Example, load_examples
from sparsify.cli.demo.training import accuracy, all_rows, frozen_baseline_accuracy, train
from sparsify.errors import SparsifyError

DEFAULT_BUDGET = 38_000


def demo(
    model: Annotated[str, typer.Option(help="An encoder's name or path; by default all-MiniLM-L6-v2, offline.")] = "",
    strategy: Annotated[str, typer.Option(help="id3, pafi, random or bitfit.")] = "id3",
    budget: Annotated[
        float | None,
        typer.Option(help=f"Entries to train, or a share in (0, 1); by default {DEFAULT_BUDGET}, of bitfit all."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 250,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    out: Annotated[Path, typer.Option(help="Folder for the delta.")] = Path("sparsify-demo"),
    seed: Annotated[int, typer.Option(help="Of the head, the batches and dropout.")] = 0,
) -> None:
    """Fine-tune a real model on real text, save the delta, load it onto a fresh base, compare."""
    if strategy == "full":
        raise SparsifyError("the demo ends with a sparse delta, and strategy 'full' has none; try id3, pafi or random.")
    path = model or default_model()
    quiet_transformers()
    console = Console(highlight=False)

    console.print("Task: what does a docstring of Python's standard library document?")
    examples = load_examples()
    print_examples(console, examples[0])
    training, held_out = tokenize(path, *examples)
    classifier = load_classifier(path, seed)

    # 1. Convert: one line. The new head is trained dense, outside the budget. No weight has changed yet.
    sparsify(classifier, entries_of(budget, strategy), strategy, steps=steps, modules_to_save=["head"], seed=seed)
    frozen_accuracy = frozen_baseline_accuracy(classifier, training, held_out)
    console.print(f"frozen baseline, a head on the pretrained features: {frozen_accuracy:.1%}")

    # 2. Train: any loop will do.
    started = time.perf_counter()
    with Progress(console=console) as progress:
        bar = progress.add_task("", total=steps)

        def show(step: int, loss: float) -> None:
            state = summary(classifier)
            text = f"step {step:,}/{steps:,}  loss {loss:.2f}  unmasked {state.unmasked:,}/{state.budget:,}"
            progress.update(bar, completed=step, description=text)

        train(classifier, training, steps=steps, lr=lr, seed=seed, on_step=show)
    seconds = time.perf_counter() - started
    logits = all_rows(classifier, held_out)

    # 3. Save, and load onto a fresh base, whose own head is another one.
    SparseDelta.from_model(classifier).save(out)
    fresh = load_classifier(path, seed + 1).eval()
    SparseDelta.load(out).apply(fresh)
    if not torch.equal(all_rows(fresh, held_out), logits):
        raise SparsifyError("the loaded delta does not predict what the trained model did: a bug; please report it.")

    with tempfile.TemporaryDirectory() as folder:
        save_model(fresh, f"{folder}/model.safetensors")
        whole = Path(folder, "model.safetensors").stat().st_size
    state, delta = summary(classifier), sum(file.stat().st_size for file in out.glob("*.safetensors"))
    share = state.unmasked / state.num_candidates
    rows = {
        "held-out accuracy, frozen baseline": f"{frozen_accuracy:.1%}",
        f"held-out accuracy, {strategy}": f"{accuracy(logits, held_out.labels):.1%}",
        "trained entries": f"{state.unmasked:,} of {state.num_candidates:,} ({share:.3%})",
        "trained head, in addition": f"{state.num_dense:,}",
        "tensor sparsity": f"{state.tensor_sparsity:.2f}",
        "delta on disk": f"{delta / 1e6:,.2f} MB",
        "full checkpoint on disk": f"{whole / 1e6:,.2f} MB ({whole / delta:,.0f} x)",
        "delta on a fresh base": "same predictions, bit for bit",
        "training time": f"{seconds:.0f} s",
    }
    table = Table(title=f"{strategy}, {steps:,} steps, seed {seed}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows.items():
        table.add_row(*row)
    console.print(table)
    console.print(f"The delta is in {out}: SparseDelta.load({str(out)!r}).apply(model)", markup=False)


def print_examples(console: Console, training: list[Example]) -> None:
    """Prints how many examples of each label there are, and one of them."""
    for label, name in enumerate(LABELS):
        own = [example.text for example in training if example.label == label]
        line = f"  {name:<9}{len(own):>4} to train on: {own[0] if own else ''}"
        console.print(line, markup=False, no_wrap=True, overflow="ellipsis", style="dim")


def entries_of(budget: float | None, strategy: str) -> int | float | None:
    """Entries, or a share of the candidates, as ``sparsify`` takes them."""
    if budget is None:
        return None if strategy == "bitfit" else DEFAULT_BUDGET
    return int(budget) if budget.is_integer() else budget
