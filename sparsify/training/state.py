"""State dicts of a sparsified model, and the hooks that keep its weights and entries in step with them.

    root forward        the weights are refreshed if the flat delta was written to by anything but an optimizer step
    root state_dict     as well, so that a saved weight is the trained one; and before that of a part saved by itself
    load_state_dict     a state dict of other settings is refused. The entries are filled up to their full size;
                        afterwards the weights are in step
    that of a part      its weights are taken for the values that run before anything uses or writes them
    trained state       the part of a state dict that the base does not have, O(budget): the flat delta, the position
                        and the entries; parameters that are trained dense, pruned, or not the base's; buffers
                        that training changed. ``load_state_dict`` of the same model, sparsified anew on the same base,
                        takes it without the frozen weights

All hooks are plain functions, so that a model with them pickles and deep-copies.
"""

import sys
import warnings
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparsify.common.names import ENGINE, POSITION, SETTINGS
from sparsify.common.shards import is_fully_sharded, is_shard
from sparsify.core.entries import BASE, IDS, VALUES, count_by_tensor
from sparsify.core.module import masked_tensors
from sparsify.delta.entries import NamedTensors
from sparsify.delta.format import replace_file
from sparsify.errors import BaseMismatchError, SparsifyError
from sparsify.training.distributed import check_no_stage, check_sharding
from sparsify.training.engine import Engine
from sparsify.training.entries import BUFFERS
from sparsify.training.export import UNKNOWN_VALUES, changed_buffers, stored_whole
from sparsify.training.optimizer_steps import FROZEN, note_values
from sparsify.training.plan import STATE
from sparsify.training.settings import EXTENDED, SUMMED, check_settings, record_settings
from sparsify.training.weights import check_trained

# attributes of the root
NOT_BROADCAST = "_ddp_params_and_buffers_to_ignore"  # names that DDP leaves alone
IGNORED_ON_SAVE = "_keys_to_ignore_on_save"  # keys that transformers leaves out of save_pretrained()


def place_hooks(engine: Engine) -> None:
    root = engine.root
    root.__dict__[ENGINE] = engine
    engine.hooks = [
        root.register_forward_pre_hook(_before_forward, prepend=True),  # the root's own parameters are tapped after it
        root.register_forward_hook(_after_forward, always_call=True),
        root.register_state_dict_pre_hook(_before_state_dict),
        root.register_load_state_dict_pre_hook(_before_load),
        root.register_load_state_dict_post_hook(_after_load),
        *(m.register_load_state_dict_pre_hook(_before_module_load) for m in root.modules() if masked_tensors(m)),
    ]
    parts = [part for part in root.modules() if part is not root and {"save", "save_pretrained"} & set(dir(type(part)))]
    engine.hooks += [part.register_state_dict_pre_hook(_before_part_state_dict) for part in parts]
    setattr(root, NOT_BROADCAST, [*getattr(root, NOT_BROADCAST, ()), *_not_broadcast(root)])
    if hasattr(root, IGNORED_ON_SAVE) and not isinstance(getattr(type(root), IGNORED_ON_SAVE, None), property):
        setattr(root, IGNORED_ON_SAVE, set(getattr(root, IGNORED_ON_SAVE) or ()) | set(STATE))


def remove_hooks(engine: Engine) -> None:
    root = engine.root
    if getattr(root, IGNORED_ON_SAVE, None):
        setattr(root, IGNORED_ON_SAVE, set(getattr(root, IGNORED_ON_SAVE)) - set(STATE))
    others = [name for name in vars(root).pop(NOT_BROADCAST, ()) if name not in _not_broadcast(root)]
    if others:
        setattr(root, NOT_BROADCAST, others)
    for handle in engine.hooks:
        handle.remove()
    root.__dict__.pop(ENGINE, None)


def _not_broadcast(root: nn.Module) -> list[str]:
    """What DDP may not broadcast: what it would not notice to have grown, and distributed.py compares, and DTensors."""
    frozen = [name for name, p in root.named_parameters() if is_shard(p) and not p.requires_grad]
    return [*BUFFERS, SETTINGS, *frozen]


def _before_forward(root: nn.Module, args: Any) -> None:
    if getattr(root, "_is_replica", False):
        raise SparsifyError("replicated by nn.DataParallel, the model trains nothing; set CUDA_VISIBLE_DEVICES to one.")
    engine: Engine = root.__dict__[ENGINE]
    if not engine.was_sharded and is_fully_sharded(root):
        check_sharding(engine.root, engine.tensors, engine.parallel)
        engine.was_sharded = True
        engine.hooks[0].remove()  # from now on before the hook of FSDP2 that gathers the weights
        engine.hooks[0] = root.register_forward_pre_hook(_before_forward, prepend=True)
    if not torch.compiler.is_dynamo_compiling() and not engine.entries.step:  # in a graph, a step of its own each time
        check_no_stage(root)
    engine.enter()


def _after_forward(root: nn.Module, args: Any, output: Any) -> None:
    engine: Engine = root.__dict__[ENGINE]
    engine.leave()
    trains = engine.current_root is None or engine.current_root.output.requires_grad
    if not trains and torch.is_grad_enabled() and _was_frozen(engine):
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(_refuse_frozen)


def _was_frozen(engine: Engine) -> bool:
    """Whether only parameters that are in no delta train, as after get_peft_model(); with none it is on purpose."""
    own = {id(tensor.parameter) for tensor in engine.tensors}
    others = {name for name, p in engine.root.named_parameters() if p.requires_grad and id(p) not in own}
    return not (engine.paused or others <= set(engine.dense_names))


def _refuse_frozen(grad: Tensor) -> None:
    raise SparsifyError(FROZEN)


def _before_state_dict(root: nn.Module, prefix: str, keep_vars: bool) -> None:
    engine: Engine = root.__dict__[ENGINE]
    engine.refresh()
    record_settings(engine)
    saves_adapter = getattr(root, "_hf_peft_config_loaded", False)  # transformers writes that alone
    writes_merged = STATE[0] in (getattr(root, IGNORED_ON_SAVE, None) or ()) and not (engine.paused or saves_adapter)
    for level, (frame, _) in enumerate(islice(walk_stack(sys._getframe()), 10 if writes_merged else 0), start=2):
        if frame.f_code.co_name == "save_pretrained" and frame.f_globals["__name__"].startswith("transformers."):
            what = "the merged model, base and trained entries in one, and no delta: SparseDelta.from_model(model)"
            warnings.warn(f"save_pretrained() writes {what}.save(folder) writes that, a small file.", stacklevel=level)


def _before_part_state_dict(part: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Sentence-transformers saves a model part by part, and so without the state dict of the root."""
    tensors = [] if prefix else [tensor for module in part.modules() for tensor in masked_tensors(module).values()]
    for tensor in tensors[:1]:
        tensor.collector.refresh()
    if packed := [tensor.name for tensor in tensors if tensor.is_quantized and tensor.count]:
        message = f"`{packed[0]}` is quantized, and a part saved by itself lacks its entries; save a SparseDelta, too."
        warnings.warn(message, stacklevel=3)


def _before_load(root: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Gives the state dict entries of the model's size, unless something is wrong with them there."""
    engine: Engine = root.__dict__[ENGINE]
    check_trained(engine, "load_state_dict()")
    note_values(engine)  # which load_state_dict(assign=True) replaces
    if engine.entries.catch_up() and engine.entries.problem() is None:
        engine.state_loaded()  # dcp.load() has written into the model's own tensors, which are loaded now
    own = {name: state_dict[prefix + name] for name in STATE if prefix + name in state_dict}
    saved = check_settings(engine, own)
    stored = {name: value for name, value in own.items() if name in BUFFERS}
    if own:
        state_dict[prefix + SETTINGS] = record_settings(engine)  # of this model's size
    engine.loading, engine.weights.loaded = (bool(stored), prefix, None), {}
    if not stored:
        values = state_dict.get(prefix + VALUES)
        if values is not None and not values.is_meta and bool(values[engine.unmasked :].any()):
            raise SparsifyError(f"load_state_dict(): {UNKNOWN_VALUES} To save a run, save trained_state(model).")
        return
    if len(stored) < len(BUFFERS):
        missing = ", ".join(f"`{name}`" for name in BUFFERS if name not in stored)
        raise SparsifyError(f"the state dict has entries, and lacks {missing}; expected all of them, or none.")
    if problem := engine.entries.problem(stored):
        raise SparsifyError(problem)
    engine.weights.write_base()  # entries that are unmasked here may be masked there
    engine.weights.mark_stale()
    needed = _needed(engine)
    names = (name for name, _ in engine.root.named_parameters(remove_duplicate=False))
    frozen = [prefix + name for name in names if name not in needed]
    has_frozen = any(state_dict[name].numel() for name in frozen if name in state_dict)  # more than a placeholder
    if len(own) == len(STATE) and not has_frozen:  # a trained state
        try:
            _check_same_base(engine, stored, needed)
        except SparsifyError:
            engine.weights.write()
            raise
        engine.loading = True, prefix, needed
        for name in frozen:
            state_dict.pop(name, None)
    for name in (IDS, BASE):
        entries = stored[name][: int(stored[POSITION][2])]
        entries = entries.long() if name == IDS else entries
        state_dict[prefix + name] = torch.cat([entries, entries.new_zeros(engine.values.numel() - entries.numel())])
    if engine.steps is None:
        engine.steps = saved.get("steps")
    engine.extended_at, engine.policy.summed = saved.get(EXTENDED, 0), saved.get(SUMMED, int(stored[POSITION][0]))


def _after_load(root: nn.Module, incompatible_keys: Any) -> None:
    engine: Engine = root.__dict__[ENGINE]
    has_entries, prefix, needed = engine.loading
    engine.was_sorted &= not has_entries
    if needed is not None:
        missing = incompatible_keys.missing_keys
        missing[:] = [name for name in missing if not name.startswith(prefix) or name[len(prefix) :] in needed]
    engine.state_loaded(has_entries=has_entries)


def _before_module_load(module: nn.Module, state_dict: NamedTensors, prefix: str, *_: Any) -> None:
    """Notes the masked weights that a module loads, whether the root loads them or a part of it."""
    for attribute, tensor in masked_tensors(module).items():
        if prefix + attribute in state_dict and not tensor.is_quantized:
            engine: Engine = tensor.collector
            check_trained(engine, "load_state_dict()")
            engine.weights.loaded[tensor] = module, attribute  # type: ignore[index]


def trained_state_of(engine: Engine, model: nn.Module, state_dict: NamedTensors | None = None) -> dict[str, Tensor]:
    """The part of a model's state dict that the base does not have; all of it outside of the engine's root."""
    state_dict = model.state_dict() if state_dict is None else state_dict
    prefix = _prefix(engine, model)
    needed = _needed(engine) | set(changed_buffers(engine))
    first_names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}  # a tied tensor's
    names = [n for n in state_dict if n in first_names and (not n.startswith(prefix) or n[len(prefix) :] in needed)]
    if gone := sorted({prefix + name for name in needed} & first_names - state_dict.keys()):
        problem = f"`{gone[0]}` is not in the model's state dict: a hook renames it, or leaves it out"
        raise SparsifyError(f"{problem}; remove that until training is done, or save the whole state_dict().")
    kept = {name: state_dict[name].detach() for name in names}
    count = int(kept[prefix + POSITION][2])
    # torch.save() of a part of a buffer would write all of it
    kept.update({prefix + name: kept[prefix + name][:count].clone() for name in (IDS, BASE)})
    if max(engine.values.numel(), engine.entries.ends[-1]) < 2**31:
        kept[prefix + IDS] = kept[prefix + IDS].int()
    return kept


def write_trained_state(
    engine: Engine, model: nn.Module, file: Path, state_dict: NamedTensors | None = None, **metadata: str
) -> None:
    """Writes :func:`trained_state_of` into a file that ``load_state_dict`` takes, and ``from_pretrained`` refuses."""
    state = {name: value.contiguous() for name, value in trained_state_of(engine, model, state_dict).items()}
    needed = _needed(engine)
    left_out = [name for name, _ in engine.root.named_parameters() if name not in needed]
    # an empty tensor for one of these: transformers refuses it, where it would draw a missing one
    state |= {_prefix(engine, model) + name: torch.empty(0) for name in left_out[:1]}
    metadata = {"format": "pt", "sparsify": "trained state", **metadata}
    replace_file(file, safetensors.torch.save(state, metadata))


def _prefix(engine: Engine, model: nn.Module) -> str:
    """What the names of the engine's root begin with in a model that is, or holds, it."""
    return next(f"{name}." if name else "" for name, module in model.named_modules() if module is engine.root)


def _check_same_base(engine: Engine, stored: NamedTensors, needed: set[str]) -> None:
    """Raises where the entries of a trained state belong to another base than the weights are at this moment."""
    count = int(stored[POSITION][2])
    ids, order = stored[IDS][:count].long().cpu().sort()
    base = stored[BASE][:count].cpu()[order]
    counts = count_by_tensor(ids, engine.entries.ends).tolist()
    for tensor, own, values in zip(engine.tensors, ids.split(counts), base.split(counts), strict=True):
        if tensor.name in needed or not own.numel():
            continue  # it comes with the trained state
        here = tensor.take((own - tensor.offset).to(tensor.parameter.device)).cpu()
        dtype = torch.promote_types(here.dtype, values.dtype)
        if not torch.equal(here.to(dtype), values.to(dtype)):
            other = f"`{tensor.name}` has other pretrained values than the model that this checkpoint was trained from;"
            remedy = "build the model from the same base, in the same dtype, and sparsify it as then."
            raise BaseMismatchError(f"{other} nothing was loaded: {remedy}")


def _needed(engine: Engine) -> set[str]:
    """Names, in the root, of everything that a trained state has in any case."""
    masked = {tensor.name for tensor in engine.tensors}
    trained = {name for name, parameter in engine.root.named_parameters() if parameter.requires_grad}
    return {*STATE, *stored_whole(engine)} | (trained - masked)
