"""Fine-tune a pretrained model at a few of its numbers, chosen while it trains; save what was learned as a tiny file.

model = sparsify(model, budget=320_000, strategy="id3", steps=1_000)
...                                                    # any training loop
SparseDelta.from_model(model).save("my-delta")
SparseDelta.load("my-delta").apply(base)               # or, in one call: load_model("user/base", "user/delta")
"""

import importlib
from typing import Any

from sparsify.api import (
    base_weights,
    desparsify,
    extend,
    get_engine,
    optimizer_stepped,
    print_trainable_parameters,
    sparsify,
    summary,
    trained_state,
)
from sparsify.common.extras import import_after
from sparsify.core.importance import D3
from sparsify.core.layers import MaskedEmbedding, MaskedLinear
from sparsify.core.schedule import Schedule
from sparsify.delta.algebra import merge_deltas
from sparsify.delta.overlap import overlap
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.delta.switch import DeltaSwitch
from sparsify.errors import BaseMismatchError, DeltaFormatError, MissingUpdateError, SparsifyError, StaleUpdateError
from sparsify.loading import load_model
from sparsify.strategies.importance import GSNR, SNIP, Bias, Fisher, Magnitude, Random, register_importance
from sparsify.strategies.strategy import Increment, Prune, Repeat, Static, Strategy
from sparsify.stream.publisher import DeltaPublisher, DeltaUpdate
from sparsify.stream.subscriber import DeltaSubscriber

__version__ = "0.1.0"
__all__ = [
    "D3", "GSNR", "SNIP", "BaseMismatchError", "Bias", "DeltaFormatError", "DeltaPublisher", "DeltaSubscriber",
    "DeltaSwitch", "DeltaUpdate", "Fisher", "Increment", "Magnitude", "MaskedEmbedding", "MaskedLinear",
    "MissingUpdateError", "Prune", "Random", "Repeat", "Schedule", "SparseDelta", "SparsifyCallback", "SparsifyError",
    "StaleUpdateError", "Static", "Strategy", "__version__", "base_weights", "desparsify", "extend", "get_engine",
    "load_model", "merge_deltas", "optimizer_stepped", "overlap", "print_trainable_parameters", "register_importance",
    "sparsify", "summary", "trained_state",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """``SparsifyCallback``, which needs transformers, is imported when it is asked for."""
    if name == "SparsifyCallback":
        return importlib.import_module("sparsify.integrations.transformers").SparsifyCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


import_after("peft", "sparsify.peft")  # so that PEFT and transformers load sparse adapters
