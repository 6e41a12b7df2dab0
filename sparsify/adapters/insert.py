"""Adds adapters and their hooks to a model, in place, and removes them; the base's own modules stay the same.

An adapter is a projection down to a few dimensions, a non-linearity, and a projection up, added to the hidden states.
Their places in the layers of known architectures, recognised by their parts, not by their class, and their names are
those of AdapterHub's ``adapters`` 1.3:

    sublayer -> dropout -> h ; h + residual -> s ; (BERT: norm(s))
        Houlsby   h + A(h)          replaces h, after the attention and after the feed-forward network
        Pfeiffer  s + A(norm(s))    replaces s, after the feed-forward network; s + A(s) where no norm follows
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from sparsify.common.names import check_plain, near_names
from sparsify.errors import SparsifyError
from sparsify.strategies.targets import Pattern, match_modules

_LEAST_FACTOR = 2**-10  # a larger bottleneck than 1024 times the hidden size is a mistake, or an attack
# AdapterHub's settings for two published kinds: whether the attention has an adapter, in addition to the feed-forward
# network's, and whether an adapter sees the sum of a sublayer's output and its residual, or the output
KINDS: dict[str, dict[str, Any]] = {
    "houlsby": {"mh_adapter": True, "original_ln_before": False, "non_linearity": "swish"},
    "pfeiffer": {"mh_adapter": False, "original_ln_before": True, "non_linearity": "relu"},
}
_NON_LINEARITIES = {"swish": nn.SiLU, "relu": nn.ReLU}
KNOWN = "BERT (RoBERTa, DeBERTa-v2, ELECTRA, ...), T5 (mT5, ...) and Llama (Mistral, Qwen2, Qwen3, Gemma, ...)"
_REMEDY = "name the modules after whose output an adapter goes: target_modules=['mlp']."
_POST_NORM = {"dense", "dropout", "LayerNorm"}
_LLAMA = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class AdapterConfig:
    """Kind (``"pfeiffer"`` or ``"houlsby"``), size and name of a model's adapters, as for :func:`add_adapters`.

    ``target_modules`` are full names of the modules whose output is adapted, where the user named them.
    """

    kind: str = "pfeiffer"
    reduction_factor: float = 16
    name: str = "default"
    target_modules: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise SparsifyError(f"kind={self.kind!r:.100} is no kind of adapter; expected {' or '.join(KINDS)}.")
        factor, name, modules = self.reduction_factor, self.name, self.target_modules
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not _LEAST_FACTOR <= factor < math.inf:
            raise SparsifyError(f"reduction_factor={factor!r:.100}; expected a number of at least 1/1024, such as 16.")
        if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict(), name):
            expected = "a word without dots that is no method of a dict, such as 'default'."
            raise SparsifyError(f"adapter_name={name!r:.100} cannot be part of a parameter's name; expected {expected}")
        is_list = isinstance(modules, (list, tuple)) and all(isinstance(module, str) for module in modules)
        if modules is not None and not is_list:
            raise SparsifyError(f"target_modules={modules!r:.100}; expected a list of module names.")


class Adapter(nn.Module):
    """A bottleneck adapter for hidden states of one ``width``: ``up(f(down(x)))``, which its hooks add to them."""

    def __init__(self, width: int, config: AdapterConfig) -> None:
        super().__init__()
        self.config = config
        bottleneck = max(1, int(width // config.reduction_factor))
        down = nn.Linear(width, bottleneck)
        self.adapter_down = nn.Sequential(down, _NON_LINEARITIES[KINDS[config.kind]["non_linearity"]]())
        self.adapter_up = nn.Linear(bottleneck, width)
        for projection in (down, self.adapter_up):
            nn.init.normal_(projection.weight, std=0.02)  # AdapterHub's init_weights="bert"
            nn.init.zeros_(projection.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the change of ``hidden`` (..., width), in the dtype of that."""
        return self.adapter_up(self.adapter_down(hidden.to(self.adapter_up.weight.dtype))).to(hidden.dtype)

    def adapt_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook: replaces the output x of a module, or the first of its outputs, by ``x + adapter(x)``."""
        return output + self(output) if isinstance(output, Tensor) else (output[0] + self(output[0]), *output[1:])

    def adapt_before_norm(self, norm: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Forward pre-hook of a norm: replaces its input x by ``x + adapter(norm(x))``."""
        return (args[0] + self(norm.forward(args[0])), *args[1:])


class Adapters(nn.ModuleDict):
    """A dictionary of adapters in a model, as which :func:`remove_adapters` finds it."""


def add_adapters(
    model: Model, kind: str = "pfeiffer", reduction_factor: float = 16, *, adapter_name: str = "default",
    target_modules: Pattern = None,
) -> Model:  # fmt: skip
    """Adds bottleneck adapters to a model of transformers, in place, freezes all but them and the head, and returns it.

    Places, parameter names, initial values and outputs are those of AdapterHub's ``adapters``. A task's head stays
    trainable: give it to ``sparsify`` in ``modules_to_save``, or its entries are candidates like the adapters'.

    Args:
        model: a model with layers like BERT's (RoBERTa, DeBERTa-v2, ...), T5's or Llama's (Mistral, Qwen2, Qwen3, ...).
        kind: ``"pfeiffer"``, one adapter in each layer, after the feed-forward network (AdapterHub's ``"seq_bn"``), or
            ``"houlsby"``, another one after the self-attention (``"double_seq_bn"``).
        reduction_factor: hidden size divided by the bottleneck's size.
        adapter_name: a part of the parameters' names.
        target_modules: for any other model: the modules whose output x becomes ``x + adapter(x)``; a list matches the
            ends of their names, a string is a regular expression for the whole name. ``kind`` then only chooses the
            non-linearity.

    Raises:
        SparsifyError: before any change, for an unknown kind or architecture, an invalid reduction factor or name, or
            a model that has adapters already or is in sparse training.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> model = BertForSequenceClassification(BertConfig(num_hidden_layers=1))
        >>> model = add_adapters(model, "houlsby", reduction_factor=16)
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad][-1]
        'classifier.bias'

    Source:
        Houlsby et al. 2019, *Parameter-Efficient Transfer Learning for NLP*, https://arxiv.org/abs/1902.00751;
        Pfeiffer et al. 2021, *AdapterFusion*, https://arxiv.org/abs/2005.00247.
    """
    config = AdapterConfig(kind, reduction_factor, adapter_name)
    check_without_adapters(model)
    if target_modules is not None:
        matched = match_modules(model, target_modules, "target_modules")
        config = replace(config, target_modules=[name for name, _ in model.named_modules() if name in matched])
    insert_adapters(model, config)
    return model


def remove_adapters(model: Model) -> Model:
    """Removes the adapters of :func:`add_adapters` from a model, in place, and returns it; frozen parameters stay so.

    Its outputs are the base's, bit for bit.

    Raises:
        SparsifyError: when it has no adapters, or is in sparse training.
    """
    check_plain(model)
    find_adapters(model)
    for module in list(model.modules()):
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), Adapter)]:
                del hooks[key]
        for name in [name for name, child in module.named_children() if isinstance(child, Adapters)]:
            delattr(module, name)
    return model


def insert_adapters(model: nn.Module, config: AdapterConfig) -> None:
    """Adds new adapters at all places of a model that has none, and freezes all but adapters and head."""
    places = find_places(model, config)
    pretrained: list[Any] = [module for module in model.modules() if hasattr(module, "base_model_prefix")]
    for body in [module.base_model for module in pretrained] or [model]:
        body.requires_grad_(False)
    for module in pretrained:
        if isinstance(head := module.get_output_embeddings(), nn.Module):
            head.requires_grad_(False)
    for place in places:
        adapter = Adapter(place.width, config)
        if place.like is not None:
            is_meta = adapter.adapter_up.weight.is_meta  # stays there, without memory
            adapter.to(device=None if is_meta else place.like.device, dtype=place.like.dtype)
        adapter.train(place.module.training)
        holder = model
        for part in place.name.split("."):
            if part not in holder._modules:
                holder.add_module(part, Adapters())
            holder = holder.get_submodule(part)
        holder.add_module(config.name, adapter)
        if place.before_norm:
            place.module.register_forward_pre_hook(adapter.adapt_before_norm)
        else:  # before other hooks, which may record a layer's hidden states
            place.module.register_forward_hook(adapter.adapt_output, prepend=True)


def find_adapters(model: nn.Module) -> dict[str, Adapter]:
    """Returns the adapters of a model by module name, in its order; raises where there is none."""
    adapters = {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}
    if not adapters:
        raise SparsifyError(f"{type(model).__name__} has no adapters; call add_adapters(model) first.")
    return adapters


def check_without_adapters(model: nn.Module) -> None:
    check_plain(model)
    name = type(model).__name__
    for module in model.modules():
        if isinstance(module, Adapter):
            raise SparsifyError(f"{name} has adapters already; call remove_adapters(model) first, or go on with those.")
        if hasattr(module, "adapters_config"):
            remedy = "call its model.add_adapter(...) and train_adapter(...), and sparsify(model, ...) then as it is."
            raise SparsifyError(f"{name} was prepared by AdapterHub's `adapters`: {remedy}")


class Place(NamedTuple):
    name: str  # of the dictionary that holds the adapter
    module: nn.Module  # gets the adapter's hook
    width: int  # size of the hidden states
    like: Tensor | None  # the adapter takes its device and dtype
    before_norm: bool = False  # whether `module` is a norm, and the adapter changes its input instead of its output


def find_places(model: nn.Module, config: AdapterConfig) -> list[Place]:
    """Finds the places of a model for adapters of a kind, or after the modules that the user named; raises if none."""
    if config.target_modules is not None:
        return [_after(name, model) for name in dict.fromkeys(config.target_modules)]
    kind = KINDS[config.kind]
    places: list[Place] = []
    for name, module in model.named_modules():
        places += [place._replace(name=f"{name}.{place.name}".lstrip(".")) for place in _places_of(module, kind)]
        if isinstance(module, nn.ModuleList):
            unknown = [number for number, layer in enumerate(module) if not _places_of(layer, kind)]
            if 0 < len(unknown) < len(module):
                some = f"{len(unknown)} of the {len(module)} layers in {name!r} are of a kind not known for adapters,"
                raise SparsifyError(f"{some} as number {unknown[0]}, a {type(module[unknown[0]]).__name__}; {_REMEDY}")
    if not places:
        known = f"has no layer that adapters are known for: those of {KNOWN}"
        raise SparsifyError(f"{type(model).__name__} {known}; {_REMEDY}")
    return places


def _places_of(layer: Any, kind: dict[str, Any]) -> list[Place]:
    """The places in a layer, by their names in it; none in any that is not known."""
    sees_sum, both = kind["original_ln_before"], kind["mh_adapter"]
    if _is_post_norm(layer) and _is_post_norm(getattr(layer, "attention", None)):  # BERT's
        attentions = [name for name in ("attention", "crossattention") if both and hasattr(layer, name)]
        parts = {f"{name}.output": getattr(layer, name).output for name in attentions} | {"output": layer.output}
        hooked = "LayerNorm" if sees_sum else "dropout"
        return [_place(path, getattr(part, hooked), part.LayerNorm, sees_sum) for path, part in parts.items()]
    blocks: Any = getattr(layer, "layer", None)
    is_t5 = isinstance(blocks, nn.ModuleList) and len(blocks) and hasattr(blocks[-1], "DenseReluDense")
    if is_t5 and {"layer_norm", "dropout"} <= set(blocks[0]._modules):
        parts = {f"layer.{i}": blocks[i] for i in (0, len(blocks) - 1) if i or both}
        return [_place(path, part if sees_sum else part.dropout, part.layer_norm) for path, part in parts.items()]
    if layer._modules.keys() == _LLAMA and hasattr(layer.self_attn, "o_proj"):
        norm = layer.input_layernorm
        attention = _place("attention_adapters", layer.self_attn.o_proj, norm)
        return [*([attention] if both else []), _place("output_adapters", layer if sees_sum else layer.mlp, norm)]
    return []


def _is_post_norm(sublayer: Any) -> bool:
    output = getattr(sublayer, "output", None)
    return isinstance(output, nn.Module) and output._modules.keys() == _POST_NORM


def _place(path: str, hooked: nn.Module, norm: Any, before_norm: bool = False) -> Place:
    return Place(f"{path}.adapters", hooked, norm.weight.numel(), norm.weight, before_norm)


def _after(name: str, model: nn.Module) -> Place:
    """The place after the output of a module: a linear layer, or one whose output has the model's hidden size."""
    modules = dict(model.named_modules())
    if name not in modules:
        near = near_names(name, modules)
        raise SparsifyError(f"target_modules: {type(model).__name__} has no module {name!r:.100}{near}.")
    module = modules[name]
    if isinstance(module, nn.Sequential):
        raise SparsifyError(f"target_modules: {name!r:.100} is an nn.Sequential, not a layer; name its last module.")
    width = getattr(module, "out_features", None) or getattr(getattr(model, "config", None), "hidden_size", None)
    if not isinstance(width, int):
        of = f"what {name!r:.100}, a {type(module).__name__}, gives"
        raise SparsifyError(f"target_modules: the size of {of} is not known; name a linear layer.")
    floating = (each for each in (*module.parameters(), *model.parameters()) if each.is_floating_point())
    return Place(f"{name}.adapters".lstrip("."), module, width, next(floating, None))
