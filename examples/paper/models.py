"""From a task's rows to batches, and from a model's outputs to predictions; the pretrained model with its new head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, AutoTokenizer
from transformers.utils import logging

from examples.classifiers import classifier_class, model_path
from examples.paper.settings import Settings
from examples.paper.tasks import Task

IGNORED = -100  # label of tokens that have none


class Encoder:
    """Turns rows into token ids once, these into padded batches, and a model's outputs into predictions.

    There is one for each kind of task.

    Args:
        rows: all rows of the task, from which labels are read.
    """

    task_type = ""  # PEFT's

    def __init__(self, task: Task, rows: list[dict], settings: Settings) -> None:
        self.task, self.settings, self.path = task, settings, model_path(settings.model)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.path)
        if self.tokenizer.pad_token is None:  # decoders often have none
            self.tokenizer.pad_token = self.tokenizer.eos_token

    def load_model(self) -> tuple[nn.Module, list[str]]:
        """The pretrained model and the names of its new modules."""
        raise NotImplementedError

    def encode(self, row: dict) -> dict[str, Any]:
        """A row to train on as token ids and labels, unpadded."""
        raise NotImplementedError

    def encode_judged(self, row: dict) -> dict[str, Any]:
        """A row to judge on."""
        return self.encode(row)

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch, padded at its end to its longest row."""
        return {**self.pad(rows), "labels": padded_labels(rows)}

    def predict(self, model: Any, batch: dict[str, Tensor]) -> tuple[list[Any], float]:
        """A prediction for each row of a batch, and the mean loss."""
        raise NotImplementedError

    def truth(self, row: dict, prediction: Any) -> tuple[Any, Any]:
        """What the metric compares: a row's true label and the prediction."""
        return row["label"], prediction

    def pad(self, rows: list[dict[str, Any]], side: str = "right") -> dict[str, Tensor]:
        """The inputs of a batch."""
        inputs = [{name: value for name, value in row.items() if name != "labels"} for row in rows]
        return dict(self.tokenizer.pad(inputs, padding_side=side, return_tensors="pt"))

    def from_pretrained(self, kind: Any, **options: Any) -> tuple[nn.Module, list[str]]:
        """A model whose new modules are drawn from the run's seed, and their names."""
        logging.set_verbosity_error()  # that the head is new is known
        logging.disable_progress_bar()
        torch.manual_seed(self.settings.seed)
        dtype = getattr(torch, self.settings.dtype)
        model, loading = kind.from_pretrained(self.path, dtype=dtype, output_loading_info=True, **options)
        model.config.pad_token_id = self.tokenizer.pad_token_id
        new = {key.partition(".")[0] for key in loading["missing_keys"]} - {model.base_model_prefix}
        return model, sorted(new)


class Classifier(Encoder):
    """One label, or one real number, for one or two texts."""

    task_type = "SEQ_CLS"

    def __init__(self, task: Task, rows: list[dict], settings: Settings) -> None:
        super().__init__(task, rows, settings)
        self.outputs = 1 if task.regression else 1 + max(row["label"] for row in rows)

    def load_model(self) -> tuple[nn.Module, list[str]]:
        return self.from_pretrained(classifier_class(self.path), num_labels=self.outputs)

    def encode(self, row: dict) -> dict[str, Any]:
        texts = [value for value in row.values() if isinstance(value, str)]
        return {
            **self.tokenizer(*texts, truncation=True, max_length=self.settings.max_length),
            "labels": row["label"],
        }

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {**self.pad(rows), "labels": torch.tensor([row["labels"] for row in rows])}

    def predict(self, model: Any, batch: dict[str, Tensor]) -> tuple[list[Any], float]:
        output = model(**batch)
        logits = output.logits.float()
        found = logits.squeeze(-1) if self.task.regression else logits.argmax(-1)
        return found.tolist(), float(output.loss)


class Tagger(Encoder):
    """A tag for every word: the label of the word's first token."""

    task_type = "TOKEN_CLS"

    def __init__(self, task: Task, rows: list[dict], settings: Settings) -> None:
        super().__init__(task, rows, settings)
        self.names = sorted({tag for row in rows for tag in row["ner_tags"]})

    def load_model(self) -> tuple[nn.Module, list[str]]:
        return self.from_pretrained(AutoModelForTokenClassification, num_labels=len(self.names))

    def encode(self, row: dict) -> dict[str, Any]:
        options = {"truncation": True, "max_length": self.settings.max_length}
        tokens = self.tokenizer(row["tokens"], is_split_into_words=True, **options)
        found, previous = [], None
        for word in tokens.word_ids():
            first = word is not None and word != previous
            found.append(self.names.index(row["ner_tags"][word]) if first else IGNORED)
            previous = word
        return {**tokens, "labels": found}

    def predict(self, model: Any, batch: dict[str, Tensor]) -> tuple[list[Any], float]:
        """The tags of the words that were not cut off."""
        output = model(**batch)
        rows = zip(output.logits.float().argmax(-1).tolist(), batch["labels"].tolist(), strict=True)
        tags = [[self.names[i] for i, label in zip(*row, strict=True) if label != IGNORED] for row in rows]
        return tags, float(output.loss)

    def truth(self, row: dict, prediction: Any) -> tuple[Any, Any]:
        """Words that were cut off are predicted as outside of entities."""
        return row["ner_tags"], prediction + ["O"] * (len(row["ner_tags"]) - len(prediction))


def padded_labels(rows: list[dict[str, Any]]) -> Tensor:
    """The labels of a batch's tokens, padded at their end."""
    length = max(len(row["labels"]) for row in rows)
    return torch.tensor([row["labels"] + [IGNORED] * (length - len(row["labels"])) for row in rows])
