"""Tasks: the rows to train and to judge on, and the metric.

Rows come from ``$SPARSIFY_DATA/<task>`` (JSON Lines, as in the other examples) or, where it lacks the task, from the
Hugging Face hub through ``datasets``. A row of a classification task has a ``label`` and one or two texts; a row of a
tagging task has ``tokens`` and ``ner_tags``, as strings.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.rows import read_splits


@dataclass(frozen=True)
class Task:
    """A data set and its metric.

    Args:
        metric: a key of ``METRICS``.
        hub: repository, configuration and revision of the data set on the hub.
        validation: the hub's name of the split to judge on.
        epochs, max_length: the paper's.
    """

    name: str
    metric: str
    epochs: int
    hub: tuple[str, str | None, str | None]
    validation: str = "validation"
    max_length: int = 256

    @property
    def tags(self) -> bool:
        """Whether every word has a label, not every row."""
        return self.metric == "entity f1"

    @property
    def regression(self) -> bool:
        """Whether labels are real numbers."""
        return self.metric == "correlation"


GLUE = "nyu-mll/glue"
PARQUET = "refs/convert/parquet"  # of data sets that are scripts, which `datasets` no longer runs
TASKS = {
    task.name: task
    for task in (
        Task("rte", "accuracy", 30, (GLUE, "rte", None)),
        Task("mrpc", "accuracy", 30, (GLUE, "mrpc", None)),
        Task("cola", "matthews", 20, (GLUE, "cola", None)),
        Task("stsb", "correlation", 15, (GLUE, "stsb", None)),
        Task("sst2", "accuracy", 7, (GLUE, "sst2", None)),
        Task("qnli", "accuracy", 7, (GLUE, "qnli", None)),
        Task("qqp", "accuracy", 3, (GLUE, "qqp", None)),
        Task("mnli", "accuracy", 3, (GLUE, "mnli", None), validation="validation_matched"),
        Task("conll2003", "entity f1", 20, ("eriktks/conll2003", None, PARQUET), max_length=384),
        Task("wnut17", "entity f1", 20, ("leondz/wnut_17", None, PARQUET), max_length=384),
    )
}


def load_rows(task: Task) -> tuple[list[dict], list[dict]]:
    """The training and validation rows; raises SystemExit where they cannot be had."""
    folder = os.environ.get("SPARSIFY_DATA")
    if folder and (Path(folder) / task.name).is_dir():
        train, validation = read_splits(Path(folder) / task.name)
        return train, validation
    try:
        import datasets
    except ImportError:
        raise SystemExit(
            f"the task `{task.name}` is not in SPARSIFY_DATA={folder!r}, and the hub's needs `datasets`: "
            "pip install 'sparsify-ft[paper]'."
        ) from None
    path, name, revision = task.hub
    found = datasets.load_dataset(path, name, revision=revision)
    train, validation = (_named_tags(found[split]) for split in ("train", task.validation))
    return train, validation


def _named_tags(split: Any) -> list[dict]:
    """A split's rows; tags by their names, as in local files."""
    rows = list(split)
    if "ner_tags" in split.features:
        names = split.features["ner_tags"].feature.names
        rows = [{**row, "ner_tags": [names[tag] for tag in row["ner_tags"]]} for row in rows]
    return rows


def choose_rows(
    train: list[dict], validation: list[dict], rows: int | None, held_out: int | None
) -> tuple[list[dict], list[dict]]:
    """The rows to train and to judge on; training rows are shuffled first, the same for every run.

    With ``held_out`` the rows to judge on are training rows that none of these runs trains on.
    """
    shuffled = random.Random(0).sample(train, len(train))
    if held_out is None:
        return shuffled[:rows], validation
    if held_out >= len(shuffled):
        raise SystemExit(f"--held-out {held_out}, and there are {len(shuffled)} training rows; give fewer.")
    return shuffled[: len(shuffled) - held_out][:rows], shuffled[len(shuffled) - held_out :]


def halves(number: int) -> list[list[int]]:
    """Two disjoint random halves of the rows to judge on, the same for every run."""
    shuffled = random.Random(1).sample(range(number), number)
    return [shuffled[: number // 2], shuffled[number // 2 :]]


def score(metric: str, labels: Sequence[Any], predictions: Sequence[Any]) -> float:
    """The metric in percent, where a NaN of a constant predictor counts as 0."""
    value = float(METRICS[metric](labels, predictions))
    return 0.0 if value != value else round(100 * value, 3)


def _accuracy(labels: Sequence[int], predictions: Sequence[int]) -> float:
    return sum(label == found for label, found in zip(labels, predictions, strict=True)) / len(labels)


def _matthews(labels: Sequence[int], predictions: Sequence[int]) -> float:
    from sklearn.metrics import matthews_corrcoef

    return matthews_corrcoef(labels, predictions)


def _correlation(labels: Sequence[float], predictions: Sequence[float]) -> float:
    """Mean of Pearson's and Spearman's."""
    from scipy.stats import pearsonr, spearmanr

    if len(set(predictions)) == 1:
        return 0.0
    return (pearsonr(labels, predictions).statistic + spearmanr(labels, predictions).statistic) / 2


def _entity_f1(labels: Sequence[list[str]], predictions: Sequence[list[str]]) -> float:
    try:
        from seqeval.metrics import f1_score
    except ImportError:
        raise SystemExit("the F1 of entities is seqeval's: pip install 'sparsify-ft[paper]'.") from None
    return f1_score(labels, predictions, zero_division=0)


METRICS = {"accuracy": _accuracy, "matthews": _matthews, "correlation": _correlation, "entity f1": _entity_f1}
