"""The base of all masked modules: their masked parameters, views of these, and what their autograd nodes cannot do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparsify.core.tensor import MaskedTensor, Use
from sparsify.errors import SparsifyError

TENSORS = "_masked_tensors"  # attribute of a module: its masked parameters by attribute name
NOT_EXPORTED = (
    "a sparsified model cannot be exported or traced (torch.export, torch.jit.trace, torch.onnx.export): it trains by "
    "autograd functions of its own. Export the plain model, with the trained weights in place: desparsify(model)."
)
NOT_TWICE = (
    "a backward pass with create_graph=True reached a sparsified model, and its gradients cannot be differentiated a "
    "second time (double backward, as for gradient penalties and Hessians). Leave out create_graph, or train the plain "
    "model: desparsify(model)."
)


def masked_tensors(module: nn.Module) -> dict[str, MaskedTensor]:
    """Returns a module's masked tensors by the parameter's attribute name; none for a plain module."""
    tensors: dict[str, MaskedTensor] = module.__dict__.get(TENSORS, {})
    return tensors


def count_uses(module: nn.Module) -> dict[str, Use | None]:
    """Counts a use of each masked parameter in the module's forward; ``None`` where no gradient will be collected."""
    tensors = module.__dict__[TENSORS]
    check_not_exported()
    first: MaskedTensor = next(iter(tensors.values()))
    return dict(zip(tensors, first.collector.uses(tensors.values()), strict=True))


def frozen(module: nn.Module, attribute: str) -> Any:
    """Returns a parameter, detached if it is masked: PEFT, for one, sets ``requires_grad`` again."""
    parameter, tensor = module._parameters.get(attribute), module.__dict__[TENSORS].get(attribute)
    if tensor is None or parameter is None:
        if tensor is not None:
            raise SparsifyError(
                f"`{tensor.name}` was taken from its module ({type(module).__name__}) after sparsify(), as by a "
                "parametrization, weight_norm() or pruning; call these before sparsify()."
            )
        return parameter
    return parameter.detach()


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the backward of an autograd function raise ``SparsifyError`` under ``create_graph=True``."""

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # in a backward pass, under create_graph=True only
            raise SparsifyError(NOT_TWICE)
        return backward(ctx, *grads)

    return checked


def check_not_exported() -> None:
    """Raises ``SparsifyError`` while ``torch.export`` or ``torch.jit.trace`` runs the model."""
    if torch.compiler.is_dynamo_compiling():
        return  # it would wrap the error in one of its own
    # the public is_exporting() is true under torch.compile in older versions of torch
    is_exporting = getattr(torch.compiler, "_is_exporting_flag", False)
    if is_exporting or torch.jit.is_tracing():  # type: ignore[attr-defined]  # documented, not in __all__
        raise SparsifyError(NOT_EXPORTED)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disables autocast; where it is off, without the time that entering its context takes."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


class MaskedModule(nn.Module):
    """A module that shows which entries of its ``weight`` are trained."""

    plain_class: ClassVar[type[nn.Module]]
    weight: Any

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
