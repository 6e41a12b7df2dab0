"""Models with quantized weights: what cannot be done to them, their Trainer, and giving them up for ordinary ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from sparsify.common.quantized import is_quantized
from sparsify.errors import SparsifyError
from sparsify.masked.tensor import ModelTensor
from sparsify.strategies.strategy import Prune, Strategy

QUANTIZER = "hf_quantizer"  # attribute of a quantized transformers model


def check_possible(tensors: Sequence[ModelTensor], strategy: Strategy) -> None:
    """Raises ``SparsifyError`` where a strategy needs of quantized weights what they cannot give."""
    quantized = [tensor for tensor in tensors if tensor.is_quantized]
    pruned = isinstance(strategy.selection, Prune)
    if quantized and (pruned or strategy.calibrates):
        what = (
            "cannot be pruned: zeros cannot be written into it" if pruned else "has no dense gradient to calibrate by"
        )
        raise SparsifyError(
            f"`{quantized[0].name}` is quantized ({quantized[0].scheme}) and {what}; take another strategy, such as "
            "id3 or pafi, or leave quantized layers out with exclude_modules."
        )


def check_unchanged(tensors: Sequence[ModelTensor]) -> None:
    """Raises ``SparsifyError`` where quantized weights have trained entries, which would be lost with their delta."""
    changed = [tensor for tensor in tensors if tensor.is_quantized and bool(tensor.delta.any())]
    if changed:
        raise SparsifyError(
            f"`{changed[0].name}` and {len(changed) - 1} more of the trained weights are quantized "
            f"({changed[0].scheme}), and values cannot be written into a packed weight. Keep them with "
            "SparseDelta.from_model(model), then call desparsify(model, dequantize=True), which makes ordinary linear "
            "layers of them; or load the base afresh."
        )


def give_up_packed(model: nn.Module, weights: Sequence[tuple[ModelTensor, Tensor]]) -> None:
    """Turns quantized tensors' layers of a plain model, in place, into ``nn.Linear`` with the weights (out, in) given.

    Their dtype is that of the model's ordinary parameters.
    """
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point() and not is_quantized(p)]
    for tensor, weight in weights:
        weight, packed = weight.to(dtypes[0] if dtypes else weight.dtype), tensor.parameter
        for module in [each for each in model.modules() if each._parameters.get(tensor.attribute) is packed]:
            module.__class__ = nn.Linear
            module._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
            for state in ("quant_state", "state"):  # bitsandbytes keeps scales there
                module.__dict__.pop(state, None)
    quantizer = getattr(model, QUANTIZER, None)
    if weights and quantizer is not None and not any(is_quantized(parameter) for parameter in model.parameters()):
        quantizer.remove_quantization_config(model)  # transformers' own, as after its dequantize()


# The Trainer refuses a quantized model that is not PEFT's, unless its quantizer says that the model can be trained as
# it is. While a model is sparsified its quantizer is of a class that is derived from its own and says so.


def mark_trainable(model: nn.Module) -> None:
    """Makes the Trainer accept a quantized model; any other is left alone."""
    quantizer: Any = vars(model).get(QUANTIZER)
    if quantizer is not None:
        plain_class: Any = type(quantizer)
        quantizer.__class__ = _trainable_class(plain_class)


def unmark_trainable(model: nn.Module) -> None:
    """Undoes :func:`mark_trainable`."""
    quantizer = vars(model).get(QUANTIZER)
    if type(quantizer).__module__ == __name__:
        quantizer.__class__ = type(quantizer).__base__


@functools.cache
def _trainable_class(plain_class: type) -> type:
    own = {"__module__": __name__, "__reduce__": _reduce, "is_qat_trainable": True, "is_trainable": True}
    return type(f"Sparsified{plain_class.__name__}", (plain_class,), own)


def _reduce(quantizer: Any) -> tuple[Any, ...]:
    return _rebuild, (type(quantizer).__base__, quantizer.__dict__)


def _rebuild(plain_class: type, state: dict[str, Any]) -> Any:
    quantizer: Any = object.__new__(_trainable_class(plain_class))
    quantizer.__dict__.update(state)
    return quantizer
