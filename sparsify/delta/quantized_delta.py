"""A delta over a quantized weight, of which no single value can be written: it adds to the layer's output.

    y = layer(x) + x D^T        D (out, in), sparse: trained minus dequantized values

The written entries are in buffers of the layer that are not in its state dict: transformers refuses to save the model.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sparsify.common.quantized import quantized_weight, unreadable
from sparsify.common.raw_bits import as_bits
from sparsify.core.devices import put
from sparsify.errors import BaseMismatchError, SparsifyError

# (k,) each: flat positions, the dequantized values there, and the trained ones
BUFFERS = ("quantized_delta_indices", "quantized_delta_base", "quantized_delta_values")
_HANDLE = "_sparsify_quantized_delta"  # attribute of a layer with a delta: the handle of its hook
QUANTIZER = "hf_quantizer"  # attribute of a quantized transformers model
PACKED_FOLDER = "base"  # next to a delta of quantized weights, where ``save_pretrained`` wrote both
LOSING = ("get_state_dict_and_metadata", "dequantize")  # a quantizer's methods that would lose a delta


class QuantizedDelta:
    """A module's quantized weight and the entries written over it, with the tensor methods that patch plans use."""

    def __init__(self, name: str, module: nn.Module) -> None:
        is_written = has_quantized_delta(module)
        objection = None if is_written else unreadable(module, before="the delta is applied")
        if objection is not None or not isinstance(module, nn.Linear):
            problem = f"`{name}` is quantized, and its layer {objection or f'({type(module).__name__}) is not linear'}"
            raise BaseMismatchError(f"{problem}: apply it to a base that is dequantized, or was never quantized.")
        weight = quantized_weight(module)
        self._module, self._dequantize = module, weight.dequantize
        self.shape, self.scheme, self.device = weight.shape, weight.scheme, module.weight.device
        self.dtype: torch.dtype = getattr(module, BUFFERS[2]).dtype if is_written else weight.dtype

    def take(self, indices: Tensor) -> Tensor:
        """The effective values (n,) at flat indices (n,)."""
        known, _, values = self._entries()
        if bool(torch.isin(indices, known).all()):
            return values[torch.searchsorted(known, indices)]
        return put(self._dequantize(), known, values.to(self.dtype)).take(indices)

    def put(self, indices: Tensor, values: Tensor) -> None:
        """Writes values (n,) at flat indices (n,); entries that then equal the base's are dropped."""
        module = self._module
        with torch.inference_mode(False), torch.no_grad():  # the buffers have to be usable in training, too
            known, base, old = self._entries()
            new = indices[torch.isin(indices, known, invert=True)]
            union, order = torch.cat([known, new]).sort()
            base = torch.cat([base, self.take(new) if new.numel() else base[:0]])[order]
            effective = torch.cat([old, base.new_empty(new.numel())])[order]
            effective[torch.searchsorted(union, indices)] = values.to(effective)
            kept = as_bits(effective) != as_bits(base)
            if bool(kept.any()):
                for name, part in zip(BUFFERS, (union, base, effective), strict=True):
                    module.register_buffer(name, part[kept], persistent=False)
                if _HANDLE not in module.__dict__:
                    module.__dict__[_HANDLE] = module.register_forward_hook(_add_delta, with_kwargs=True)
            elif has_quantized_delta(module):
                module.__dict__.pop(_HANDLE).remove()
                for name in BUFFERS:
                    delattr(module, name)

    def _entries(self) -> tuple[Tensor, Tensor, Tensor]:
        if has_quantized_delta(self._module):
            indices, base, values = (getattr(self._module, name) for name in BUFFERS)
            return indices, base, values
        none = torch.empty(0, dtype=self.dtype, device=self.device)
        return none.long(), none, none


def has_quantized_delta(module: nn.Module) -> bool:
    return BUFFERS[0] in module._buffers


def guard(model: nn.Module) -> None:
    """Has transformers refuse to save or dequantize models with deltas on quantized weights, and others no more."""
    for module in model.modules():
        if (quantizer := vars(module).get(QUANTIZER)) is not None:
            has_delta = any(map(has_quantized_delta, module.modules()))
            for method in LOSING:
                vars(quantizer).pop(method, None)
                vars(quantizer).update({method: refuse_to_lose} if has_delta else {})


def refuse_to_lose(*_: Any, **__: Any) -> None:
    raise SparsifyError(
        "saving this part of the model, or dequantizing it, would drop what was trained over quantized weights, which "
        "cannot hold it. Keep the delta for load_model(base, delta), SparseDelta.from_model(model) in training. For "
        "ordinary layers: desparsify(model, dequantize=True); or revert the delta, dequantize, and apply it again."
    )


def _add_delta(module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    indices, base, values = (getattr(module, name) for name in BUFFERS)
    shape = module.out_features, module.in_features  # of a weight that was pickled bitsandbytes does not know its own
    places = torch.stack([indices.div(shape[1], rounding_mode="floor"), indices % shape[1]])
    difference = values.float() - base.float()
    change = torch.sparse_coo_tensor(places, difference, shape, is_coalesced=True, check_invariants=False)
    with torch.autocast(x.device.type, enabled=False):
        added = torch.sparse.mm(change, x.reshape(-1, shape[1]).float().t()).t()
    return output + added.reshape(output.shape).to(output.dtype)
