"""Rows of a task: read from JSON Lines, and put into batches of texts of similar length."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path


def read_jsonl(path: Path) -> list[dict]:
    """The rows of a file, which may be gzipped."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def read_splits(folder: Path, splits: Sequence[str] = ("train", "validation")) -> list[list[dict]]:
    """The rows of each split of a local task, ``<folder>/<split>.jsonl`` or ``.jsonl.gz``."""
    files = [next(iter(sorted(folder.glob(f"{split}.jsonl*"))), None) for split in splits]
    if None in files:
        raise SystemExit(f"{folder} has no {' and '.join(f'{split}.jsonl' for split in splits)} (.gz); see --data.")
    return [read_jsonl(file) for file in files]


class LengthBatches:
    """Batches of texts of similar length, for less padding, in random order: rows of one length may share a label."""

    def __init__(self, lengths: list[int], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.random = lengths, batch_size, random.Random(seed)

    def __len__(self) -> int:
        return math.ceil(len(self.lengths) / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        rows = list(range(len(self.lengths)))
        self.random.shuffle(rows)
        rows.sort(key=self.lengths.__getitem__)  # stable: rows of equal length stay shuffled
        batches = [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        self.random.shuffle(batches)
        yield from batches
