"""Tasks: the rows to train and to judge on, and the metric.

Rows come from ``$SPARSIFY_DATA/<task>`` (JSON Lines, as in the other examples) or, where it lacks the task, from the
Hugging Face hub through ``datasets`` (or from the task's own source). A row's fields depend on the kind of its task:

    classification   a ``label`` and one or two texts         summarization   a document and its summary
    tagging          ``tokens`` and ``ner_tags``, strings     reasoning       ``instruction``, ``output``, ``answer``
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.paper.sources import MATH, Rows, Split, docstrings, math_sets
from examples.rows import read_splits


@dataclass(frozen=True)
class Task:
    """A data set and its metric.

    Args:
        metric: a key of ``METRICS``.
        hub: repository, configuration and revision of the data set on the hub.
        kind: classification, tagging, summarization or reasoning.
        train, judged: names of the splits; each that is judged on is scored apart.
        epochs, max_length: the paper's; of summaries, the length of the document.
        target_length: tokens to generate at most; ``None`` where nothing is generated.
        columns: names of the document and the summary.
        source: of rows that are not on the hub.
    """

    name: str
    metric: str
    epochs: int
    hub: tuple[str, str | None, str | None] | None = None
    kind: str = "classification"
    train: str = "train"
    judged: tuple[str, ...] = ("validation",)
    max_length: int = 256
    target_length: int | None = None
    columns: tuple[str, str] = ("document", "summary")
    source: Callable[[], Split] | None = None

    @property
    def exact(self) -> bool:
        """Whether a prediction is right or wrong."""
        return self.metric in ("accuracy", "matthews")

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
        Task("mnli", "accuracy", 3, (GLUE, "mnli", None), judged=("validation_matched", "validation_mismatched")),
        Task("conll2003", "entity f1", 20, ("eriktks/conll2003", None, PARQUET), "tagging", max_length=384),
        Task("wnut17", "entity f1", 20, ("leondz/wnut_17", None, PARQUET), "tagging", max_length=384),
        Task("cnn_dailymail", "rouge", 3, ("abisee/cnn_dailymail", "3.0.0", None), "summarization",
             max_length=512, target_length=128, columns=("article", "highlights")),
        Task("xsum", "rouge", 3, ("EdinburghNLP/xsum", None, PARQUET), "summarization",
             max_length=512, target_length=128),
        Task("docstrings", "rouge", 3, None, "summarization", max_length=512, target_length=128, source=docstrings),
        Task("math", "accuracy", 3, None, "reasoning", "train_gsm8k", tuple(MATH), target_length=256,
             source=math_sets),
    )
}  # fmt: skip


def load_rows(task: Task, with_test: bool = False) -> Split:
    """The rows to train and to judge on; raises SystemExit where they cannot be had.

    ``with_test`` adds the rows of a local ``test`` split, where there is one, to the single set to judge on.
    """
    folder = os.environ.get("SPARSIFY_DATA")
    if folder and (Path(folder) / task.name).is_dir():
        return _from_folder(task, Path(folder) / task.name, with_test)
    if with_test:
        raise SystemExit(
            f"--with-test: `{task.name}` is not in SPARSIFY_DATA={folder!r}, and the hub has no test labels."
        )
    if task.source:
        return task.source()
    try:
        import datasets
    except ImportError:
        raise SystemExit(
            f"the task `{task.name}` is not in SPARSIFY_DATA={folder!r}, and the hub's needs `datasets`: "
            "pip install 'sparsify-ft[paper]'."
        ) from None
    path, name, revision = task.hub
    found = datasets.load_dataset(path, name, revision=revision)
    return _named_tags(found["train"]), _sets(task.judged, [_named_tags(found[split]) for split in task.judged])


def _from_folder(task: Task, folder: Path, with_test: bool) -> Split:
    """Of several splits to judge on, those that are there."""
    judged = [split for split in task.judged if list(folder.glob(f"{split}.jsonl*"))] or task.judged
    train, *rows = read_splits(folder, (task.train, *judged))
    if with_test and len(rows) == 1 and list(folder.glob("test.jsonl*")):
        rows = [rows[0] + read_splits(folder, ("test",))[0]]
    return train, _sets(judged, rows)


def _sets(names: Sequence[str], rows: list[Rows]) -> dict[str, Rows]:
    """Rows by the name of their set; a single set needs none."""
    short = [name.removeprefix("validation_") for name in names] if len(names) > 1 else [""]
    return dict(zip(short, rows, strict=True))


def _named_tags(split: Any) -> Rows:
    """A split's rows; tags by their names, as in local files."""
    rows = list(split)
    if "ner_tags" in split.features:
        names = split.features["ner_tags"].feature.names
        rows = [{**row, "ner_tags": [names[tag] for tag in row["ner_tags"]]} for row in rows]
    return rows


def choose_rows(
    train: Rows, judged: dict[str, Rows], rows: int | None, held_out: int | None, limit: int | None = None
) -> Split:
    """The rows to train and to judge on; training rows are shuffled first, the same for every run.

    With ``held_out`` the rows to judge on are training rows that none of these runs trains on; with ``limit`` so many
    of each set.
    """
    shuffled = random.Random(0).sample(train, len(train))
    if held_out is not None:
        if held_out >= len(shuffled):
            raise SystemExit(f"--held-out {held_out}, and there are {len(shuffled)} training rows; give fewer.")
        shuffled, judged = shuffled[: len(shuffled) - held_out], {"": shuffled[len(shuffled) - held_out :]}
    if limit is not None:
        judged = {name: random.Random(0).sample(own, min(limit, len(own))) for name, own in judged.items()}
    return shuffled[:rows], judged


def halves(number: int) -> list[list[int]]:
    """Two disjoint random halves of the rows to judge on, the same for every run."""
    shuffled = random.Random(1).sample(range(number), number)
    return [shuffled[: number // 2], shuffled[number // 2 :]]
