"""One run: a pretrained model, trained as its settings say, and judged after every epoch.

In: settings. Out: a dict of plain JSON types, a line of the results: the settings; for every epoch the score in
percent on all rows and on each half of them, its parts where it is the mean of several (values of the metric, or sets
of rows), and the mean loss; which rows the last epoch has right; the mean training loss of the last epoch; how many
numbers were trained, steps, seconds; and the facts that it takes to run it again.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import islice
from typing import Any, NamedTuple

import peft
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

import sparsify
from examples.paper.generation import Solver, Summarizer
from examples.paper.methods import prepare
from examples.paper.metrics import scores
from examples.paper.models import Classifier, Encoder, Tagger
from examples.paper.settings import Settings
from examples.paper.tasks import TASKS, choose_rows, halves, load_rows
from examples.rows import LengthBatches

KINDS = {"classification": Classifier, "tagging": Tagger, "summarization": Summarizer, "reasoning": Solver}
MAX_NORM = 1.0  # of the gradient
EVALUATION_BATCH = 64


class Judged(NamedTuple):
    """A row to judge on."""

    part: str  # the name of its set, where there are several
    row: dict
    encoded: dict[str, Any]


class Experiment(NamedTuple):
    """A model that is ready to train, and its data."""

    encoder: Encoder
    model: nn.Module
    head: list[str]
    loader: DataLoader
    steps: int
    train_rows: list[dict]
    judged: list[Judged]


def load(settings: Settings, device: str = "cpu") -> Experiment:
    """The model with what its method trains left trainable, and the rows to train and to judge on."""
    task = TASKS[settings.task]
    train_rows, sets = load_rows(task, settings.with_test)
    every_row = [row for rows in (train_rows, *sets.values()) for row in rows]
    train_rows, sets = choose_rows(train_rows, sets, settings.rows, settings.held_out, settings.judged)
    encoder = KINDS[task.kind](task, every_row, settings)
    model, head = encoder.load_model()
    train_set = [encoder.encode(row) for row in train_rows]
    judged = [Judged(name, row, encoder.encode_judged(row)) for name, rows in sets.items() for row in rows]
    loader, calibration = (_shuffled(train_set, encoder, settings) for _ in range(2))
    steps = settings.steps or settings.epochs * len(loader)
    model = prepare(model.to(device), settings, head, encoder.task_type, steps, calibration)
    return Experiment(encoder, model, head, loader, steps, train_rows, judged)


def run(settings: Settings, device: str = "cpu") -> dict[str, Any]:
    """Trains once; the result as described above."""
    started = time.perf_counter()
    loaded = load(settings, device)
    trained = {name: p.numel() for name, p in loaded.model.named_parameters() if p.requires_grad}
    epochs, loss = train(loaded, settings)
    return {
        "settings": asdict(settings),
        "right": [epoch.pop("right") for epoch in epochs][-1],
        "epochs": epochs,
        "training_loss": rounded(loss),
        "trained": sum(trained.values()),
        "head": sum(number for name, number in trained.items() if _is_of_head(name, loaded)),
        "steps": loaded.steps,
        "seconds": round(time.perf_counter() - started, 1),
        "facts": facts(loaded.train_rows, [one.row for one in loaded.judged], device),
    }


def train(loaded: Experiment, settings: Settings) -> tuple[list[dict[str, Any]], float]:
    """Trains with AdamW; returns what :func:`evaluate` found after each epoch, and the mean loss of the last epoch."""
    model, loader, steps = loaded.model, loaded.loader, loaded.steps
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    head = [parameter for name, parameter in named if _is_of_head(name, loaded)]
    rest = [parameter for name, parameter in named if not _is_of_head(name, loaded)]
    parameters, head_rate = [*rest, *head], settings.rate if settings.head_rate is None else settings.head_rate
    groups = [{"params": rest}, {"params": head, "lr": head_rate}]
    optimizer = torch.optim.AdamW(groups, settings.rate, (0.9, settings.beta2), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor(settings, steps))
    device, found, losses = parameters[0].device, [], []
    torch.manual_seed(settings.seed)  # dropout, whatever the method has drawn
    for first in range(0, steps, len(loader)):
        model.train()
        losses, length = [], min(len(loader), steps - first)
        for batch in tqdm(islice(loader, length), total=length, leave=False, disable=None):
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append(evaluate(model, loaded.judged, loaded.encoder))
    return found, float(torch.stack(losses).mean())


def _is_of_head(name: str, loaded: Experiment) -> bool:
    return bool(set(loaded.head) & set(name.split(".")))


def rate_factor(settings: Settings, steps: int) -> Callable[[int], float]:
    """The factor of the learning rate at a step: rising during the warm-up, then constant or falling to 0."""
    warmup = round(settings.warmup * steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 1.0 if settings.decay == "constant" else max(0.0, (steps - step) / (steps - warmup))

    return factor


@torch.no_grad()
def evaluate(model: nn.Module, judged: list[Judged], encoder: Encoder) -> dict[str, Any]:
    """The score on all rows and on each half of them, its parts, the mean loss, and which rows are right."""
    model.eval()
    device, loss = next(model.parameters()).device, 0.0
    pairs: list[Any] = [None] * len(judged)  # true label and prediction
    by_length = sorted(range(len(judged)), key=lambda i: len(judged[i].encoded["input_ids"]))
    for start in range(0, len(judged), EVALUATION_BATCH):
        own = by_length[start : start + EVALUATION_BATCH]
        batch = encoder.collate([judged[i].encoded for i in own])
        predictions, mean_loss = encoder.predict(model, {name: tensor.to(device) for name, tensor in batch.items()})
        for i, prediction in zip(own, predictions, strict=True):
            pairs[i] = encoder.truth(judged[i].row, prediction)
        loss += mean_loss * len(own)

    def parts_of(numbers: Iterable[int]) -> dict[str, float]:
        sets: dict[str, list[Any]] = defaultdict(list)
        for i in numbers:
            sets[judged[i].part].append(pairs[i])
        found = {part: scores(encoder.task.metric, *zip(*own, strict=True)) for part, own in sets.items()}
        return {f"{part} {name}".strip(): value for part, values in found.items() for name, value in values.items()}

    parts = parts_of(range(len(pairs)))
    return {
        "score": _mean(parts),
        "halves": [_mean(parts_of(half)) for half in halves(len(pairs))],
        **({"parts": parts} if len(parts) > 1 else {}),
        "loss": rounded(loss / len(judged)),
        "right": packed([a == b for a, b in pairs]) if encoder.task.exact else None,
    }


def _mean(parts: dict[str, float]) -> float:
    return round(statistics.mean(parts.values()), 3)


def packed(right: list[bool]) -> str:
    """A bit for each row, the first row's the highest, as a hexadecimal number."""
    return f"{int(''.join(str(int(one)) for one in right), 2):x}"


def rounded(loss: float) -> float | None:
    """A loss for JSON, which has no NaN."""
    return round(loss, 5) if math.isfinite(loss) else None


def _shuffled(rows: list[dict], encoder: Encoder, settings: Settings) -> DataLoader:
    """Batches in an order that the seed decides."""
    lengths = [len(row["input_ids"]) for row in rows]
    batches = LengthBatches(lengths, settings.batch_size, settings.seed)
    return DataLoader(rows, batch_sampler=batches, collate_fn=encoder.collate)


def facts(train_rows: list[dict], judged_rows: list[dict], device: str) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps([train_rows, judged_rows], sort_keys=True).encode()).hexdigest()
    return {
        "sparsify": sparsify.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else f"cpu, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "train_rows": len(train_rows),
        "judged_rows": len(judged_rows),
        "rows_sha256": digest[:16],
    }
