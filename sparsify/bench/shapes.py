"""The models that are measured: published shapes, one builder a family.

In: settings. Out: a model with a task's head, in training mode, in the settings' dtype and on their device. Weights are
random, MiniLM's apart: those are all-MiniLM-L6-v2's, from the package that the ``demo`` extra installs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.bench.settings import DTYPES, Settings
from sparsify.cli.demo.classifier import default_model

CLASSES = 2  # of random tokens; real text has up to TEXT_CLASSES
TEXT_CLASSES = 3
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """A model.

    Attributes:
        build: makes it on the CPU or the GPU that is torch's default at the call.
        config: what its family's configuration is made from.
        millions: of parameters, about.
        width: hidden size times layers.
        module: the file of transformers that has its code.
        task: PEFT's word for what its head does.
        real: whether its weights are pretrained ones; the tokens are real text then.
        on_cpu: what is different in ``config`` on a CPU.
        note: what that means beside the number of layers, in words.
        depth: the words in ``config`` for the number of layers.
        budget: entries that are trained where no budget is given.
    """

    build: Callable[[dict[str, Any]], nn.Module]
    config: dict[str, Any]
    millions: int
    width: int
    module: str
    task: str
    real: bool = False
    on_cpu: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    depth: tuple[str, ...] = ("num_hidden_layers",)
    budget: int = 320_000


def build(settings: Settings) -> nn.Module:
    """The model that the settings name, ready to train; the same weights at each call."""
    shape = SHAPES[settings.shape]
    torch.manual_seed(settings.seed)
    with _made_in(settings):
        model = shape.build(_config(settings))
    if settings.checkpointing:
        checkpoint: Any = model.gradient_checkpointing_enable
        checkpoint(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.to(settings.device).train()


def note(settings: Settings) -> str:
    """What a reader has to know of the shape on this device; mostly nothing."""
    shape = SHAPES[settings.shape]
    layers, published = (config.get(shape.depth[0]) for config in (_config(settings), shape.config))
    parts = [f"{layers} of {published} layers"] if layers != published else []
    parts += [] if settings.is_cuda or not shape.note else [shape.note]
    return ", ".join(parts)


def depth_ratio(settings: Settings) -> float:
    """How many layers there are, to those of the shape."""
    published = SHAPES[settings.shape].config.get(SHAPES[settings.shape].depth[0])
    return settings.layers / published if settings.layers and published else 1.0


def _config(settings: Settings) -> dict[str, Any]:
    shape = SHAPES[settings.shape]
    config = shape.config if settings.is_cuda else {**shape.config, **shape.on_cpu}
    return {**config, **dict.fromkeys(shape.depth, settings.layers)} if settings.layers else config


def inputs_of(shape: str, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """A batch as the model takes it: tokens (b, l), and labels (b,) where it classifies."""
    if SHAPES[shape].task == "SEQ_CLS":
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    return {"input_ids": tokens, "labels": tokens}


@contextmanager
def _made_in(settings: Settings) -> Iterator[None]:
    # In the dtype at once: a float32 model that is converted afterwards would be in the peak memory.
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[settings.dtype])
    try:
        with torch.device(settings.device):
            yield
    finally:
        torch.set_default_dtype(before)


def random_bert(shape: str) -> nn.Module:
    """A BERT classifier of one of the ``BERTS`` with random weights."""
    return _bert(BERTS[shape])


def _bert(config: dict[str, Any]) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig.from_dict({**config, "num_labels": CLASSES}))


def _minilm(config: dict[str, Any]) -> nn.Module:
    from transformers import BertForSequenceClassification
    from transformers.utils import logging

    logging.set_verbosity_error()  # the head is new, and is meant to be
    logging.disable_progress_bar()
    with torch.device("cpu"):  # another device would make transformers ask for accelerate
        model: nn.Module = BertForSequenceClassification.from_pretrained(
            default_model(), num_labels=TEXT_CLASSES, dtype=torch.get_default_dtype()
        )
    for parameter in model.parameters():
        parameter.sum()  # its file is mapped: rows that a method never reads would not count in its memory
    return model


def _deberta(config: dict[str, Any]) -> nn.Module:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    return DebertaV2ForSequenceClassification(DebertaV2Config.from_dict({**config, "num_labels": CLASSES}))


def _t5(config: dict[str, Any]) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(**config))


def _llama(config: dict[str, Any]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**config, use_cache=False))


BERTS: dict[str, dict[str, Any]] = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
# microsoft/deberta-v3-base's config.json
DEBERTA_V3_BASE = {
    "vocab_size": 128_100, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512, "type_vocab_size": 0, "layer_norm_eps": 1e-7,
    "relative_attention": True, "max_relative_positions": -1, "position_buckets": 256, "norm_rel_ebd": "layer_norm",
    "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "pooler_hidden_size": 768,
    "pooler_dropout": 0, "pooler_hidden_act": "gelu", "pad_token_id": 0,
}  # fmt: skip
# google-t5/t5-small's
T5_SMALL = {
    "vocab_size": 32_128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": 6,
    "num_heads": 8, "relative_attention_num_buckets": 32, "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip
# meta-llama/Llama-3.2-1B's
LLAMA_1B = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
# meta-llama/Llama-2-7b's
LLAMA_7B = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip

# to try the command with; without dropout
TINY = {
    "vocab_size": 500, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip

SHAPES = {
    "minilm": Shape(_minilm, {}, 23, 384 * 6, "bert", "SEQ_CLS", real=True),
    "bert-base": Shape(_bert, BERTS["bert-base"], 110, 768 * 12, "bert", "SEQ_CLS"),
    "deberta-v3-base": Shape(_deberta, DEBERTA_V3_BASE, 184, 768 * 12, "deberta_v2", "SEQ_CLS"),
    "t5-small": Shape(
        _t5, T5_SMALL, 61, 512 * 12, "t5", "SEQ_2_SEQ_LM",
        depth=("num_layers", "num_decoder_layers"),
    ),
    "llama-1b": Shape(_llama, LLAMA_1B, 1236, 2048 * 16, "llama", "CAUSAL_LM"),
    "llama-7b": Shape(
        _llama, LLAMA_7B, 6738, 4096 * 32, "llama", "CAUSAL_LM",
        on_cpu={"num_hidden_layers": 1, "vocab_size": 256},
        note="on a CPU a vocabulary of 256",
    ),
    "tiny": Shape(_bert, TINY, 1, 32 * 2, "bert", "SEQ_CLS", budget=1_000),
}  # fmt: skip
