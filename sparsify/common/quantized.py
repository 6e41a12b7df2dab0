"""Reading quantized weights: bitsandbytes' 4-bit and 8-bit layers, torchao's tensors, by their types' names."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

TRANSPOSED = "(transposed)"  # ends a quantization whose weight is the transpose of the one that was quantized
_4BIT, _8BIT = "Params4bit", "Int8Params"  # bitsandbytes' types; any other quantized weight is torchao's
_TORCHAO_DYNAMIC = ("act_quant_kwargs", "input_quant_func")  # of its tensors' second and first version


class QuantizedWeight(NamedTuple):
    """A quantized weight as the floating point tensor that it represents."""

    scheme: str  # the quantization, such as "bitsandbytes nf4"
    shape: torch.Size
    dtype: torch.dtype
    dequantize: Callable[[], Tensor]  # returns the values (shape), in new memory


def is_quantized(parameter: Tensor | None) -> bool:
    """Whether a parameter is a quantized weight of a supported library."""
    kind = type(parameter)
    package = kind.__module__.partition(".")[0]
    return package == "torchao" or (package == "bitsandbytes" and kind.__name__ in (_4BIT, _8BIT))


def quantized_weight(module: nn.Module, attribute: str = "weight") -> QuantizedWeight:
    """Returns a module's quantized weight, for which :func:`unreadable` is ``None``."""
    weight: Any = module._parameters[attribute]
    kind = type(weight).__name__
    if kind not in (_4BIT, _8BIT):
        return QuantizedWeight(f"torchao {kind}", weight.shape, weight.dtype, lambda: weight.detach().dequantize())
    from bitsandbytes import functional

    # a layer that transformers made in place of its Conv1D, whose weight is transposed
    suffix = f" {TRANSPOSED}" if getattr(getattr(module, "source_cls", None), "__name__", "") == "Conv1D" else ""
    if kind == _4BIT:
        state = weight.quant_state
        scheme = f"bitsandbytes {state.quant_type}{suffix}"
        return QuantizedWeight(scheme, state.shape, state.dtype, lambda: functional.dequantize_4bit(weight.data, state))
    scheme, read = f"bitsandbytes int8{suffix}", functional.int8_vectorwise_dequant
    return QuantizedWeight(scheme, weight.shape, torch.float32, lambda: read(weight.data, _row_scales(module, weight)))


def unreadable(module: nn.Module, attribute: str = "weight", *, before: str = "sparsify()") -> str | None:
    """Returns why a module's quantized weight cannot be dequantized ``before`` a call, as the end of a sentence."""
    weight: Any = module._parameters[attribute]
    kind = type(weight).__name__
    if kind == _4BIT and weight.quant_state is None:
        return f"is not quantized yet, which happens on the way to a device; call model.to(device) before {before}"
    if kind == _4BIT and getattr(weight.quant_state, "packing_format_for_cpu", False):
        return f"was repacked by bitsandbytes for evaluation, with rounded scales; load the model again before {before}"
    if kind == _8BIT and weight.dtype != torch.int8:
        return f"is not quantized yet; load it with has_fp16_weights=False and call model.to(device) before {before}"
    if kind == _8BIT and _row_scales(module, weight) is None:
        return f"has lost its scales; load the model again before {before}"
    if any(getattr(weight, name, None) is not None for name in _TORCHAO_DYNAMIC):
        return "quantizes its input as well (torchao's dynamic activations), so that it is more than its weight"
    return None


def _row_scales(module: Any, weight: Any) -> Tensor | None:
    """An 8-bit layer's scales (out,), which bitsandbytes moves from the weight into the layer's state."""
    scales: Tensor | None = getattr(weight, "SCB", None)
    return getattr(getattr(module, "state", None), "SCB", None) if scales is None else scales
