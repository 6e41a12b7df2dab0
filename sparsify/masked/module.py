"""What every masked module shows: its unmasked entries, and how dense they are."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparsify.errors import SparsifyError
from sparsify.masked.tensor import MaskedTensor, Use

TENSORS = "_masked_tensors"  # attribute of a module: its masked parameters by attribute name


def masked_tensors(module: nn.Module) -> dict[str, MaskedTensor]:
    """The masked tensors that this module holds, by the parameter's attribute name; empty for a plain module."""
    tensors: dict[str, MaskedTensor] = module.__dict__.get(TENSORS, {})
    return tensors


def announce_use(module: nn.Module, attribute: str) -> Use | None:
    """Announces that the module's forward uses a parameter; ``None`` where no gradient will be collected."""
    tensor = masked_tensors(module).get(attribute)
    return None if tensor is None else tensor.collector.use(tensor)


def frozen_if_masked(module: nn.Module, attribute: str) -> Any:
    """The parameter, cut off from autograd if it is masked: PEFT, for one, sets ``requires_grad`` back on its own."""
    parameter, tensor = module._parameters.get(attribute), masked_tensors(module).get(attribute)
    if tensor is None:
        return parameter
    if parameter is None:
        raise SparsifyError(
            f"`{tensor.name}` was taken from its module ({type(module).__name__}) after sparsify(), as by a "
            "parametrization, weight_norm() or pruning; call these before sparsify()."
        )
    return parameter.detach()


class MaskedModule(nn.Module):
    """Read-only views of the entries of ``weight`` that are trained."""

    plain_class: ClassVar[type[nn.Module]]
    weight: Any

    @property
    def indices(self) -> Tensor:
        """(k,) int64: flat, row-major positions of the unmasked entries of ``weight``, in order of unmasking."""
        tensor = masked_tensors(self).get("weight")
        return torch.empty(0, dtype=torch.int64, device=self.weight.device) if tensor is None else tensor.indices

    @property
    def base_values(self) -> Tensor:
        """(k,) the pretrained values of the unmasked entries, in the weight's dtype."""
        tensor = masked_tensors(self).get("weight")
        return self.weight.detach().new_empty(0) if tensor is None else tensor.base

    @property
    def delta(self) -> Tensor:
        """(k,) float32: trained minus pretrained value of the unmasked entries."""
        tensor = masked_tensors(self).get("weight")
        return torch.empty(0, device=self.weight.device) if tensor is None else tensor.delta

    @property
    def density(self) -> float:
        """Share of the weight's entries that are unmasked."""
        return self.indices.numel() / self.weight.numel()
