"""The masked forms of bitsandbytes' linear layers, imported only where a model has one."""

from typing import Any

from bitsandbytes.nn import Linear4bit, Linear8bitLt, LinearFP4, LinearNF4
from torch import Tensor

from sparsify.common.raw_bits import same_values
from sparsify.masked.quantized import MaskedQuantizedLinear


class MaskedLinear8bitLt(MaskedQuantizedLinear, Linear8bitLt):
    """A ``Linear8bitLt`` that is trained at its unmasked entries."""


class MaskedLinear4bit(MaskedQuantizedLinear, Linear4bit):
    """A ``Linear4bit`` (NF4, FP4) that is trained at its unmasked entries."""

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Compares the weight's scales, which bitsandbytes saves but does not load."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        _, _, _, unexpected_keys, error_msgs = args
        for name, own in self.weight.quant_state.as_dict(packed=True).items():
            key = f"{prefix}weight.{name}"
            if key in unexpected_keys:
                unexpected_keys.remove(key)
            if key in state_dict and not same_values(state_dict[key].to(own.device), own):
                remedy = "start from the base that the state dict was saved with, quantized in the same way."
                problem = f"`{key}` differs from this model's, and scales of a quantized base are not loaded"
                error_msgs.append(f"{problem}: {remedy}")


MASKED = {Linear8bitLt: MaskedLinear8bitLt, **dict.fromkeys((Linear4bit, LinearNF4, LinearFP4), MaskedLinear4bit)}
