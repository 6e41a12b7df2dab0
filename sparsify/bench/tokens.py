"""Batches for the models: rows of real text (MRPC, or the standard library's docstrings), or random tokens.

Texts of one label are joined and cut into rows of equal length: no padding, and a label to learn for each row.
"""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparsify.bench.settings import Settings
from sparsify.bench.shapes import CLASSES, inputs_of
from sparsify.errors import SparsifyError

DATA = "SPARSIFY_DATA"  # environment variable: a folder with mrpc/
FIRST_TOKEN = 5  # of the random ones: those before it have a meaning to tokenizers
Texts = Sequence[tuple[str, int]]


class Batches:
    """Batch after batch, the same in each run: rows of the settings' text, or tokens of the model's vocabulary."""

    def __init__(self, settings: Settings, model: nn.Module, seed: int) -> None:
        self.settings = settings
        self._vocabulary: int = model.config.vocab_size  # type: ignore[union-attr,assignment]
        self._generator = torch.Generator().manual_seed(seed)
        self._rows = load_file(settings.tokens_file) if settings.tokens else None

    def next(self) -> dict[str, Tensor]:
        """The model's inputs for one step, labels included, on its device."""
        settings = self.settings
        if self._rows is not None:
            chosen = torch.randint(len(self._rows["labels"]), (settings.batch,), generator=self._generator)
            tokens, labels = self._rows["tokens"][chosen], self._rows["labels"][chosen]
        else:
            size = (settings.batch, settings.length)
            tokens = torch.randint(FIRST_TOKEN, self._vocabulary, size, generator=self._generator)
            labels = tokens[:, 0] % CLASSES
        batch = inputs_of(settings.shape, tokens, labels)
        return {name: tensor.to(settings.device) for name, tensor in batch.items()}


def find_texts(data: Path | None) -> tuple[str, Texts]:
    """The kind of text, and each text with its label: MRPC from a folder, by default the one that ``SPARSIFY_DATA``
    names, or docstrings where that has none; an error where ``data`` is given and has no MRPC.
    """
    folder = data or (Path(os.environ[DATA]) if DATA in os.environ else None)
    paths = [folder / "mrpc" / name for name in ("train.jsonl", "train.jsonl.gz")] if folder else []
    for path in filter(Path.is_file, paths):
        opener: Any = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        return "mrpc", [(f"{row['sentence1']} {row['sentence2']}", row["label"]) for row in rows]
    if data is None:
        from sparsify.cli.demo.docstrings import load_examples

        return "docstrings", [(example.text, example.label) for part in load_examples() for example in part]
    raise SparsifyError(
        f"`{data}` has no mrpc/train.jsonl, plain or as .gz; give --data a folder that has it, or leave it out to take "
        "docstrings."
    )


def make_rows(texts: Texts, tokenizer: Any, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Rows ``tokens`` (n, length), each between the tokenizer's marks, and ``labels`` (n,), in random order."""
    start, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    inner = length - 2
    rows: list[tuple[list[int], int]] = []
    for label in sorted({label for _, label in texts}):
        own = [text for text, other in texts if other == label]
        ids = [token for ids in tokenizer(own, add_special_tokens=False)["input_ids"] for token in ids]
        rows += [([start, *ids[at : at + inner], end], label) for at in range(0, len(ids) - inner + 1, max(1, inner))]
    if not rows or inner < 1:
        raise SparsifyError(f"{length} tokens a sequence; the real text gives no row of that length: change --seq.")
    random.Random(seed).shuffle(rows)
    return {"tokens": torch.tensor([row for row, _ in rows]), "labels": torch.tensor([label for _, label in rows])}


def write_rows(settings: Settings, texts: Texts) -> None:
    """Writes the rows that the workers read."""
    from transformers import AutoTokenizer

    from sparsify.cli.demo.classifier import default_model

    save_file(make_rows(texts, AutoTokenizer.from_pretrained(default_model()), settings.length), settings.tokens_file)
