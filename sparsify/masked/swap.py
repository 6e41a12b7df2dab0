"""Turns plain modules into masked ones and back, in place: identity, hooks and aliases stay.

A linear layer or embedding changes its class; any other module gets the generic form's hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from sparsify.common.quantized import is_quantized, unreadable
from sparsify.core.tensor import MaskedTensor
from sparsify.delta.quantized_delta import has_quantized_delta
from sparsify.errors import SparsifyError
from sparsify.masked.embedding import MaskedEmbedding
from sparsify.masked.generic import MaskedParameterList, ReadParameters, tap_parameters, untap_parameters
from sparsify.masked.linear import MaskedLinear
from sparsify.masked.module import TENSORS, MaskedModule

HOOKS = "_masked_hooks"  # attribute of a module in the generic form: the handles of its two hooks
UNTAP = -1  # key of the second; those that torch gives out are not negative
# full name of another library's class, which need not be imported -> whether a module of it cannot be trained at some
# of its entries, and what the error says of it
_FOREIGN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "peft.tuners.adalora.layer.AdaLoraLayer": (
        lambda module: True,
        "is AdaLoRA's, which allots its ranks by the gradient of every entry, and adds a penalty on all entries; LoRA "
        "does neither",
    ),
    "peft.tuners.adamss.layer.AdamssLayer": (
        lambda module: bool(module.exp_avg_ipt_A),
        "is AdaMSS's, which picks its subspaces by the gradient of every entry; with use_asa=False it does not",
    ),
    "peft.tuners.cpt.model.CPTEmbedding": (
        lambda module: True,
        "is CPT's, which projects its weight in every forward and so moves every entry; prompt tuning does not",
    ),
    "peft.tuners.oft.layer.OFTRotationModule": (
        lambda module: bool(module.coft),
        "is constrained OFT's, which projects its weight in every forward and so moves every entry; with coft=False it "
        "does not",
    ),
}


def check_maskable(name: str, module: nn.Module, attribute: str, around: Iterable[nn.Module] = ()) -> None:
    """Raises ``SparsifyError`` if a parameter of a module, within those ``around``, cannot be masked."""
    kind, parameter = type(module).__name__, module._parameters[attribute]
    assert parameter is not None
    foreign = next((problem for each in (module, *around) if (problem := _foreign_problem(each)) is not None), None)
    if is_lazy(parameter):
        problem = f"({kind}) is lazy and has no weights yet; run a forward pass before sparsify()"
    elif parameter.is_meta:
        problem = (
            "is on the meta device (offloaded, as by device_map or cpu_offload(), or not yet loaded); load its weights "
            "onto a device before sparsify(), or leave it out with exclude_modules"
        )
    elif parameter.is_complex():
        problem = f"({kind}) holds complex numbers, and deltas are real"
    elif parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        problem = f"({kind}) has a gradient hook on it, which would never run: a masked weight's gradient is not kept"
    elif foreign is not None:
        problem = foreign
    elif isinstance(module, nn.RNNBase):
        problem = f"({kind}) reads its weights from a flat list, past its named parameters"
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        problem = f"({kind}) renormalises its table in forward (max_norm={module.max_norm})"
    elif is_quantized(module._parameters[attribute]) and (objection := _quantized_problem(module, attribute)):
        problem = objection
    else:
        return
    remedy = "" if "before sparsify" in problem else "; leave it out with exclude_modules, or freeze it first"
    raise SparsifyError(f"`{name or '(root)'}.{attribute}` cannot be masked: the module {problem}{remedy}.")


def _foreign_problem(module: nn.Module) -> str | None:
    for kind in type(module).__mro__:
        is_meant, problem = _FOREIGN.get(f"{kind.__module__}.{kind.__qualname__}", (None, ""))
        if is_meant is not None and is_meant(module):
            return problem
    return None


def swap(module: nn.Module, tensors: dict[str, MaskedTensor]) -> None:
    """Turns a plain module into its masked form, with the masked ``tensors`` by attribute name."""
    module.__dict__[TENSORS] = tensors
    readable = {attribute: tensor for attribute, tensor in tensors.items() if not tensor.packed}
    module.__dict__["_parameters"] = ReadParameters(module._parameters, readable)
    masked_class = _masked_class(module, tensors)
    if masked_class is not None:
        module.__class__ = masked_class
    else:
        tap = module.register_forward_pre_hook(tap_parameters, prepend=True)
        module.__dict__[HOOKS] = tap, _register_untap(module)


def _register_untap(module: nn.Module) -> RemovableHandle:
    """Registers the hook under one key in all modules: ``torch.compile`` recompiles a layer for another key."""
    handle = module.register_forward_hook(untap_parameters, always_call=True)
    for hooks in (module._forward_hooks, module._forward_hooks_always_called):
        hooks[UNTAP] = hooks.pop(handle.id)  # type: ignore[assignment]
    handle.id = UNTAP
    return handle


def unswap(module: nn.Module) -> None:
    """Turns a masked module back into the plain one, its parameters unchanged; leaves a plain module alone."""
    if TENSORS not in module.__dict__:
        return
    if isinstance(module, (MaskedModule, MaskedParameterList)):
        module.__class__ = module.plain_class  # type: ignore[assignment]
    for handle in module.__dict__.pop(HOOKS, ()):
        handle.remove()
    module.__dict__["_parameters"] = dict(module._parameters)
    del module.__dict__[TENSORS]


def frozen_row(module: nn.Module) -> int | None:
    """Returns the row of a module's ``weight`` that is no candidate: an embedding's ``padding_idx``."""
    return module.padding_idx if isinstance(module, nn.Embedding) else None


def _masked_class(module: nn.Module, tensors: dict[str, MaskedTensor]) -> type[nn.Module] | None:
    """Returns the masked form of exactly this class; ``None`` for the generic form."""
    if any(tensor.packed for tensor in tensors.values()):
        return _quantized_class(module)
    if type(module) is nn.ParameterList:
        return MaskedParameterList
    if "forward" in module.__dict__:  # replaced on the instance, as accelerate's hooks do
        return None
    if "weight" not in module._parameters or not module._parameters.keys() <= {"weight", "bias"}:
        return None  # reparametrised, as torch.nn.utils.weight_norm does
    if type(module) is nn.Linear and not is_quantized(module.weight):  # the bias of such a layer may be trained
        return MaskedLinear
    if type(module) is nn.Embedding and not module.scale_grad_by_freq:
        # two embeddings may share a table, each with a padding row of its own
        return MaskedEmbedding if module.padding_idx in (None, tensors["weight"].frozen_row) else None
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils":
        from sparsify.masked.conv1d import MaskedConv1D

        return MaskedConv1D
    return None


def _quantized_problem(module: nn.Module, attribute: str) -> str | None:
    """Returns why a quantized weight cannot be masked, as the end of a sentence; ``None`` if it can."""
    kind = type(module).__name__
    if has_quantized_delta(module):
        return f"({kind}) has a delta applied to it; revert it before sparsify()"
    objection = unreadable(module, attribute)
    if objection is not None:
        return objection
    if attribute != "weight" or _quantized_class(module) is None:
        return f"({kind}) holds a quantized weight and is none of the quantized linear layers that can be masked"
    if "forward" in module.__dict__:
        return f"({kind}) has a forward of its own, as from accelerate; load the model on one device before sparsify()"
    return None


def _quantized_class(module: nn.Module) -> type[MaskedModule] | None:
    """Returns the masked form of exactly this class, with a quantized weight; ``None`` where there is none."""
    if type(module) is nn.Linear:
        return MaskedLinear
    if type(module).__module__.partition(".")[0] == "bitsandbytes":
        from sparsify.masked.bitsandbytes import MASKED

        return MASKED.get(type(module))
    return None
