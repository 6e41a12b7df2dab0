"""The base of all masked modules: their masked parameters, the uses of these in a forward, and views of them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparsify.core.tensor import MaskedTensor, Use
from sparsify.errors import SparsifyError

TENSORS = "_masked_tensors"  # attribute of a module: its masked parameters by attribute name
SWAPPED = "torch.__future__.set_swap_module_params_on_conversion(True): set it to False, or convert before sparsify()."


def masked_tensors(module: nn.Module) -> dict[str, MaskedTensor]:
    """Returns a module's masked tensors by the parameter's attribute name; none for a plain module."""
    return module.__dict__.get(TENSORS, {})


def count_uses(module: nn.Module) -> dict[str, tuple[Any, Use | None]]:
    """Counts a use of each masked parameter in the module's forward; returns both by attribute name.

    The parameter is detached, since PEFT, for one, sets ``requires_grad`` again, but for a tensor that
    ``functional_call()`` has put in its place. The use is ``None`` where no gradient will be collected.
    """
    tensors: dict[str, MaskedTensor] = module.__dict__[TENSORS]
    parameters: Any = module._parameters  # ReadParameters
    uses = next(iter(tensors.values())).collector.uses(tensors.values())
    found = {}
    with torch._C.DisableTorchFunctionSubclass():  # which takes longer than the use
        for (attribute, tensor), use in zip(tensors.items(), uses, strict=True):
            parameter = parameters.get(attribute)
            is_own = parameter is tensor.parameter
            found[attribute] = (parameter.detach(), use) if is_own else (parameter, None)
    return found


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disables autocast; where it is off, without the time that entering its context takes."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


class MaskedModule(nn.Module):
    """A module that shows which entries of its ``weight`` are trained."""

    plain_class: ClassVar[type[nn.Module]]
    weight: Any

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
