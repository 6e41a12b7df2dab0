"""The demo, step by step: frozen baseline, sparsify, train, save, load onto a fresh base, compare."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from sparsify import SparseDelta, sparsify, summary
from sparsify.cli.demo.classifier import load_classifier, tokenize
from sparsify.cli.demo.docstrings import Example, load_examples
from sparsify.cli.demo.training import accuracy, all_rows, frozen_baseline_accuracy, train
from sparsify.errors import SparsifyError
from sparsify.training.summary import Summary


@dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
        model: name or path of a transformers encoder.
        strategy: a preset's name.
        budget: entries, or a share of the candidates; ``None`` where the strategy says how many.
        steps: optimizer steps.
        lr: learning rate.
        out: folder for the delta.
        seed: of the head, the batches and dropout.
    """

    model: str
    strategy: str
    budget: int | float | None
    steps: int
    lr: float
    out: Path
    seed: int


@dataclass(frozen=True)
class Result:
    """What came out; accuracies are on the held-out examples, sizes in bytes, times in seconds."""

    frozen_accuracy: float
    accuracy: float
    summary: Summary
    delta_bytes: int
    checkpoint_bytes: int
    training_seconds: float
    seconds: float


class Reporter(Protocol):
    """Whom the demo tells what happens."""

    def data(self, training: list[Example], held_out: list[Example]) -> None:
        """The examples are there."""

    def stage(self, text: str) -> None:
        """Something starts that takes a while."""

    def step(self, step: int, loss: float, state: Summary) -> None:
        """A training step is done."""


def run(settings: Settings, reporter: Reporter) -> Result:
    """Runs the demo.

    Raises:
        SparsifyError: when an option is wrong, or the loaded delta does not predict exactly what the model did.
    """
    started = time.perf_counter()
    if settings.strategy == "full":
        raise SparsifyError("the demo ends with a sparse delta, and strategy 'full' has none; try id3, pafi or random.")
    reporter.stage("reading docstrings and loading the model")
    examples = load_examples()
    reporter.data(*examples)
    training, held_out = tokenize(settings.model, *examples)
    model = load_classifier(settings.model, settings.seed)

    # 1. Convert: one line. The new head is trained dense, beside the budget. No weight has changed yet.
    sparsify(
        model,
        settings.budget,
        settings.strategy,
        steps=settings.steps,
        modules_to_save=["head"],
        seed=settings.seed,
    )
    reporter.stage("frozen baseline: a head on the pretrained features")
    frozen_accuracy = frozen_baseline_accuracy(model, training, held_out)

    # 2. Train: any loop will do.
    reporter.stage(settings.strategy)
    training_started = time.perf_counter()
    train(
        model,
        training,
        steps=settings.steps,
        lr=settings.lr,
        seed=settings.seed,
        on_step=lambda step, loss: reporter.step(step, loss, summary(model)),
    )
    training_seconds = time.perf_counter() - training_started
    reporter.stage("evaluating")
    logits = all_rows(model, held_out)

    # 3. Save, and load onto a fresh base, whose own head is another one.
    SparseDelta.from_model(model).save(settings.out)
    reporter.stage("loading the delta onto a fresh base")
    fresh = load_classifier(settings.model, settings.seed + 1).eval()
    delta = SparseDelta.load(settings.out)
    delta.apply(fresh)
    check_same(logits, all_rows(fresh, held_out))
    return Result(
        frozen_accuracy=frozen_accuracy,
        accuracy=accuracy(logits, held_out.labels),
        summary=summary(model),
        delta_bytes=sum(path.stat().st_size for path in settings.out.glob("*.safetensors")),
        checkpoint_bytes=checkpoint_bytes(fresh),
        training_seconds=training_seconds,
        seconds=time.perf_counter() - started,
    )


def check_same(logits: Tensor, others: Tensor) -> None:
    """Compares the trained model's logits with the loaded delta's, bit for bit.

    Raises:
        SparsifyError: when they differ.
    """
    if not torch.equal(logits, others):
        raise SparsifyError(
            f"the loaded delta does not predict what the trained model did: {int((logits != others).sum()):,} of "
            f"{logits.numel():,} logits differ, by up to {(logits - others).abs().max().item():.3g}. "
            "This is a bug in sparsify; please report it."
        )


def checkpoint_bytes(model: nn.Module) -> int:
    """The size on disk of the model as an ordinary checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_model(model, str(path))
        return path.stat().st_size
