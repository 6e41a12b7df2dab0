"""The models that are measured, published shapes with random weights and the pretrained MiniLM, and their batches.

Batches are rows of real text for a pretrained model (MRPC, or the standard library's docstrings), otherwise random
tokens. Texts of one label are joined and cut into rows of equal length: no padding, and a label to learn for each row.
"""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sparsify import SparsifyError

from .settings import DTYPES, SEED, Settings

TEXT_CLASSES = 3  # of real text, at most
CLASSES = 2  # of random tokens
FIRST_TOKEN = 5  # of the random ones: those before it have a meaning to tokenizers
Texts = Sequence[tuple[str, int]]
MODEL_SUFFIX = {
    "SEQ_CLS": "ForSequenceClassification", "SEQ_2_SEQ_LM": "ForConditionalGeneration", "CAUSAL_LM": "ForCausalLM",
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model, as transformers builds it."""

    family: str  # beginning of the names of its classes
    task: str  # PEFT's name of it
    config: dict[str, Any]  # arguments of its configuration class
    real: bool = False  # whether its weights are pretrained; its tokens are real text then
    on_cpu: dict[str, Any] = field(default_factory=dict)  # what differs in config on a CPU
    depth: tuple[str, ...] = ("num_hidden_layers",)  # the names in config of the number of layers
    budget: int = 320_000  # entries by default

    def model_class(self) -> Any:
        """The class in transformers; imports its file."""
        import transformers

        return getattr(transformers, self.family + MODEL_SUFFIX[self.task])

    def make(self, config: dict[str, Any]) -> nn.Module:
        """A model with random weights, or with MiniLM's."""
        model_class = self.model_class()
        if not self.real:
            return model_class(model_class.config_class(**config))
        from transformers.utils import logging

        from sparsify.cli import demo

        logging.set_verbosity_error()  # the head is new, and is meant to be
        logging.disable_progress_bar()
        with torch.device("cpu"):  # on another device transformers needs accelerate
            dtype = torch.get_default_dtype()
            model: nn.Module = model_class.from_pretrained(demo.default_model(), num_labels=TEXT_CLASSES, dtype=dtype)
        for parameter in model.parameters():
            parameter.sum()  # the file is mapped: rows that a method never reads would not count in its memory
        return model


def build(settings: Settings) -> nn.Module:
    """The settings' model, ready to train; the same weights at each call."""
    shape = SHAPES[settings.shape]
    config = shape.config if settings.is_cuda else shape.config | shape.on_cpu
    if settings.layers:
        config = config | dict.fromkeys(shape.depth, settings.layers)
    torch.manual_seed(SEED)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[settings.dtype])  # converting a float32 model would raise the peak memory
    try:
        with torch.device(settings.device):
            model = shape.make(config)
    finally:
        torch.set_default_dtype(before)
    return model.to(settings.device).train()


# transformers' defaults are bert-base's, t5-small's and Llama 2 7B's; the others are the published config.json's
DEBERTA_V3_BASE = {
    "vocab_size": 128_100, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 0, "layer_norm_eps": 1e-7,
    "relative_attention": True, "max_relative_positions": -1, "position_buckets": 256, "norm_rel_ebd": "layer_norm",
    "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "pooler_hidden_size": 768,
    "pooler_dropout": 0, "pooler_hidden_act": "gelu", "pad_token_id": 0,
}  # fmt: skip
GEMMA_270M = {
    "vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256,
    "max_position_embeddings": 32_768, "sliding_window": 512, "use_cache": False,
}  # fmt: skip
LLAMA_1B = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
LLAMA_8B = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "use_cache": False,
}  # fmt: skip
# to try the command with; without dropout
TINY = {
    "vocab_size": 500, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip

SHAPES = {
    "minilm": Shape("Bert", "SEQ_CLS", {}, real=True),
    "bert-base": Shape("Bert", "SEQ_CLS", {"num_hidden_layers": 12}),
    "deberta-v3-base": Shape("DebertaV2", "SEQ_CLS", DEBERTA_V3_BASE),
    "t5-small": Shape(
        "T5", "SEQ_2_SEQ_LM",
        {"num_layers": 6, "num_decoder_layers": 6, "decoder_start_token_id": 0, "use_cache": False},
        depth=("num_layers", "num_decoder_layers"),
    ),
    "gemma-270m": Shape("Gemma3", "CAUSAL_LM", GEMMA_270M, budget=2_373_120),
    "llama-1b": Shape("Llama", "CAUSAL_LM", LLAMA_1B),
    "llama-7b": Shape(
        "Llama", "CAUSAL_LM",
        {"num_hidden_layers": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "use_cache": False},
        on_cpu={"num_hidden_layers": 1, "vocab_size": 256},
    ),
    "llama-8b": Shape("Llama", "CAUSAL_LM", LLAMA_8B, budget=6_700_000),
    "tiny": Shape("Bert", "SEQ_CLS", TINY, budget=1_000),
}  # fmt: skip


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
    from sparsify.cli import demo

    return "docstrings", [(example.text, example.label) for part in demo.load_examples() for example in part]


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
