"""Finds the places of adapters in the layers of known architectures, recognised by their parts, not by their class.

In: a model, and the kind of adapter or the names of modules. Out: a :class:`Place` for each adapter, in the order of
the layers. AdapterHub's ``adapters`` 1.3 has them at the same places under the same names:

    sublayer -> dropout -> h ; h + residual -> s ; (BERT: norm(s))
        Houlsby   h + A(h)          replaces h, after the attention and after the feed-forward network
        Pfeiffer  s + A(norm(s))    replaces s, after the feed-forward network; s + A(s) where no norm follows
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from sparsify.adapters.bottleneck import KINDS, AdapterConfig, Kind
from sparsify.common.names import near_names
from sparsify.errors import SparsifyError

KNOWN = "BERT (RoBERTa, DeBERTa-v2, ELECTRA, ...), T5 (mT5, ...) and Llama (Mistral, Qwen2, Qwen3, Gemma, ...)"
_POST_NORM = {"dense", "dropout", "LayerNorm"}
_LLAMA = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


@dataclass(frozen=True)
class Place:
    """The place of one adapter."""

    parent: nn.Module  # gets the adapter as a submodule
    path: str  # dotted name, from there, of the dictionary that holds the adapter
    module: nn.Module  # gets the adapter's hook
    width: int  # size of the hidden states
    like: nn.Module  # the adapter takes its device and dtype
    before_norm: bool = False  # whether `module` is a norm, and the adapter changes its input instead of its output


def find_places(model: nn.Module, config: AdapterConfig) -> list[Place]:
    """Finds the places of a model for adapters of a kind, or after the modules that the user named; raises if none."""
    if config.target_modules is not None:
        modules = dict(model.named_modules())
        return [_after(name, modules, model) for name in dict.fromkeys(config.target_modules)]
    kind = KINDS[config.kind]
    places: list[Place] = []
    for name, module in model.named_modules():
        places.extend(_places_of(module, kind) or ())
        if isinstance(module, nn.ModuleList):
            _check_alike(name, module, kind)
    if not places:
        raise SparsifyError(
            f"{type(model).__name__} has no layer that adapters are known for: those of {KNOWN}. For any other model "
            "name the modules after whose output an adapter goes, such as target_modules=['mlp']."
        )
    return places


def _bert_places(layer: Any, kind: Kind) -> list[Place] | None:
    outputs = (getattr(getattr(layer, "attention", None), "output", None), getattr(layer, "output", None))
    if not all(isinstance(output, nn.Module) and set(output._modules) == _POST_NORM for output in outputs):
        return None
    attentions = [layer.attention, *([layer.crossattention] if hasattr(layer, "crossattention") else [])]
    places = []
    for part in (*(attention.output for attention in attentions if kind.mh_adapter), layer.output):
        norm = part.LayerNorm
        hooked = norm if kind.original_ln_before else part.dropout
        places.append(Place(part, "adapters", hooked, norm.weight.numel(), norm, before_norm=hooked is norm))
    return places


def _t5_places(layer: Any, kind: Kind) -> list[Place] | None:
    parts = getattr(layer, "layer", None)
    if not isinstance(parts, nn.ModuleList) or not len(parts):
        return None
    modules: list[Any] = list(parts)
    if not {"layer_norm", "dropout"} <= set(modules[0]._modules) or not hasattr(modules[-1], "DenseReluDense"):
        return None
    places = []
    for part in (modules[0], modules[-1]) if kind.mh_adapter else (modules[-1],):
        hooked = part if kind.original_ln_before else part.dropout
        places.append(Place(part, "adapters", hooked, part.layer_norm.weight.numel(), part.layer_norm))
    return places


def _llama_places(layer: Any, kind: Kind) -> list[Place] | None:
    if set(layer._modules) != _LLAMA or not hasattr(layer.self_attn, "o_proj"):
        return None
    norm = layer.input_layernorm
    width = norm.weight.numel()
    output = Place(layer, "output_adapters.adapters", layer if kind.original_ln_before else layer.mlp, width, norm)
    attention = Place(layer, "attention_adapters.adapters", layer.self_attn.o_proj, width, norm)
    return [attention, output] if kind.mh_adapter else [output]


def _places_of(module: nn.Module, kind: Kind) -> list[Place] | None:
    """The places in a known layer; None for any other module."""
    found = (find(module, kind) for find in (_bert_places, _t5_places, _llama_places))
    return next((places for places in found if places is not None), None)


def _check_alike(name: str, stack: nn.ModuleList, kind: Kind) -> None:
    """Raises where some layers of a stack would get adapters and others not."""
    unknown = [i for i, layer in enumerate(stack) if _places_of(layer, kind) is None]
    if 0 < len(unknown) < len(stack):
        raise SparsifyError(
            f"{len(unknown)} of the {len(stack)} layers in {name!r} are of a kind that adapters are not known for, "
            f"such as number {unknown[0]}, a {type(stack[unknown[0]]).__name__}; name the modules after whose "
            "output an adapter goes with target_modules=[...]."
        )


def _after(name: str, modules: Mapping[str, nn.Module], model: nn.Module) -> Place:
    """The place after the output of a module: a linear layer, or one whose output has the model's hidden size."""
    if name not in modules:
        near = near_names(name, modules)
        raise SparsifyError(f"target_modules: {type(model).__name__} has no module {name!r:.100}{near}.")
    module = modules[name]
    if isinstance(module, nn.Sequential):
        raise SparsifyError(
            f"target_modules: {name!r:.100} is an nn.Sequential, which would run the adapter as one more step; name "
            "its last module."
        )
    width = getattr(module, "out_features", None) or getattr(getattr(model, "config", None), "hidden_size", None)
    if not isinstance(width, int):
        raise SparsifyError(
            f"target_modules: the size of what {name!r:.100}, a {type(module).__name__}, gives is not known; name a "
            "linear layer."
        )
    has_weights = any(parameter.is_floating_point() for parameter in module.parameters())
    return Place(module, "adapters", module, width, module if has_weights else model)
