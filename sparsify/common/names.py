"""Tensor names independent of wrappers: a delta trained under DDP, ``torch.compile`` or PEFT fits the plain model."""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn, strided

from sparsify.errors import SparsifyError

ENGINE = "_sparsify_engine"  # attribute of a sparsified model
POSITION, SETTINGS = "sparse_position", "sparse_settings"  # buffers of a sparsified model's root
RECORD = "delta"  # of the settings: what a checkpoint's delta needs besides the entries
# torch.compile; DDP and the like; PEFT; sentence-transformers, since its version 5.2 and before
_WRAPPERS = (("_orig_mod",), ("module",), ("base_model", "model"), ("0", "model"), ("0", "auto_model"))
_COMPILED = re.compile(r"(?<![^.])_orig_mod\.")  # wherever a module was compiled, so also in the middle of a name
_PREFIXES = re.compile(r"^(?:module\.|base_model\.model\.|0\.(?:auto_)?model\.)+")
_AROUND = re.compile(r"\.(?:base_layer|token_adapter|modules_to_save\.[^.]+)(?=\.)")  # PEFT's wrappers of a layer
MAX_NAME_CHARACTERS = 1000
# control characters, line separators, marks that turn the direction of writing, halves of surrogate pairs
_NOT_IN_NAMES = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain_name(name: str) -> str:
    """Strips the prefixes of wrappers, which are whole components, from a name of a parameter or buffer."""
    return _PREFIXES.sub("", _COMPILED.sub("", name))


def base_name(name: str) -> str:
    """The name that a tensor has in the base, without PEFT's wrappers around its layer."""
    return _AROUND.sub("", plain_name(name))


def input_table(model: nn.Module) -> Any:
    """The weight of a transformers model's input embeddings; ``None`` where it has none."""
    try:
        return plain_model(model).get_input_embeddings().weight  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None


def plain_model(model: nn.Module) -> nn.Module:
    """Returns the model inside the wrappers whose prefixes :func:`plain_name` strips."""
    for prefix in _WRAPPERS:
        inner: nn.Module | None = model
        for part in prefix:
            # some of PEFT's tuners hold modules of their own in addition to the model, as a SentenceTransformer
            wraps = hasattr(inner, "peft_config") or hasattr(inner, "transformers_model")
            inner = None if inner is None or not (wraps or list(inner._modules) == [part]) else inner._modules.get(part)
        if inner is not None:
            return plain_model(inner)
    return model


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns all parameters, then all persistent buffers of a model by plain name, tied ones under every name."""
    buffers = persistent_buffers(model, remove_duplicate=False)
    found: dict[str, tuple[str, Tensor]] = {}
    for full_name, tensor in (*model.named_parameters(remove_duplicate=False), *buffers.items()):
        name = plain_name(full_name)
        first_name, first = found.setdefault(name, (full_name, tensor))
        if first is not tensor:
            both = f"`{first_name}` and `{full_name}` are different tensors, but both are `{name}` without prefixes of"
            raise SparsifyError(f"{both} wrappers: rename the submodule that is called like a wrapper's.")
    return {name: tensor for name, (_, tensor) in found.items()}


def persistent_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """Returns the buffers in a model's state dict by their names there."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=remove_duplicate)
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.layout is strided and name not in module._non_persistent_buffers_set
    }


def tied_names(model: nn.Module | Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Maps each plain name of a tensor that has several to all of them, the first one first; also of named tensors."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in (named_tensors(model) if isinstance(model, nn.Module) else model).items():
        names_of.setdefault(id(tensor), []).append(name)
    return {name: names for names in names_of.values() if len(names) > 1 for name in names}


def check_names(tensors: Iterable[Any], whole: Iterable[Any]) -> None:
    """Raises unless the names of a delta's tensors are strings without control characters, none of them twice."""
    seen: set[str] = set()
    for name in [*tensors, *whole]:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS or _NOT_IN_NAMES.search(name):
            expected = f"a string of 1 to {MAX_NAME_CHARACTERS:,} characters, none of them a control character"
            raise SparsifyError(f"a tensor's name is {name!r:.120}, expected {expected}: rename the module")
        if name in seen:
            raise SparsifyError(f"tensor `{name}` is there twice: it is either changed at entries or stored whole")
        seen.add(name)


def near_names(name: str, available: Iterable[str]) -> str:
    """The part of an error text that lists the names nearest to a missing one; empty where none is near."""
    near = get_close_matches(name, list(available), n=3, cutoff=0.7)
    return f" (near: {', '.join(f'`{found}`' for found in near)})" if near else ""


def listed(names: Sequence[str]) -> str:
    """The first five names, and the number of the others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise SparsifyError(f"expected a torch.nn.Module, got {type(model).__name__}: load the model first.")


def find_engine(model: nn.Module) -> Any:
    """Returns the engine of a sparsified model, also inside wrappers; raises for a model that is not sparsified."""
    check_module(model)
    engines = {name: vars(module)[ENGINE] for name, module in model.named_modules() if ENGINE in vars(module)}
    if len(engines) > 1:
        parts = ", ".join(f"`{name}`" for name in engines)
        raise SparsifyError(f"several parts of the model are sparsified, each by itself: {parts}; pass one of them.")
    for engine in engines.values():
        return engine
    text = f"this {type(model).__name__} is not sparsified; pass the model that `sparsify(model, budget, strategy)` "
    text += 'returned, before `desparsify`. Nothing tells which entries are trained in full (strategy "full" leaves the'
    raise SparsifyError(f"{text} model plain). What full fine-tuning changed is `SparseDelta.diff(base, model)`.")


def check_plain(model: nn.Module) -> None:
    check_module(model)
    if [module for module in model.modules() if ENGINE in vars(module)]:
        owner = "this model is sparsified: its weights belong to the training that goes on"
        raise SparsifyError(f"{owner}. Call `desparsify(model)` first, or use another copy of the base.")
