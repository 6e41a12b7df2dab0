"""Tasks whose answer is generated: summaries by an encoder-decoder model, solutions by a causal language model.

Decoding is greedy. The loss is on the tokens of the answer alone.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from examples.paper.answers import is_right
from examples.paper.models import IGNORED, Encoder

PREFIX = "summarize: "  # T5 was pretrained with it
PROMPT = "### Question:\n{}\n\n### Answer:\n"


class Generator(Encoder):
    """What both have in common."""

    auto_class: Any = None

    def load_model(self) -> tuple[nn.Module, list[str]]:
        return self.from_pretrained(self.auto_class)

    def generate(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """The most likely next token, time and again, up to the end of the answer or the target length."""
        return model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=self.settings.target_length,
            do_sample=False,
            num_beams=1,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def decode(self, tokens: Tensor) -> list[str]:
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=True)


class Summarizer(Generator):
    """A document's summary."""

    task_type = "SEQ_2_SEQ_LM"
    auto_class = AutoModelForSeq2SeqLM

    def encode(self, row: dict) -> dict[str, Any]:
        document, summary = (row[column] for column in self.task.columns)
        source = self.tokenizer(PREFIX + document, truncation=True, max_length=self.settings.max_length)
        target = self.tokenizer(text_target=summary, truncation=True, max_length=self.settings.target_length)
        return {"input_ids": source["input_ids"], "labels": target["input_ids"]}

    def predict(self, model: Any, batch: dict[str, Tensor]) -> tuple[list[Any], float]:
        return self.decode(self.generate(model, batch)), float(model(**batch).loss)

    def truth(self, row: dict, prediction: Any) -> tuple[Any, Any]:
        return row[self.task.columns[1]], prediction


class Solver(Generator):
    """A question's worked solution, which is judged by the answer that it ends with."""

    task_type = "CAUSAL_LM"
    auto_class = AutoModelForCausalLM

    def encode(self, row: dict) -> dict[str, Any]:
        """Question and solution; where they are too long, the question loses its beginning."""
        question = self._question(row)
        solution = self.tokenizer(row["output"].strip(), add_special_tokens=False)["input_ids"]
        solution = [*solution, self.tokenizer.eos_token_id]
        tokens, labels = question + solution, [IGNORED] * len(question) + solution
        return {"input_ids": tokens[-self.settings.max_length :], "labels": labels[-self.settings.max_length :]}

    def encode_judged(self, row: dict) -> dict[str, Any]:
        """The question alone: the sets' solutions are written by models, and often wrong."""
        return {"input_ids": self._question(row)[-self.settings.max_length :]}

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Questions to be answered are padded at their beginning."""
        return super().collate(rows) if "labels" in rows[0] else self.pad(rows, side="left")

    def predict(self, model: Any, batch: dict[str, Tensor]) -> tuple[list[Any], float]:
        return self.decode(self.generate(model, batch)[:, batch["input_ids"].shape[1] :]), math.nan

    def truth(self, row: dict, prediction: Any) -> tuple[Any, Any]:
        return True, is_right(row["answer"], prediction)

    def _question(self, row: dict) -> list[int]:
        return self.tokenizer(PROMPT.format(row["instruction"].strip()))["input_ids"]
