"""Sparse fine-tuning as a method of PEFT: where a trainer takes a ``LoraConfig``, it takes a :class:`SparseConfig`.

    get_peft_model(model, SparseConfig(budget=0.002))    sparsifies the model in place, and wraps it as PEFT does

``import sparsify`` imports this as soon as PEFT is imported, so that PEFT and transformers load sparse adapters.
"""

import peft

from sparsify.delta.peft_files import DELTAS, PEFT_TYPE
from sparsify.peft import coax  # noqa: F401  # first: it makes the type
from sparsify.peft.config import SparseConfig
from sparsify.peft.tuner import SparseModel

__all__ = ["SparseConfig"]

if PEFT_TYPE not in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING:
    peft.utils.register_peft_method(name="sparsify", config_cls=SparseConfig, model_cls=SparseModel, prefix=DELTAS)
