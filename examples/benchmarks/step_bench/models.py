"""The models that are measured: published shapes with random weights, and the pretrained MiniLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sparsify.bench.settings import DTYPES, SEED, Settings
from sparsify.cli.demo.classifier import default_model, quiet_transformers

TEXT_CLASSES = 3  # of real text, at most
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
        quiet_transformers()  # the head is new, and is meant to be
        with torch.device("cpu"):  # on another device transformers needs accelerate
            dtype = torch.get_default_dtype()
            model: nn.Module = model_class.from_pretrained(default_model(), num_labels=TEXT_CLASSES, dtype=dtype)
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
LLAMA_1B = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "use_cache": False,
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
    "llama-1b": Shape("Llama", "CAUSAL_LM", LLAMA_1B),
    "llama-7b": Shape(
        "Llama", "CAUSAL_LM",
        {"num_hidden_layers": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "use_cache": False},
        on_cpu={"num_hidden_layers": 1, "vocab_size": 256},
    ),
    "tiny": Shape("Bert", "SEQ_CLS", TINY, budget=1_000),
}  # fmt: skip
