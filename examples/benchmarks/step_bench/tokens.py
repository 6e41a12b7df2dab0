"""Batches for the models: rows of real text (MRPC, or the standard library's docstrings), or random tokens.

Texts of one label are joined and cut into rows of equal length: no padding, and a label to learn for each row.
"""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sparsify.bench.settings import SEED, Settings
from sparsify.bench.shapes import SHAPES
from sparsify.errors import SparsifyError

CLASSES = 2  # of random tokens
FIRST_TOKEN = 5  # of the random ones: those before it have a meaning to tokenizers
Texts = Sequence[tuple[str, int]]


def make_batches(settings: Settings, vocabulary: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yields the model's inputs, labels included, step after step: the same rows in each process."""
    generator = torch.Generator().manual_seed(seed)
    rows = load_file(settings.tokens_file) if settings.tokens else None
    while True:
        if rows is not None:
            chosen = torch.randint(len(rows["labels"]), (settings.batch,), generator=generator)
            tokens, labels = rows["tokens"][chosen], rows["labels"][chosen]
        else:
            tokens = torch.randint(FIRST_TOKEN, vocabulary, (settings.batch, settings.length), generator=generator)
            labels = tokens[:, 0] % CLASSES
        batch = {"input_ids": tokens, "labels": tokens}
        if SHAPES[settings.shape].task == "SEQ_CLS":
            batch |= {"attention_mask": torch.ones_like(tokens), "labels": labels}
        yield {name: tensor.to(settings.device) for name, tensor in batch.items()}


def find_texts() -> tuple[str, Texts]:
    """The kind of text, and each text with its label: MRPC from the folder ``SPARSIFY_DATA``, otherwise docstrings."""
    for path in Path(os.environ.get("SPARSIFY_DATA", ""), "mrpc").glob("train.jsonl*"):
        opener: Any = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        return "mrpc", [(f"{row['sentence1']} {row['sentence2']}", row["label"]) for row in rows]
    from sparsify.cli.demo.docstrings import load_examples

    return "docstrings", [(example.text, example.label) for part in load_examples() for example in part]


def make_rows(texts: Texts, tokenizer: Any, length: int) -> dict[str, Tensor]:
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
    random.Random(SEED).shuffle(rows)
    return {"tokens": torch.tensor([row for row, _ in rows]), "labels": torch.tensor([label for _, label in rows])}
