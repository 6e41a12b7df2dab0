"""What the models read: rows of real text, or random tokens.

Real text is Python's own docstrings, as in the demo, or MRPC where a folder has it. Texts of one label are strung
together and cut into rows of equal length, so that there is no padding, and each row still has a label to learn.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.bench import cache
from sparsify.bench.settings import Settings
from sparsify.bench.shapes import CLASSES, SHAPES, inputs_of
from sparsify.errors import SparsifyError

FIRST_TOKEN = 5  # of the random ones: those before it are a tokenizer's own

Texts = Sequence[tuple[str, int]]


class Batches:
    """Batch after batch, the same at each run.

    Args:
        settings: what is measured.
        model: as built; its vocabulary is what random tokens are drawn from.
        seed: of the order, or of the tokens.
    """

    def __init__(self, settings: Settings, model: nn.Module, seed: int) -> None:
        self.settings = settings
        self._vocabulary: int = model.config.vocab_size  # type: ignore[union-attr,assignment]
        self._generator = torch.Generator().manual_seed(seed)
        self._rows = cache.load(Path(settings.tokens)) if settings.tokens else None

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
    """What the texts are, in a word, and each with its label.

    Args:
        data: a folder with ``mrpc/train.jsonl`` or ``mrpc/train.jsonl.gz``; ``None``: docstrings.

    Raises:
        SparsifyError: when the folder does not have it.
    """
    if data is None:
        from sparsify.cli.demo.docstrings import load_examples

        return "docstrings", [(example.text, example.label) for part in load_examples() for example in part]
    for name in ("train.jsonl", "train.jsonl.gz"):
        path = data / "mrpc" / name
        if path.is_file():
            with (
                gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file
            ):
                rows = [json.loads(line) for line in file]
            return "mrpc", [(f"{row['sentence1']} {row['sentence2']}", row["label"]) for row in rows]
    raise SparsifyError(
        f"`{data}` has no mrpc/train.jsonl, plain or as .gz; give --data a folder that has it, or leave it out to take "
        "docstrings."
    )


def has_mrpc(data: Path) -> bool:
    """Whether a folder has what :func:`find_texts` looks for there."""
    return any((data / "mrpc" / name).is_file() for name in ("train.jsonl", "train.jsonl.gz"))


def make_rows(texts: Texts, tokenizer: Any, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Rows ``tokens`` (n, length), each between the tokenizer's marks, and ``labels`` (n,), in random order.

    Raises:
        SparsifyError: when there is not enough text for one row.
    """
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


def prepare_tokens(shape: str, length: int, data: Path | None) -> tuple[str, str]:
    """The file with a shape's rows of text, made where need be, and what the text is; empty for random tokens."""
    if not SHAPES[shape].real:
        return "", "random tokens"
    from transformers import AutoTokenizer

    from sparsify.cli.demo.classifier import default_model

    what, texts = find_texts(data)
    path = cache.path_of("tokens", length=length, texts=_digest(texts), model=shape)
    if cache.load(path) is None:
        cache.save(path, make_rows(texts, AutoTokenizer.from_pretrained(default_model()), length))
    return str(path), what


def _digest(texts: Texts) -> str:
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()
