"""Bottleneck adapters for transformers, with the names, numbers and outputs of AdapterHub's ``adapters``.

    model --add_adapters--> the same model, with only adapters and heads trainable      insert.py
    model with adapters --save_adapters--> folder --load_adapters--> a new base         files.py

Their projections are ``nn.Linear`` modules, which ``sparsify(model, ...)`` masks like any other.
"""

from sparsify.adapters.files import load_adapters, save_adapters
from sparsify.adapters.insert import Adapter, AdapterConfig, add_adapters, remove_adapters

__all__ = ["Adapter", "AdapterConfig", "add_adapters", "load_adapters", "remove_adapters", "save_adapters"]
