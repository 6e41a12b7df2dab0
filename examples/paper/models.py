"""From a task's rows to batches, and from a model's logits to predictions; the pretrained model with its new head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, AutoTokenizer
from transformers.utils import logging

from examples.classifiers import classifier_class, model_path
from examples.paper.settings import Settings
from examples.paper.tasks import Task

IGNORED = -100  # label of tokens that are not the first of a word


@dataclass(frozen=True)
class Labels:
    """A task's labels: their number, and for tags their names."""

    number: int
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, task: Task, rows: list[dict]) -> Labels:
        if task.regression:
            return cls(1)
        if task.tags:
            names = tuple(sorted({tag for row in rows for tag in row["ner_tags"]}))
            return cls(len(names), names)
        return cls(1 + max(row["label"] for row in rows))


class Encoder:
    """Turns rows into token ids once, and these into padded batches."""

    def __init__(self, task: Task, labels: Labels, settings: Settings) -> None:
        self.task, self.labels, self.max_length = task, labels, settings.max_length
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_path(settings.model))
        if self.tokenizer.pad_token is None:  # decoders often have none
            self.tokenizer.pad_token = self.tokenizer.eos_token

    def encode(self, row: dict) -> dict[str, Any]:
        """A row's token ids and labels, unpadded."""
        options = {"truncation": True, "max_length": self.max_length}
        if not self.task.tags:
            texts = [value for value in row.values() if isinstance(value, str)]
            return {**self.tokenizer(*texts, **options), "labels": row["label"]}
        tokens = self.tokenizer(row["tokens"], is_split_into_words=True, **options)
        found, previous = [], None
        for word in tokens.word_ids():
            first = word is not None and word != previous
            found.append(self.labels.names.index(row["ner_tags"][word]) if first else IGNORED)
            previous = word
        return {**tokens, "labels": found}

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch, padded at its end to its longest row."""
        inputs = [{name: value for name, value in row.items() if name != "labels"} for row in rows]
        batch = self.tokenizer.pad(inputs, padding_side="right", return_tensors="pt")
        length = batch["input_ids"].shape[1]
        labels = [row["labels"] for row in rows]
        if self.task.tags:
            labels = [row + [IGNORED] * (length - len(row)) for row in labels]
        return {**batch, "labels": torch.tensor(labels)}

    def predict(self, logits: Tensor, labels: Tensor) -> list[Any]:
        """A batch's predictions: numbers, or for each row the tags of the words that were not cut off."""
        if self.task.regression:
            return logits.squeeze(-1).tolist()
        best = logits.argmax(-1)
        if not self.task.tags:
            return best.tolist()
        rows = zip(best.tolist(), labels.tolist(), strict=True)
        return [[self.labels.names[i] for i, label in zip(*row, strict=True) if label != IGNORED] for row in rows]

    def truth(self, row: dict, prediction: Any) -> tuple[Any, Any]:
        """A row's true label and the prediction; words that were cut off are predicted as outside of entities."""
        if not self.task.tags:
            return row["label"], prediction
        return row["ner_tags"], prediction + ["O"] * (len(row["ner_tags"]) - len(prediction))


def load_model(task: Task, labels: Labels, encoder: Encoder, settings: Settings) -> tuple[nn.Module, list[str]]:
    """The pretrained model with a new head, drawn from the run's seed, and the names of its new modules."""
    logging.set_verbosity_error()  # that the head is new is known
    logging.disable_progress_bar()
    path = model_path(settings.model)
    kind = AutoModelForTokenClassification if task.tags else classifier_class(path)
    torch.manual_seed(settings.seed)
    dtype = getattr(torch, settings.dtype)
    model, loading = kind.from_pretrained(path, num_labels=labels.number, dtype=dtype, output_loading_info=True)
    model.config.pad_token_id = encoder.tokenizer.pad_token_id
    new = {key.partition(".")[0] for key in loading["missing_keys"]} - {model.base_model_prefix}
    return model, sorted(new)
