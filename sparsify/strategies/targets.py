"""Candidates: the tensors that may be trained, in ``named_parameters`` order, and the patterns that narrow them."""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from operator import mul
from typing import Any

from torch import nn

from sparsify.common.names import input_table, listed
from sparsify.common.quantized import is_quantized
from sparsify.core.install import frozen_row
from sparsify.errors import SparsifyError

ALL_LINEAR = "all-linear"
PEFT_SAVED = "modules_to_save"  # the component of a module's name under which PEFT keeps its dense modules
_TOKENS = "trainable_token_indices"
Pattern = str | list[str] | tuple[str, ...] | set[str] | None
TokenIndices = list[int] | dict[str, list[int]] | None
Owner = tuple[str, nn.Module, str]  # module name, module, attribute


@dataclass(frozen=True)
class Candidate:
    """One tensor parameter that may be trained."""

    name: str  # its first one in ``named_parameters``
    parameter: nn.Parameter
    owners: tuple[Owner, ...]  # every place that holds it; several where weights are tied
    rows: tuple[int, ...] | None = None  # of chosen tokens, trained whole, while the others are frozen


@dataclass(frozen=True)
class Targets:
    """A model's trainable parameters: candidates, those trained dense, and those to freeze, by name."""

    candidates: tuple[Candidate, ...]
    saved: dict[str, nn.Parameter]
    frozen: dict[str, nn.Parameter]


def find_targets(
    model: nn.Module, target_modules: Pattern = None, exclude_modules: Pattern = None,
    modules_to_save: list[str] | None = None, token_indices: TokenIndices = None,
) -> Targets:  # fmt: skip
    """Sorts the parameters that require grad into candidates, dense ones and those to freeze.

    A quantized weight cannot require grad. It is a candidate where ``target_modules`` names its module, but never in a
    PEFT model, whose base is frozen. The patterns are those of :func:`match_modules`.
    """
    if isinstance(modules_to_save, str):
        raise SparsifyError(f"modules_to_save={modules_to_save!r}; expected a list, as in [{modules_to_save!r}].")
    modules = dict(model.named_modules())
    whole = match_modules(model, modules_to_save or None, "modules_to_save")
    to_save = with_children(whole, modules)
    excluded = with_children(match_modules(model, exclude_modules, "exclude_modules"), modules)
    targeted = set(modules) if target_modules is None else match_modules(model, target_modules, "target_modules")
    dense = to_save | {name for name in modules if PEFT_SAVED in name.split(".")}
    targeted -= excluded | dense
    rows = _find_rows(model, token_indices, modules, dense)
    takes_quantized = target_modules is not None and not is_peft(modules)
    owners: dict[nn.Parameter, list[Owner]] = defaultdict(list)
    for module_name, module in modules.items():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners[parameter].append((module_name, module, attribute))
    candidates, saved, frozen = list[Candidate](), dict[str, nn.Parameter](), dict[str, nn.Parameter]()
    quantized = []  # names of modules
    for parameter, places in owners.items():
        holders = {holder for holder, _, _ in places}
        module_name, _, attribute = places[0]
        name = f"{module_name}.{attribute}" if module_name else attribute
        if packed := is_quantized(parameter):
            quantized.append(module_name)
            if inside := sorted(holders & to_save):
                text = f"`{inside[0]}` is in modules_to_save, but is quantized and cannot be trained whole:"
                raise SparsifyError(f"{text} do not quantize it (bitsandbytes: llm_int8_skip_modules=[{inside[0]!r}]).")
        can_train = (parameter.requires_grad and parameter.numel()) or (packed and takes_quantized)
        if holders & dense and (tied := sorted(holders & (excluded - dense))):
            raise SparsifyError(f"`{name}` is in modules_to_save, and tied to `{tied[0]}` in exclude_modules.")
        if parameter in rows or (can_train and holders & targeted and not holders & (dense | excluded)):
            candidates.append(Candidate(name, parameter, tuple(places), rows.get(parameter)))
        elif parameter.requires_grad:
            (saved if holders & dense else frozen)[name] = parameter
    for name in sorted(whole):
        if (own := [*modules[name].parameters()]) and not any(parameter.requires_grad for parameter in own):
            remedy = "requires_grad_(True) before sparsify(), or leave it out"
            raise SparsifyError(f"`{name}` is in modules_to_save, but is frozen: call its {remedy}.")
    if all(candidate.rows for candidate in candidates):
        raise SparsifyError(_nothing_left(owners, target_modules))
    if target_modules is not None:
        _warn_of_frozen({name for name in targeted if modules[name]._parameters}, candidates)
    elif quantized and not is_peft(modules):
        _warn_of_quantized(quantized, owners)
    return Targets(tuple(candidates), saved, frozen)


def _find_rows(
    model: nn.Module, tokens: TokenIndices, modules: Mapping[str, nn.Module], dense: set[str]
) -> dict[nn.Parameter, tuple[int, ...]]:
    """The rows of ``trainable_token_indices`` by the table that has them, as in PEFT's LoraConfig."""
    rows: dict[nn.Parameter, tuple[int, ...]] = {}
    if tokens is not None and not isinstance(tokens, dict):
        table = input_table(model)
        named = (n for n, m in modules.items() if table is not None and m._parameters.get("weight") is table)
        tokens = {next(named, "embed_tokens"): tokens}
    for suffix, chosen in (tokens or {}).items():
        for name in sorted(match_modules(model, [suffix], _TOKENS)):
            module = modules[name]
            weight: Any = module._parameters.get("weight")
            is_table = isinstance(module, (nn.Embedding, nn.Linear)) and weight is not None and not is_quantized(weight)
            if not is_table or name in dense:
                problem = "trained whole by modules_to_save" if is_table else "no plain embedding or output layer"
                raise SparsifyError(f"{_TOKENS}: `{name}` ({type(module).__name__}) is {problem}; leave it out.")
            owners = [(own, key) for own in modules.values() for key, p in own._parameters.items() if p is weight]
            padding = frozen_row(owners)
            given, size = chosen if isinstance(chosen, (list, tuple)) else [], len(weight)
            own = tuple(sorted({t for t in given if type(t) is int and 0 <= t < size and t != padding}))
            if not own or len(own) < len(given) or rows.setdefault(weight, own) != own:
                expected = f"expected for `{name}` a list of different tokens from 0 to {size - 1:,}, without its"
                end = f"padding_idx ({padding}), and for tied tables one and the same."
                raise SparsifyError(f"{_TOKENS}={tokens!r:.200}; {expected} {end}")
    return rows


def _nothing_left(parameters: Iterable[nn.Parameter], target_modules: Pattern) -> str:
    if not any(parameter.requires_grad for parameter in parameters):
        remedy = 'Quantized weights cannot; name the layers to train with target_modules, such as "all-linear".'
        return f"no parameter of the model requires grad; call model.requires_grad_(True) before sparsify(). {remedy}"
    problem = f"target_modules={target_modules!r} (less exclude_modules and modules_to_save) matches no module with"
    remedy = "name modules that own weights, such as the linear layers."
    return f"no trainable parameter is left: {problem} parameters that require grad; {remedy}"


def _warn_of_frozen(matched: set[str], candidates: Iterable[Candidate]) -> None:
    if empty := sorted(matched - {holder for candidate in candidates for holder, _, _ in candidate.owners}):
        found = f"target_modules matched {len(matched)} modules with parameters; {len(empty)} of them"
        warnings.warn(f"{found} hold none that requires grad and stay frozen: {listed(empty)}.", stacklevel=4)


def _warn_of_quantized(quantized: list[str], owners: Mapping[nn.Parameter, list[Owner]]) -> None:
    if all(parameter.requires_grad for parameter, places in owners.items() if places[0][0] not in quantized):
        text = f"{len(quantized)} quantized weights cannot require grad and stay frozen: {listed(quantized)}. To train"
        warnings.warn(f'{text} entries of them, name their layers in target_modules, as "all-linear".', stacklevel=4)


def check_own_memory(model: nn.Module, candidates: Iterable[Candidate]) -> None:
    """Raises ``SparsifyError`` where a candidate shares memory with another parameter, such as its transpose."""
    spans = []  # first byte, end and name of every plain parameter whose memory has no gaps
    for name, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter and not parameter.is_meta and parameter.numel():
            shape, strides = parameter.shape, parameter.stride()
            if sum(map(mul, shape, strides)) - sum(strides) + 1 == parameter.numel():
                spans.append((parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, name))
    trained = {candidate.name for candidate in candidates}
    furthest = (0, "")  # end of the memory seen so far, and the parameter that ends there
    for start, end, name in sorted(spans):
        pair = [furthest[1], name]
        if start < furthest[0] and not trained.isdisjoint(pair):
            first, other = pair if pair[0] in trained else pair[::-1]
            problem = f"`{first}` shares its memory with `{other}`, and each would overwrite the other's entries"
            raise SparsifyError(f"{problem}; untie them, or make them one parameter (PEFT's ensure_weight_tying=True).")
        furthest = max(furthest, (end, name))


def match_modules(model: nn.Module, pattern: Pattern, argument: str) -> set[str]:
    """Returns the first names of the modules that a pattern matches under any of their names.

    The pattern is a list of suffixes, a regular expression for the whole name, or ``"all-linear"``: every linear layer
    but the output head. One that matches nothing is an error that calls it by the name of its ``argument``.
    """
    if pattern is None:
        return set()
    if not isinstance(pattern, (str, list, tuple, set)):
        raise SparsifyError(f"{argument}={pattern!r}; expected a list of names' ends, or a regular expression.")
    first_names = {module: name for name, module in model.named_modules()}
    if pattern == ALL_LINEAR:  # as PEFT's
        head = getattr(model, "get_output_embeddings", lambda: None)()
        linear = [each for each in first_names if isinstance(each, nn.Linear) or type(each).__name__ == "Conv1D"]
        return {first_names[module] for module in linear if module is not head}
    names = {name: first_names[module] for name, module in model.named_modules(remove_duplicate=False)}
    is_regex, found = isinstance(pattern, str), set[str]()
    matches = re.fullmatch if is_regex else _is_end
    for part in [pattern] if isinstance(pattern, str) else pattern:
        try:
            hits = {first for name, first in names.items() if matches(part, name)}
        except re.error as error:
            raise SparsifyError(f"{argument}={pattern!r} is not a regular expression: {error}.") from None
        if not hits:
            raise SparsifyError(_no_match(argument, part, names, is_regex=is_regex))
        found |= hits
    return found


def _is_end(suffix: str, name: str) -> bool:
    return f".{name}".endswith(f".{suffix}")


def with_children(parents: Iterable[str], names: Iterable[str]) -> set[str]:
    prefixes = tuple(f"{parent}." for parent in parents)
    return {name for name in names if f"{name}.".startswith(prefixes)}


def _no_match(argument: str, pattern: str, names: Iterable[str], *, is_regex: bool) -> str:
    if is_regex and get_close_matches(pattern.lower(), [ALL_LINEAR], cutoff=0.8):
        return f"{argument}={pattern!r} matches no module of the model. Did you mean {ALL_LINEAR!r}?"
    if is_regex and (number := sum(_is_end(pattern, name) for name in names)):
        problem = f"{argument}={pattern!r} matches no module: a string is a regular expression for the whole name"
        return f"{problem}. Pass a list, {argument}=[{pattern!r}], to match the ends of names ({number:,} here)."
    last_parts = {name.rsplit(".", 1)[-1] for name in names if name}
    near = get_close_matches(pattern.rsplit(".", 1)[-1], last_parts, n=3, cutoff=0.5)
    hint = f" Near names: {', '.join(near)}." if near else f" Modules here: {', '.join(sorted(last_parts)[:12])}."
    return f"{argument}: {pattern!r} matches no module of the model; expected (the end of) a module's name.{hint}"


def is_peft(modules: Mapping[str, nn.Module]) -> bool:
    return any(hasattr(module, "peft_config") or hasattr(module, "base_layer") for module in modules.values())
