"""Candidates: the tensors that may be trained, in ``named_parameters`` order, and the patterns that narrow them."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from sparsify.common.names import listed
from sparsify.common.quantized import is_quantized
from sparsify.errors import SparsifyError

ALL_LINEAR = "all-linear"
PEFT_SAVED = "modules_to_save"  # the component of a module's name under which PEFT keeps its dense modules
Pattern = str | list[str] | tuple[str, ...] | set[str] | None
Owner = tuple[str, nn.Module, str]  # module name, module, attribute


@dataclass(frozen=True)
class Candidate:
    """One tensor parameter that may be trained."""

    name: str  # its first one in ``named_parameters``
    parameter: nn.Parameter
    owners: tuple[Owner, ...]  # every place that holds it; several where weights are tied


@dataclass(frozen=True)
class Targets:
    """A model's trainable parameters: candidates, those trained dense, and those to freeze, by name."""

    candidates: tuple[Candidate, ...]
    saved: dict[str, nn.Parameter]
    frozen: dict[str, nn.Parameter]


def find_targets(
    model: nn.Module, target_modules: Pattern = None, exclude_modules: Pattern = None,
    modules_to_save: list[str] | None = None,
) -> Targets:  # fmt: skip
    """Sorts the parameters that require grad into candidates, dense ones and those to freeze.

    A quantized weight cannot require grad. It is a candidate where ``target_modules`` names its module, but never in a
    PEFT model, whose base is frozen. The patterns are those of :func:`match_modules`.

    Raises:
        SparsifyError: when a pattern matches no module, or nothing trainable is left.
    """
    if isinstance(modules_to_save, str):
        raise SparsifyError(
            f"modules_to_save={modules_to_save!r}; expected a list of module names, such as [{modules_to_save!r}]."
        )
    modules = dict(model.named_modules())
    saved_modules = match_modules(model, modules_to_save or None, "modules_to_save")
    excluded = match_modules(model, exclude_modules, "exclude_modules")
    targeted = set(modules) if target_modules is None else match_modules(model, target_modules, "target_modules")

    takes_quantized = target_modules is not None and not _is_peft(modules)
    owners: dict[nn.Parameter, list[Owner]] = defaultdict(list)
    for module_name, module in modules.items():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners[parameter].append((module_name, module, attribute))
                if is_quantized(parameter) and _inside(module_name, saved_modules):
                    raise SparsifyError(
                        f"`{module_name}` is in modules_to_save, but is quantized and cannot be trained whole: leave "
                        f"it out of the quantization (bitsandbytes: llm_int8_skip_modules=[{module_name!r}])."
                    )
    candidates: list[Candidate] = []
    saved: dict[str, nn.Parameter] = {}
    frozen: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        names = [owner for owner, _, _ in owners[parameter]]
        is_saved = any(_inside(owner, saved_modules) or PEFT_SAVED in owner.split(".") for owner in names)
        is_targeted = any(owner in targeted and not _inside(owner, excluded) for owner in names)
        if is_targeted and not is_saved and (parameter.requires_grad or (takes_quantized and is_quantized(parameter))):
            candidates.append(Candidate(name, parameter, tuple(owners[parameter])))
        elif parameter.requires_grad:
            (saved if is_saved else frozen)[name] = parameter

    if not candidates:
        raise SparsifyError(_nothing_left(model, target_modules))
    if target_modules is None:
        _report_quantized(model, modules)
    else:
        left_out = {name for name in targeted if _inside(name, excluded | saved_modules)}
        _report_partial_match(targeted - left_out, modules, candidates)
    return Targets(tuple(candidates), saved, frozen)


def check_own_memory(model: nn.Module, candidates: Iterable[Candidate]) -> None:
    """Raises ``SparsifyError`` where a candidate shares memory with another parameter, such as its transpose."""
    trained = {candidate.name for candidate in candidates}
    furthest = (0, "")  # end of the memory seen so far, and the parameter that ends there
    for start, end, name in sorted(_spans(model)):
        first, other = sorted((furthest[1], name), key=lambda name: name not in trained)
        if start < furthest[0] and first in trained:
            raise SparsifyError(
                f"`{first}` shares its memory with `{other}`, which is a parameter of its own, so that each would "
                "overwrite the trained entries of the other; untie them, or make them one parameter (PEFT ties "
                "adapters so with ensure_weight_tying=True)."
            )
        furthest = max(furthest, (end, name))


def _spans(model: nn.Module) -> Iterator[tuple[int, int, str]]:
    """First byte, end and name of every plain parameter whose memory has no gaps."""
    for name, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter and not parameter.is_meta and parameter.numel():
            strides = zip(parameter.shape, parameter.stride(), strict=True)
            if 1 + sum((size - 1) * stride for size, stride in strides) == parameter.numel():
                start = parameter.data_ptr()
                yield start, start + parameter.nbytes, name


def match_modules(model: nn.Module, pattern: Pattern, argument: str) -> set[str]:
    """Returns the first names of the modules that a pattern matches under any of their names.

    The pattern is a list of suffixes, a regular expression for the whole name, or ``"all-linear"``: every linear layer
    but the output head. One that matches nothing is an error that calls it by the name of its ``argument``.

    Example:
        >>> match_modules(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ["0"], "target_modules")
        {'0'}
    """
    if pattern is None:
        return set()
    if pattern == ALL_LINEAR:  # as PEFT's
        head = getattr(model, "get_output_embeddings", lambda: None)()
        linear = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
        return {name for name, module in linear if module is not head}
    first_names = {module: name for name, module in model.named_modules()}
    names = {name: first_names[module] for name, module in model.named_modules(remove_duplicate=False)}
    if isinstance(pattern, str):
        try:
            found = {first for name, first in names.items() if re.fullmatch(pattern, name)}
        except re.error as error:
            raise SparsifyError(f"{argument}={pattern!r} is not a regular expression: {error}.") from None
        if not found:
            raise SparsifyError(_no_match(argument, pattern, names, is_regex=True))
        return found
    found = set()
    for suffix in pattern:
        hits = _ending_in(suffix, names)
        if not hits:
            raise SparsifyError(_no_match(argument, suffix, names, is_regex=False))
        found |= hits
    return found


def _ending_in(suffix: str, names: Mapping[str, str]) -> set[str]:
    return {first for name, first in names.items() if f".{name}".endswith(f".{suffix}")}


def _inside(name: str, parents: Iterable[str]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def _no_match(argument: str, pattern: str, names: Mapping[str, str], *, is_regex: bool) -> str:
    """The error text for a pattern that matches no module."""
    if is_regex and get_close_matches(pattern.lower(), [ALL_LINEAR], cutoff=0.8):
        return f"{argument}={pattern!r} matches no module of the model. Did you mean {ALL_LINEAR!r}?"
    if is_regex and (number := len(_ending_in(pattern, names))):
        return (
            f"{argument}={pattern!r} matches no module: a string is a regular expression for the whole name. Pass a "
            f"list, {argument}=[{pattern!r}], to match the ends of names ({number:,} here)."
        )
    last_parts = {name.rsplit(".", 1)[-1] for name in names if name}
    near = get_close_matches(pattern.rsplit(".", 1)[-1], last_parts, n=3, cutoff=0.5)
    hint = f" Near names: {', '.join(near)}." if near else f" Modules here: {', '.join(sorted(last_parts)[:12])}."
    return f"{argument}: {pattern!r} matches no module of the model; expected (the end of) a module's name.{hint}"


def _nothing_left(model: nn.Module, target_modules: Pattern) -> str:
    if target_modules is None and any(is_quantized(parameter) for parameter in model.parameters()):
        return (
            "no parameter of the model requires grad, and quantized weights cannot; name the layers to train with "
            'target_modules, such as "all-linear".'
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return "no parameter of the model requires grad; call model.requires_grad_(True) before sparsify()."
    return (
        f"no trainable parameter is left: target_modules={target_modules!r} (less exclude_modules and modules_to_save) "
        "matches no module with parameters that require grad; name modules that own weights, such as the linear layers."
    )


def _report_partial_match(matched: set[str], modules: dict[str, nn.Module], candidates: list[Candidate]) -> None:
    holding = {owner for candidate in candidates for owner, _, _ in candidate.owners}
    with_parameters = {name for name in matched if modules[name]._parameters}
    if empty := sorted(with_parameters - holding):
        warnings.warn(
            f"target_modules matched {len(with_parameters)} modules with parameters; {len(empty)} of them hold none "
            f"that requires grad and stay frozen: {listed(empty)}.",
            stacklevel=4,
        )


def _is_peft(modules: dict[str, nn.Module]) -> bool:
    """Whether PEFT has added adapters to the model, and so frozen its base."""
    return any(hasattr(module, "peft_config") or hasattr(module, "base_layer") for module in modules.values())


def _report_quantized(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Warns of quantized weights that stay frozen in a model that is not frozen otherwise."""
    quantized = [name for name, module in modules.items() if is_quantized(module._parameters.get("weight"))]
    others = (p for name, p in model.named_parameters() if name.rpartition(".")[0] not in quantized)
    if quantized and all(parameter.requires_grad for parameter in others) and not _is_peft(modules):
        warnings.warn(
            f"{len(quantized)} quantized weights cannot require grad and stay frozen: {listed(quantized)}. To "
            'train entries of them too, name their layers with target_modules, such as "all-linear".',
            stacklevel=4,
        )
