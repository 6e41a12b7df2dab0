"""A quantized transformers model that says of itself that it can be trained, as it can once it is sparsified.

The Trainer refuses a quantized model that is not PEFT's, unless its quantizer answers that the model can be trained as
it is (``is_qat_trainable``, ``is_trainable``). As long as a model is sparsified its quantizer is a copy that says so.
Nothing is imported: a class is derived from that of the quantizer which is there.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from torch import nn

QUANTIZER = "hf_quantizer"  # attribute of a quantized transformers model


class _SaysYes:
    """What is put before a quantizer's class."""

    is_qat_trainable = True
    is_trainable = True

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self).__mro__[2], self.__dict__)


def say_trainable(model: nn.Module) -> None:
    """From now on the Trainer takes a quantized model; any other is left alone."""
    quantizer = model.__dict__.get(QUANTIZER)
    if quantizer is not None:
        setattr(model, QUANTIZER, _rebuild(type(quantizer), copy.copy(quantizer.__dict__)))


def say_as_before(model: nn.Module) -> None:
    """Takes back what :func:`say_trainable` did."""
    quantizer = model.__dict__.get(QUANTIZER)
    if isinstance(quantizer, _SaysYes):
        plain: Any = object.__new__(type(quantizer).__mro__[2])
        plain.__dict__.update(quantizer.__dict__)
        setattr(model, QUANTIZER, plain)


def _rebuild(plain_class: type, state: dict[str, Any]) -> Any:
    quantizer: Any = object.__new__(_trainable_class(plain_class))
    quantizer.__dict__.update(state)
    return quantizer


@functools.cache
def _trainable_class(plain_class: type) -> type:
    return type(f"Sparsified{plain_class.__name__}", (_SaysYes, plain_class), {"__module__": __name__})
