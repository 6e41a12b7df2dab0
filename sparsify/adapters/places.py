"""Finds the places of adapters in the layers of known architectures, recognised by their parts, not by their class.

AdapterHub's ``adapters`` 1.3 has them at the same places under the same names:

    sublayer -> dropout -> h ; h + residual -> s ; (BERT: norm(s))
        Houlsby   h + A(h)          replaces h, after the attention and after the feed-forward network
        Pfeiffer  s + A(norm(s))    replaces s, after the feed-forward network; s + A(s) where no norm follows
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from sparsify.adapters.bottleneck import KINDS, AdapterConfig, Kind
from sparsify.common.names import near_names
from sparsify.errors import SparsifyError

KNOWN = "BERT (RoBERTa, DeBERTa-v2, ELECTRA, ...), T5 (mT5, ...) and Llama (Mistral, Qwen2, Qwen3, Gemma, ...)"
_POST_NORM = {"dense", "dropout", "LayerNorm"}
_LLAMA = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


class Place(NamedTuple):
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
        return [_after(name, model) for name in dict.fromkeys(config.target_modules)]
    kind = KINDS[config.kind]
    places: list[Place] = []
    for name, module in model.named_modules():
        places += _places_of(module, kind)
        if isinstance(module, nn.ModuleList):
            unknown = [number for number, layer in enumerate(module) if not _places_of(layer, kind)]
            if 0 < len(unknown) < len(module):
                raise SparsifyError(
                    f"{len(unknown)} of the {len(module)} layers in {name!r} are of a kind that adapters are not known "
                    f"for, such as number {unknown[0]}, a {type(module[unknown[0]]).__name__}; name the modules after "
                    "whose output an adapter goes with target_modules=[...]."
                )
    if not places:
        raise SparsifyError(
            f"{type(model).__name__} has no layer that adapters are known for: those of {KNOWN}. For any other model "
            "name the modules after whose output an adapter goes, such as target_modules=['mlp']."
        )
    return places


def _places_of(layer: Any, kind: Kind) -> list[Place]:
    """The places in a layer; none in any that is not known."""
    sees_sum, both = kind.original_ln_before, kind.mh_adapter
    if _is_post_norm(layer) and _is_post_norm(getattr(layer, "attention", None)):  # BERT's
        attentions = [layer.attention, *([layer.crossattention] if hasattr(layer, "crossattention") else [])]
        parts = [*(attention.output for attention in attentions if both), layer.output]
        return [_place(part, part.LayerNorm if sees_sum else part.dropout, part.LayerNorm, sees_sum) for part in parts]
    blocks: Any = getattr(layer, "layer", None)
    is_t5 = isinstance(blocks, nn.ModuleList) and len(blocks) and hasattr(blocks[-1], "DenseReluDense")
    if is_t5 and {"layer_norm", "dropout"} <= set(blocks[0]._modules):
        parts = [blocks[0], blocks[-1]] if both else [blocks[-1]]
        return [_place(part, part if sees_sum else part.dropout, part.layer_norm) for part in parts]
    if layer._modules.keys() == _LLAMA and hasattr(layer.self_attn, "o_proj"):
        norm = layer.input_layernorm
        output = _place(layer, layer if sees_sum else layer.mlp, norm, path="output_adapters.adapters")
        attention = _place(layer, layer.self_attn.o_proj, norm, path="attention_adapters.adapters")
        return [attention, output] if both else [output]
    return []


def _is_post_norm(sublayer: Any) -> bool:
    output = getattr(sublayer, "output", None)
    return isinstance(output, nn.Module) and output._modules.keys() == _POST_NORM


def _place(parent: nn.Module, hooked: nn.Module, norm: Any, before_norm: bool = False, path: str = "adapters") -> Place:
    return Place(parent, path, hooked, norm.weight.numel(), norm, before_norm)


def _after(name: str, model: nn.Module) -> Place:
    """The place after the output of a module: a linear layer, or one whose output has the model's hidden size."""
    modules = dict(model.named_modules())
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
        of = f"what {name!r:.100}, a {type(module).__name__}, gives"
        raise SparsifyError(f"target_modules: the size of {of} is not known; name a linear layer.")
    has_weights = any(parameter.is_floating_point() for parameter in module.parameters())
    return Place(module, "adapters", module, width, module if has_weights else model)
