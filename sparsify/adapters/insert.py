"""Adds adapters and their hooks to a model, in place, and removes them; the base's own modules stay the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from sparsify.adapters.bottleneck import Adapter, AdapterConfig
from sparsify.adapters.places import Place, find_places
from sparsify.common.names import check_plain
from sparsify.errors import SparsifyError
from sparsify.strategies.targets import Pattern, match_modules

Model = TypeVar("Model", bound=nn.Module)


class Adapters(nn.ModuleDict):
    """A dictionary of adapters in a model; :func:`remove_adapters` recognises it by its class."""


def add_adapters(
    model: Model,
    kind: str = "pfeiffer",
    reduction_factor: float = 16,
    *,
    adapter_name: str = "default",
    target_modules: Pattern = None,
) -> Model:
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
        _insert(place, config)


def find_adapters(model: nn.Module) -> dict[str, Adapter]:
    """Returns the adapters of a model by module name, in its order; raises where there is none."""
    adapters = {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}
    if not adapters:
        raise SparsifyError(f"{type(model).__name__} has no adapters; call add_adapters(model) first.")
    return adapters


def check_without_adapters(model: nn.Module) -> None:
    """Raises where a model has adapters, ours or AdapterHub's, or is sparsified."""
    check_plain(model)
    name = type(model).__name__
    for module in model.modules():
        if isinstance(module, Adapter):
            raise SparsifyError(f"{name} has adapters already; call remove_adapters(model) first, or go on with those.")
        if hasattr(module, "adapters_config"):
            raise SparsifyError(
                f"{name} was prepared by AdapterHub's `adapters`: call its model.add_adapter(...) and "
                "model.train_adapter(...), and sparsify(model, ...) then as it is."
            )


def _insert(place: Place, config: AdapterConfig) -> None:
    """Makes an adapter at a place and registers its hook."""
    adapter = Adapter(place.width, config)
    like = next((parameter for parameter in place.like.parameters() if parameter.is_floating_point()), None)
    if like is not None:
        is_meta = adapter.adapter_up.weight.is_meta  # stays there, without memory
        adapter.to(device=None if is_meta else like.device, dtype=like.dtype)
    adapter.train(place.parent.training)
    holder = place.parent
    for part in place.path.split("."):
        holder.add_module(part, Adapters())
        holder = holder.get_submodule(part)
    holder.add_module(config.name, adapter)
    if place.before_norm:
        place.module.register_forward_pre_hook(adapter.adapt_before_norm)
    else:  # before other hooks, which may record a layer's hidden states
        place.module.register_forward_hook(adapter.adapt_output, prepend=True)
