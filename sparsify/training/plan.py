"""The plan of a sparsified model: everything that its engine is built from, settled before the model is changed.

New parameters are those that the base does not have, such as LoRA's matrices, adapters, or a new head; a delta stores
them whole. What came after the plan, and trains all the same, is found by ``find_unheld``.
"""

import re
import warnings
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sparsify.adapters.insert import Adapter
from sparsify.common.names import ENGINE, SETTINGS, base_name, check_module, listed, plain_model, plain_name
from sparsify.common.quantized import is_quantized
from sparsify.common.raw_bits import fingerprint
from sparsify.common.shards import check_parallel, full_values
from sparsify.core.entries import VALUES
from sparsify.core.install import Owners, frozen_row
from sparsify.core.module import TENSORS
from sparsify.core.schedule import Schedule
from sparsify.delta import hub
from sparsify.delta.checkpoint.reader import Checkpoint
from sparsify.delta.entries import is_resized
from sparsify.errors import SparsifyError
from sparsify.masked.quantized import QuantizedTensor
from sparsify.masked.swap import check_maskable
from sparsify.masked.tensor import ModelTensor
from sparsify.strategies.strategy import Strategy
from sparsify.strategies.targets import Candidate, Pattern, Targets, check_own_memory, match_modules
from sparsify.training.entries import BUFFERS

# AdapterHub's ``save_adapter`` recognises an adapter's parameter by these parts of its name, followed by the adapter's
_ADAPTERHUB = "adapters|prefix_tunings|prefix_gates|loras|refts|prompt_tunings|shared_parameters|adapter_fusion_layer"
STATE = (VALUES, *BUFFERS, SETTINGS)  # what the root's state dict has in addition to the model's own


@dataclass(frozen=True)
class Plan:
    """How a model is to be trained; an :class:`~sparsify.training.engine.Engine` is built from it in one go."""

    model: nn.Module  # still plain
    targets: Targets  # the candidates, and the parameters that are trained dense or frozen
    tensors: tuple[ModelTensor, ...]  # the candidates, by ascending number and offset
    owners: Mapping[Any, Owners]  # what holds each of them
    strategy: Strategy
    schedule: Schedule
    steps: int | None  # planned optimizer steps; ``None`` where the number becomes known later
    budget: int  # entries to unmask
    capacity: int  # entries that there is room for: the budget, or more where repeat-S touches more
    selected: Tensor  # (n,) int64 global ids of the entries that are chosen before training
    new_names: tuple[str, ...]  # parameters, dense ones apart, that the base does not have
    buffer_digests: Mapping[str, str]  # of the model's own buffers before anything ran
    seed: int  # of a random importance


def mask_candidates(targets: Targets) -> dict[ModelTensor, Owners]:
    """Makes masked tensors of the candidates, with the modules that hold them, none of which is changed."""
    found: dict[ModelTensor, Owners] = {}
    offset = 0
    for number, candidate in enumerate(targets.candidates):
        (owner, attribute), *_ = owners = [owner[1:] for owner in candidate.owners]
        kind = QuantizedTensor if is_quantized(candidate.parameter) else ModelTensor
        tensor = kind(number, owner, attribute, candidate.name, offset, frozen_row(owners), candidate.rows)
        found[tensor] = owners
        offset += tensor.numel
    return found


def check_model(model: Any) -> None:
    check_module(model)
    if any(isinstance(each, torch.jit.ScriptModule) for each in model.modules()):
        raise SparsifyError("a TorchScript module cannot be sparsified; sparsify the Python module it was made from.")
    if type(model).__name__ == "OptimizedModule":
        raise SparsifyError("the model is wrapped by torch.compile; call sparsify() first, then torch.compile(model).")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        how = "and train on one device" if isinstance(model, nn.DataParallel) else "before wrapping it"
        raise SparsifyError(f"the model is wrapped in {type(model).__name__}; call sparsify() on what is in it, {how}.")
    for name, module in model.named_modules():
        if not {ENGINE, TENSORS}.isdisjoint(vars(module)):
            raise SparsifyError(f"`{name or '(root)'}` is already sparsified; call desparsify(model) first.")
    if taken := [name for name in STATE if hasattr(model, name)]:
        raise SparsifyError(f"the model's own `{taken[0]}` is in the way; rename it, or sparsify the module within.")
    check_parallel(model)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise SparsifyError(f"`{name}` is lazy and has no values yet; run a forward pass before sparsify().")
        if parameter.is_inference() or torch.is_inference_mode_enabled():
            raise SparsifyError(f"`{name}` cannot train: load the model and call sparsify() outside of inference mode.")
        if hasattr(parameter, "ds_id"):
            raise SparsifyError(f"`{name}` is partitioned by DeepSpeed ZeRO stage 3; use stage 1 or 2, or FSDP2.")


def check_candidates(model: nn.Module, candidates: tuple[Candidate, ...]) -> None:
    check_own_memory(model, candidates)
    for candidate in candidates:
        for name, module, attribute in candidate.owners:
            path = name.split(".")
            around = [model.get_submodule(".".join(path[:end])) for end in range(len(path))]
            check_maskable(name, module, attribute, around)


def find_new(model: nn.Module, fresh_modules: Pattern = None, saved: Container[str] = ()) -> tuple[str, ...]:
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
    return tuple(name for name in first_names.values() if name in found and name not in saved)


def _added_by_adapterhub(model: nn.Module) -> set[str]:
    """Names of the parameters that AdapterHub's ``adapters`` put into a model; its layers hold the base's, too."""
    for module in model.modules():
        if (config := getattr(module, "adapters_config", None)) is not None:
            added = "|".join(map(re.escape, (*config.adapters, *config.fusions)))
            pattern = re.compile(rf"(?:^|[._])(?:{_ADAPTERHUB})\.(?:{added})\.")
            return {name for name, _ in model.named_parameters() if pattern.search(name)}
    return set()


def _added_by_peft(module: nn.Module) -> list[Any]:
    if hasattr(module, "peft_config") and "base_model" in module._modules:  # prompt encoders are next to the base
        child = module._modules.get("prompt_encoder")
        return [] if child is None else [child]
    names = getattr(module, "adapter_layer_names", ["modules_to_save"])  # PEFT 0.17's wrapper of these has none
    parts = [getattr(module, name, None) for name in names if isinstance(name, str)]
    return [part for part in parts if isinstance(part, (nn.Module, nn.Parameter))]


def find_resized(model: nn.Module) -> list[str]:
    """Finds parameters and buffers with another number of tokens, or labels, than in the model's checkpoint."""
    found = list[str]()
    for prefix, module in model.named_modules():
        if (checkpoint := _checkpoint(module)) is None:
            continue
        for name, tensor in (*module.named_parameters(prefix), *module.named_buffers(prefix)):
            own = base_name(name.removeprefix(f"{prefix}."))
            with suppress(SparsifyError):  # it is not in the checkpoint, or converted
                if not is_quantized(tensor) and is_resized(tensor.shape, checkpoint.layout(own).shape):
                    found.append(name)
        break  # what is within it was loaded with it
    return found


def find_unheld(engine: Any, model: nn.Module) -> str:
    """Names parameters that train, or trained, in ``model``, which is the engine's or holds it, and are in no delta."""
    own = dict(engine.root.named_parameters())
    held = {id(tensor.parameter) for tensor in engine.tensors}  # PEFT makes them require grad again
    held.update(id(own[name]) for name in (VALUES, *engine.dense_names, *engine.new_names) if name in own)
    # PEFT makes these require grad again as well, and no optimizer holds them: they count once they have changed
    frozen = {n: own[n] for n in engine.frozen_names if n in own and own[n].requires_grad}
    digests = engine.weights.base_digests
    held.update(id(p) for n, p in frozen.items() if digests.get(n) == (p.dtype, fingerprint(full_values(p))))
    trainable = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    late = [name for name in find_resized(engine.root) if name not in (*engine.new_names, *engine.dense_names)]
    replaced = [t.name for t in engine.tensors if own.get(t.name, t.parameter) is not t.parameter]
    trainable, replaced = ([f"`{plain_name(name)}`" for name in names] for names in (trainable, replaced))
    problems = []
    if trainable:
        reason = "they were added, replaced or made trainable after sparsify(), or are no part of the module given"
        remedy = "Do that first, give sparsify() the whole model, and name what is trained whole in modules_to_save"
        problems.append(f"{listed(trainable)} can train, but no delta holds them: {reason}. {remedy}; freeze the rest")
    if late:
        problems.append(f"{listed(late)} were resized after sparsify(), and no delta holds new rows: do that before")
    if replaced:
        problems.append(f"{listed(replaced)} were replaced after sparsify(): what was trained there is lost")
    return "; ".join(problems)


def warn_of_unheld(engine: Any, model: nn.Module, stacklevel: int = 3) -> None:
    if unheld := find_unheld(engine, model):
        warnings.warn(f"{unheld}.", stacklevel=stacklevel)


def _missing_in_checkpoint(model: nn.Module) -> list[str]:
    """Names of the parameters that a transformers model's checkpoint lacks; none where the checkpoint is not here."""
    checkpoint = _checkpoint(model)
    if checkpoint is None or any(hasattr(module, "adapter_layer_names") for module in plain_model(model).modules()):
        return []  # PEFT renames the base's own tensors; those that it adds are found without the checkpoint
    plain_names = {plain_name(name): name for name, _ in model.named_parameters()}
    # sentence-transformers stores a layer behind the transformer in a folder of its own, such as 2_Dense
    parts, folder = model.named_children(), Path(checkpoint.path)
    apart = [part for part, layer in parts if (folder / f"{part}_{type(layer).__name__}").is_dir()]
    return [plain_names[name] for name in checkpoint.lacking(plain_names) if name.partition(".")[0] not in apart]


def _checkpoint(model: nn.Module) -> Checkpoint | None:
    """The checkpoint that a transformers model was loaded from, if it is on this machine."""
    inner = plain_model(model)
    config = getattr(inner, "config", None) if hasattr(inner, "from_pretrained") else None
    source, commit = (getattr(config, key, None) for key in ("_name_or_path", "_commit_hash"))
    if source:
        with suppress(SparsifyError, OSError):
            folder = Path(source) if Path(source).is_dir() else hub.cached_folder(source, commit)
            return None if folder is None else Checkpoint(folder)
    return None
