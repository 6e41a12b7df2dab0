"""The masked forms beyond the core's, and the modules that cannot be masked."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.common.quantized import is_quantized, unreadable
from sparsify.common.shards import is_block, is_shard, parallel_style
from sparsify.core.install import mark, masked_class
from sparsify.core.module import MaskedModule
from sparsify.core.tensor import MaskedTensor
from sparsify.delta.quantized_delta import has_quantized_delta
from sparsify.errors import SparsifyError
from sparsify.masked.parameters import FollowedParameters, LocalParameters
from sparsify.masked.quantized import MaskedPackedLinear
from sparsify.masked.recompute import MaskedLayerNorm
from sparsify.masked.tensor import PARTIAL

# transformers' tensor-parallel styles under which a module computes with DTensors, or with its whole parameters
_PARALLEL = (None, "ColwiseParallel", "EmbeddingParallel", "RowwiseParallel", "SequenceParallel", PARTIAL)
_LOCAL = ("EpDispatchExpertsParallel", "MoeExpertsParallel")  # or with what the rank holds of them


class MaskedParameterList(MaskedModule, nn.ParameterList):
    """An ``nn.ParameterList`` whose reads are taps, and whose slices hold them: a plain slice would detach them."""

    def __setitem__(self, idx: int, param: Any) -> None:
        if isinstance(param, Tensor) and (not param.is_leaf or torch.compiler.is_dynamo_compiling()):
            self._parameters[self._get_abs_string_index(idx)] = param  # type: ignore[assignment]
        else:
            super().__setitem__(idx, param)


def check_maskable(name: str, module: nn.Module, attribute: str, around: Iterable[nn.Module] = ()) -> None:
    """Raises ``SparsifyError`` if a parameter of a module, within those ``around``, cannot be masked."""
    kind = type(module).__name__
    parameter: Any = module._parameters[attribute]
    foreign = next((problem for each in (module, *around) if (problem := _peft_problem(each))), None)
    if parameter.is_meta:
        problem = "is on the meta device (offloaded, or not yet loaded); load it onto a device before sparsify()"
    elif parameter.is_complex():
        problem = f"({kind}) holds complex numbers, and deltas are real"
    elif parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        problem = f"({kind}) has a gradient hook on it, which would never run: a masked weight's gradient is not kept"
    elif foreign is not None:
        problem = foreign
    elif (style := parallel_style(module)) not in _PARALLEL + _LOCAL:
        problem = f"({kind}) is tensor-parallel by transformers' {style}, which computes past its parameters"
    elif is_shard(parameter) and not is_block(parameter):
        problem = f"({kind}) is tensor-parallel in parts that are no block of it: {parameter.placements}"
    elif isinstance(module, nn.RNNBase):
        problem = f"({kind}) reads its weights from a flat list, past its named parameters"
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        problem = f"({kind}) renormalises its table in forward (max_norm={module.max_norm})"
    elif not is_quantized(parameter) or (problem := _quantized_problem(module, attribute)) is None:
        return
    remedy = "" if "before sparsify" in problem else "; leave it out with exclude_modules, or freeze it first"
    raise SparsifyError(f"`{name or '(root)'}.{attribute}` cannot be masked: the module {problem}{remedy}.")


def _peft_problem(module: Any) -> str | None:
    """Why a module of PEFT's moves every entry, or needs every gradient; ``None`` if it does not."""
    projects = "which projects its weight in every forward"
    kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("peft.tuners.")}
    if "AdaLoraLayer" in kinds:
        why = "which allots its ranks by every entry's gradient and adds a penalty on all"
        return f"is AdaLoRA's, {why}; LoRA does neither"
    if "AdamssLayer" in kinds and module.exp_avg_ipt_A:
        return "is AdaMSS's, which picks its subspaces by the gradient of every entry; with use_asa=False it does not"
    if "CPTEmbedding" in kinds:
        return f"is CPT's, {projects} and so moves every entry; prompt tuning does not"
    if "OFTRotationModule" in kinds and module.coft:
        return f"is constrained OFT's, {projects}, moving every entry; coft=False does not"
    return None


def swap(module: nn.Module, tensors: dict[str, MaskedTensor]) -> None:
    """Turns a plain module into its masked form, with the masked ``tensors`` by attribute name."""
    parameters = LocalParameters if parallel_style(module) in _LOCAL else FollowedParameters
    mark(module, tensors, _masked_class(module, tensors), parameters)


def _masked_class(module: nn.Module, tensors: dict[str, MaskedTensor]) -> type[nn.Module] | None:
    """Returns the masked form of exactly this class; ``None`` where its class stays."""
    if any(tensor.is_quantized for tensor in tensors.values()):
        return _quantized_class(module)
    if any(is_shard(tensor.parameter) for tensor in tensors.values()):
        return None  # DTensor's own operations compute it
    if type(module) is nn.ParameterList:
        return MaskedParameterList
    is_plain = "forward" not in module.__dict__ and module._parameters.keys() <= {"weight", "bias"}
    if type(module) is nn.LayerNorm and is_plain:
        return MaskedLayerNorm
    if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils" and is_plain:
        from sparsify.masked.conv1d import MaskedConv1D

        return MaskedConv1D
    if is_quantized(module._parameters.get("weight")):  # the bias of such a layer may be trained
        return None
    return masked_class(module, tensors)


def _quantized_problem(module: nn.Module, attribute: str) -> str | None:
    """Returns why a quantized weight cannot be masked, as the end of a sentence; ``None`` if it can."""
    kind = type(module).__name__
    if has_quantized_delta(module):
        return f"({kind}) has a delta applied to it; revert it before sparsify()"
    if objection := unreadable(module, attribute):
        return objection
    if attribute != "weight" or _quantized_class(module) is None:
        return f"({kind}) holds a quantized weight and is none of the quantized linear layers that can be masked"
    if "forward" in module.__dict__:
        return f"({kind}) has a forward of its own, as from accelerate; load the model on one device before sparsify()"
    return None


def _quantized_class(module: nn.Module) -> type[MaskedModule] | None:
    if type(module) is nn.Linear:
        return MaskedPackedLinear
    if type(module).__module__.partition(".")[0] == "bitsandbytes":
        from sparsify.masked.bitsandbytes import MASKED

        return MASKED.get(type(module))
    return None
