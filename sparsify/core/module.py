"""The base of all masked modules: their masked parameters, the uses of these in a forward, and views of them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.core.tensor import MaskedTensor, Use
from sparsify.errors import SparsifyError

NOTHING = nullcontext()  # a context
PLAIN = "_plain_class"  # attribute of a module: the class that it had before it got a masked one
TENSORS = "_masked_tensors"  # attribute of a module: its masked parameters by attribute name
SWAPPED = "torch.__future__.set_swap_module_params_on_conversion(True): set it to False, or convert before sparsify()."


def masked_tensors(module: nn.Module) -> dict[str, MaskedTensor]:
    """Returns a module's masked tensors by the parameter's attribute name; none for a plain module."""
    return module.__dict__.get(TENSORS, {})


def count_use(module: nn.Module) -> tuple[dict[str, Any], Use | None]:
    """Counts a use of a module's masked parameters; returns all its parameters, and the use if there is one.

    The masked ones are detached, since PEFT, for one, sets ``requires_grad`` again, but for shared taps, and for
    tensors that ``functional_call()`` has put in their places: these are not in the use.
    """
    found: Any = dict(module._parameters.items())
    used, tensors = [], module.__dict__[TENSORS]
    with torch._C.DisableTorchFunctionSubclass():  # which takes longer than the use
        for attribute, tensor in tensors.items():
            if found.get(attribute) is tensor.parameter:
                shared = tensor.collector.shared_tap(tensor)
                found[attribute] = tensor.parameter.detach() if shared is None else shared
                used += [tensor] if shared is None else []
    return found, tensor.collector.use(used) if used else None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disables autocast; where it is off, without the time that entering its context takes."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else NOTHING


class MaskedModule(nn.Module):
    """A module that shows which entries of its ``weight`` are trained."""

    weight: Any
    _masked_tensors: dict[str, MaskedTensor]  # TENSORS

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        if torch.__future__.get_swap_module_params_on_conversion():
            raise SparsifyError(SWAPPED)
        return super()._apply(*args, **kwargs)

    @property
    def indices(self) -> Tensor:
        """(k,) int64: flat, row-major positions of the unmasked entries of ``weight``, ascending."""
        return self._of_weight("indices", torch.int64)

    @property
    def base_values(self) -> Tensor:
        """(k,) the pretrained values of the unmasked entries, in the weight's dtype."""
        return self._of_weight("base", self.weight.dtype)

    @property
    def delta(self) -> Tensor:
        """(k,) float32: trained minus pretrained value of the unmasked entries."""
        return self._of_weight("delta", torch.float32)

    @property
    def density(self) -> float:
        """Share of the weight's entries that are unmasked."""
        return self.indices.numel() / max(1, self.weight.numel())

    def _of_weight(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = masked_tensors(self).get("weight")
        return torch.empty(0, dtype=dtype, device=self.weight.device) if tensor is None else getattr(tensor, name)
