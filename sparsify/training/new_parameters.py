"""New parameters: those that the base does not have, such as LoRA's matrices, adapters, or a new head.

In: a model. Out: the names of its new parameters, and recipes that generate the initial values of some of them again
from a seed, so that a file holds only the trained entries of these.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.adapters.bottleneck import INITIAL_STD, Adapter
from sparsify.common.initializers import InitializerRecipe
from sparsify.common.names import listed, plain_model, plain_name
from sparsify.common.raw_bits import digest
from sparsify.delta import hub
from sparsify.delta.checkpoint.reader import Checkpoint
from sparsify.delta.entries import DTYPES
from sparsify.errors import SparsifyError
from sparsify.strategies.targets import Pattern, match_modules

# AdapterHub's ``save_adapter`` recognises an adapter's parameter by these parts of its name, followed by the adapter's
_ADAPTERHUB = "adapters|prefix_tunings|prefix_gates|loras|refts|prompt_tunings|shared_parameters|adapter_fusion_layer"
_MIN_SAMPLE, _MAX_SAMPLE = 256, 2**18  # entries needed to recognise a distribution, and entries that are sorted for it


def find_new(model: nn.Module, fresh_modules: Pattern = None, saved: Iterable[str] = ()) -> tuple[str, ...]:
    """Finds the parameters that the base does not have, trainable or not.

    Those are the parameters that PEFT and adapters add, those missing in the checkpoint that a transformers model was
    loaded from (if it is on this machine), and those of ``fresh_modules``, but for ``saved`` ones, stored whole anyway.
    Their names are in the order of ``named_parameters``.
    """
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    named = match_modules(model, fresh_modules, "fresh_modules")
    found = {*_missing_in_checkpoint(model), *_added_by_adapterhub(model)}
    for name, module in model.named_modules():
        for part in [module] if name in named or isinstance(module, Adapter) else _added_by_peft(module):
            parameters = [part] if isinstance(part, nn.Parameter) else part.parameters()
            found |= {first_names[id(parameter)] for parameter in parameters}
    found -= set(saved)
    return tuple(name for name in first_names.values() if name in found)


def find_recipes(model: nn.Module, names: Sequence[str], mode: str, seed: int) -> dict[str, InitializerRecipe]:
    """Finds recipes for the initial values of new parameters: of PEFT's LoRA and of adapters as they are initialised.

    A parameter with other values (trained, of another initialiser, or computed from the base) has none, and in mode
    ``"store"`` no parameter has. Raises for any mode but that and ``"seed"``, or for ``"seed"`` without new parameters.
    """
    if mode not in ("store", "seed"):
        raise SparsifyError(f"fresh={mode!r}; expected one of 'store', 'seed'.")
    if mode == "store":
        return {}
    if not names:
        raise SparsifyError(
            "fresh='seed' generates new parameters again, and this model has none except modules_to_save: leave it "
            "out, or name modules that the base does not have in fresh_modules=[...]."
        )
    found = {name: recipe for name in names if (recipe := _recognise(model.get_parameter(name), seed)) is not None}
    # of a trained LoRA or adapter, B or the bias is no longer zero; A or the weight may still look initialised
    recipes = {
        name: recipe for name, recipe in found.items() if (zeros := _zeros_of(name)) in found or zeros not in names
    }
    if left := [name for name in names if name not in recipes]:
        warnings.warn(
            f"{len(left)} of {len(names)} new parameters have other initial values than LoRA's or an adapter's, and "
            f"are stored whole: {listed(left)}.",
            stacklevel=3,
        )
    return recipes


@contextmanager
def redrawn(
    model: nn.Module, recipes: Mapping[str, InitializerRecipe]
) -> Iterator[dict[str, tuple[InitializerRecipe, str]]]:
    """Sets parameters to their recipes' values, yields the digests of these, and undoes it if the block fails."""
    parameters = {name: model.get_parameter(name) for name in recipes}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data.copy_(recipes[name].values(plain_name(name), tuple(parameter.shape), parameter.dtype))
        yield {name: (recipe, digest(parameters[name])) for name, recipe in recipes.items()}
    except BaseException:
        for name, parameter in parameters.items():
            parameter.data.copy_(before[name])
        raise


def _recognise(parameter: Tensor, seed: int) -> InitializerRecipe | None:
    """The recipe with the distribution of some values; ``None`` unless that is beyond doubt.

    Zeros are LoRA's B and adapters' biases; uniform between +- 1 / sqrt(inputs) is LoRA's A; normal with a standard
    deviation of 0.02 are adapters' weights.
    """
    values, size = parameter.detach(), parameter.numel()
    if values.dtype not in DTYPES.values() or values.is_meta or not size:
        return None
    if not values.any():
        return InitializerRecipe("constant", 0.0, seed)
    if size < _MIN_SAMPLE or values.dim() < 2:
        return None
    values = values.double().flatten(1)
    largest, bound = float(values.abs().max()), values.shape[1] ** -0.5
    sample = values.flatten()[:: -(-size // _MAX_SAMPLE)].sort().values
    if largest <= bound and _is_distribution((1 + sample / bound) / 2):
        return InitializerRecipe("uniform", bound, seed)
    if largest <= 8 * INITIAL_STD and _is_distribution(torch.special.ndtr(sample / INITIAL_STD)):
        return InitializerRecipe("normal", INITIAL_STD, seed)
    return None


def _zeros_of(name: str) -> str:
    """The parameter that is zero until a matrix is trained: LoRA's B for its A, the bias for a weight."""
    return name.replace("lora_A", "lora_B") if "lora_" in name else re.sub("weight$", "bias", name)


def _is_distribution(cumulative: Tensor) -> bool:
    """Kolmogorov-Smirnov test: ``cumulative`` is a distribution function at a sorted sample, maybe in bfloat16."""
    steps = torch.linspace(0, 1, cumulative.numel(), dtype=cumulative.dtype, device=cumulative.device)
    return bool((cumulative - steps).abs().max() < 2.5 / cumulative.numel() ** 0.5 + 2**-8)


def _added_by_adapterhub(model: nn.Module) -> set[str]:
    """Names of the parameters that AdapterHub's ``adapters`` put into a model; its layers hold the base's, too."""
    configs = (getattr(module, "adapters_config", None) for module in model.modules())
    config = next((config for config in configs if config is not None), None)
    if config is None:
        return set()
    added = "|".join(map(re.escape, (*config.adapters, *config.fusions)))
    pattern = re.compile(rf"(?:^|[._])(?:{_ADAPTERHUB})\.(?:{added})\.")
    return {name for name, _ in model.named_parameters() if pattern.search(name)}


def _added_by_peft(module: nn.Module) -> list[Any]:
    """The modules and parameters of a PEFT model's module that are not the base's."""
    if hasattr(module, "peft_config") and "base_model" in module._modules:  # prompt encoders are next to the base
        return [child for name, child in module._modules.items() if name == "prompt_encoder" and child is not None]
    names = getattr(module, "adapter_layer_names", ["modules_to_save"])  # PEFT 0.17's wrapper of these has none
    parts = [getattr(module, name, None) for name in names if isinstance(name, str)]
    return [part for part in parts if isinstance(part, (nn.Module, nn.Parameter))]


def _missing_in_checkpoint(model: nn.Module) -> list[str]:
    """Names of the parameters that a transformers model's checkpoint lacks; none where the checkpoint is not here."""
    inner = plain_model(model)
    config = getattr(inner, "config", None)
    source = getattr(config, "_name_or_path", None)
    if not isinstance(source, str) or not source or any(hasattr(m, "adapter_layer_names") for m in inner.modules()):
        return []  # PEFT renames the base's own tensors; those that it adds are found without the checkpoint
    here = Path(source).is_dir()
    folder = Path(source) if here else hub.cached_folder(source, getattr(config, "_commit_hash", None))
    plain_names = {plain_name(name): name for name, _ in model.named_parameters()}
    try:
        return [] if folder is None else [plain_names[name] for name in Checkpoint(folder).lacking(plain_names)]
    except (SparsifyError, OSError):
        return []
