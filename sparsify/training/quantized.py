"""What cannot be done to quantized weights, said before anything is changed; and giving them up for ordinary ones.

In: the masked tensors of a model. Out: errors, or linear layers with the trained values in them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from sparsify.common.quantized import is_quantized
from sparsify.errors import SparsifyError
from sparsify.masked.tensor import MaskedTensor
from sparsify.strategies.strategy import Prune, Strategy
from sparsify.training.trainable import QUANTIZER


def check_possible(tensors: Sequence[MaskedTensor], strategy: Strategy) -> None:
    """Raises ``SparsifyError`` where a strategy needs of quantized weights what they cannot give."""
    packed = [tensor for tensor in tensors if tensor.packed]
    pruned = isinstance(strategy.selection, Prune)
    if packed and (pruned or strategy.calibrates):
        what = (
            "cannot be pruned: zeros cannot be written into it" if pruned else "has no dense gradient to calibrate by"
        )
        raise SparsifyError(
            f"`{packed[0].name}` is quantized ({packed[0].scheme}) and {what}; take another strategy, such as id3 or "
            "pafi, or leave quantized layers out with exclude_modules."
        )


def check_unchanged(tensors: Sequence[MaskedTensor]) -> None:
    """Raises ``SparsifyError`` where quantized weights have trained entries, which would be lost with their delta."""
    changed = [tensor for tensor in tensors if tensor.packed and bool(tensor.delta.any())]
    if changed:
        raise SparsifyError(
            f"`{changed[0].name}` and {len(changed) - 1} more of the trained weights are quantized "
            f"({changed[0].scheme}), and values cannot be written into a packed weight. Keep them with "
            "SparseDelta.from_model(model), then call desparsify(model, dequantize=True), which makes ordinary linear "
            "layers of them; or load the base afresh."
        )


def give_up_packed(model: nn.Module, weights: Sequence[tuple[MaskedTensor, Tensor]]) -> None:
    """Turns quantized layers, in place, into ``nn.Linear`` in the dtype of the model's ordinary parameters.

    Args:
        model: plain again.
        weights: the quantized tensors, each with the weight (out, in) that takes its place.
    """
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point() and not is_quantized(p)]
    for tensor, weight in weights:
        weight, packed = weight.to(dtypes[0] if dtypes else weight.dtype), tensor.parameter
        for module in model.modules():
            if module._parameters.get(tensor.attribute) is packed:
                _make_dense(module, weight)
    quantizer = getattr(model, QUANTIZER, None)
    if weights and quantizer is not None and not any(is_quantized(parameter) for parameter in model.parameters()):
        quantizer.remove_quantization_config(model)  # transformers' own, as after its dequantize()


def _make_dense(module: nn.Module, weight: Tensor) -> None:
    module.__class__ = nn.Linear
    module._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    for state in ("quant_state", "state"):  # bitsandbytes keeps scales there
        module.__dict__.pop(state, None)
