"""What the base does not have: LoRA's matrices, adapters, a head that its checkpoint lacks.

In: a model. Out: the names of its fresh parameters, and for each whose initial values look like a known initialiser's,
how to draw them again from a seed, so that a file needs to hold only what was trained of them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from sparsify.common.initializers import InitializerRecipe, recognise
from sparsify.common.names import plain_model, plain_name
from sparsify.common.raw_bits import digest
from sparsify.delta import hub
from sparsify.delta.checkpoint.reader import Checkpoint
from sparsify.delta.entries import DTYPES
from sparsify.errors import SparsifyError
from sparsify.strategies.targets import Pattern, match_modules

# the parts of a parameter's name by which AdapterHub's ``save_adapter`` tells an adapter's; the adapter's name follows
_ADAPTERHUB = "adapters|prefix_tunings|prefix_gates|loras|refts|prompt_tunings|shared_parameters|adapter_fusion_layer"
_COMMON_SCALES = (0.02, 1.0)  # of transformers and adapters, and of embeddings


MODES = ("store", "seed")


def find_new(model: nn.Module, fresh_modules: Pattern = None, saved: Iterable[str] = ()) -> tuple[str, ...]:
    """Names of the parameters that the base does not have, in ``named_parameters`` order.

    Those are what PEFT and adapters bring along, be it trained or not; what the checkpoint that a transformers model
    was loaded from lacks, if that is at hand; and what the user says.

    Args:
        model: any.
        fresh_modules: modules that the base does not have, in PEFT's words.
        saved: parameters that are stored whole anyway.
    """
    named = _match(model, fresh_modules)
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = set(_lacking(model)) | _brought_by_adapterhub(model)
    for path, module in model.named_modules():
        roots = [module] if path in named or _is_adapter(module) else _brought_by_peft(module)
        found |= {first_names[id(parameter)] for root in roots for parameter in _parameters(root)}
    found -= set(saved)
    return tuple(name for name in first_names.values() if name in found)


def find_recipes(model: nn.Module, names: Sequence[str], mode: str, seed: int) -> dict[str, InitializerRecipe]:
    """How to draw the initial values of fresh parameters again, for those that can be; none where they are stored.

    A tensor whose values are no known initialiser's (a trained one, or one that is computed from the base, as DoRA's
    magnitudes and PiSSA's factors are) has no draw.

    Args:
        model: any.
        names: of its fresh parameters.
        mode: ``"store"`` or ``"seed"``.
        seed: of the draws.

    Raises:
        SparsifyError: for another mode, or where there is nothing to draw.
    """
    if mode not in MODES:
        raise SparsifyError(f"fresh={mode!r}; expected one of {', '.join(map(repr, MODES))}.")
    if mode == "store":
        return {}
    if not names:
        raise SparsifyError(
            "fresh='seed' draws again what the base does not have, and this model has nothing of that sort beside "
            "modules_to_save: leave it out, or name such modules in fresh_modules=[...]."
        )
    draws = {name: draw for name in names if (draw := _find_draw(model, name, seed)) is not None}
    if left := [name for name in names if name not in draws]:
        warnings.warn(
            f"{len(left)} of {len(names)} fresh tensors have values that are no known initialiser's, and are stored "
            f"whole: {', '.join(left[:3])}{', ...' if len(left) > 3 else ''}.",
            stacklevel=3,
        )
    return draws


@contextmanager
def redrawn(
    model: nn.Module, draws: Mapping[str, InitializerRecipe]
) -> Iterator[dict[str, tuple[InitializerRecipe, str]]]:
    """Draws parameters again, in place; if the block fails they are what they were.

    Yields:
        Each draw with the digest of what was drawn.
    """
    parameters = {name: model.get_parameter(name) for name in draws}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data.copy_(draws[name].values(plain_name(name), tuple(parameter.shape), parameter.dtype))
        yield {name: (draw, digest(parameters[name])) for name, draw in draws.items()}
    except BaseException:
        for name, parameter in parameters.items():
            parameter.data.copy_(before[name])
        raise


def _match(model: nn.Module, fresh_modules: Pattern) -> set[str]:
    """Names of the modules that the user says are fresh, those within them included."""
    if fresh_modules is None:
        return set()
    tops = match_modules(model, fresh_modules, "fresh_modules")
    return {name for name, _ in model.named_modules() if any(name == top or name.startswith(f"{top}.") for top in tops)}


def _find_draw(model: nn.Module, name: str, seed: int) -> InitializerRecipe | None:
    values = model.get_parameter(name).detach()
    if values.dtype not in DTYPES.values() or values.is_meta or not values.numel():
        return None
    configured = getattr(getattr(model, "config", None), "initializer_range", None)
    # PEFT's init_lora_weights="gaussian" has a standard deviation of 1 / rank
    scales = {*_COMMON_SCALES, *([float(configured)] if configured else []), 1 / (values.shape or (1,))[0]}
    return recognise(values, tuple(scales), seed)


def _is_adapter(module: nn.Module) -> bool:
    """Whether a module is one of our own adapters."""
    kind = type(module)
    return "Adapter" in kind.__name__ and kind.__module__.startswith("sparsify.adapters.")


def _brought_by_adapterhub(model: nn.Module) -> set[str]:
    """Names of the parameters that AdapterHub's ``adapters`` put into a model; its layers hold the base's, too."""
    configs = (getattr(module, "adapters_config", None) for module in model.modules())
    config = next((config for config in configs if config is not None), None)
    if config is None:
        return set()
    added = "|".join(map(re.escape, (*config.adapters, *config.fusions)))
    pattern = re.compile(rf"(?:^|[._])(?:{_ADAPTERHUB})\.(?:{added})\.")
    return {name for name, _ in model.named_parameters() if pattern.search(name)}


def _brought_by_peft(module: nn.Module) -> list[Any]:
    """The modules and parameters of a PEFT model's module that are not the base's."""
    if hasattr(module, "peft_config") and "base_model" in module._modules:  # prompt encoders lie beside the base
        return [child for name, child in module._modules.items() if name == "prompt_encoder" and child is not None]
    names = getattr(module, "adapter_layer_names", ())
    parts = [getattr(module, name, None) for name in names if isinstance(name, str)]
    return [part for part in parts if isinstance(part, (nn.Module, nn.Parameter))]


def _parameters(root: Any) -> list[nn.Parameter]:
    return [root] if isinstance(root, nn.Parameter) else list(root.parameters())


def _lacking(model: nn.Module) -> list[str]:
    """Names of a transformers model's parameters that its checkpoint lacks; none where there is no telling."""
    inner = plain_model(model)
    folder = _checkpoint_folder(getattr(inner, "config", None))
    if folder is None or any(hasattr(module, "adapter_layer_names") for module in inner.modules()):
        return []  # PEFT renames the base's own tensors; what it adds is known without the checkpoint
    plain_names = {plain_name(name): name for name, _ in model.named_parameters()}
    try:
        return [plain_names[name] for name in Checkpoint(folder).lacking(plain_names)]
    except (SparsifyError, OSError):
        return []


def _checkpoint_folder(config: Any) -> Path | None:
    """Where the checkpoint that a model was loaded from is on this machine."""
    source = getattr(config, "_name_or_path", None)
    if not isinstance(source, str) or not source:
        return None
    if Path(source).is_dir():
        return Path(source)
    return hub.cached_folder(source, getattr(config, "_commit_hash", None))
