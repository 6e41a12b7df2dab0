"""Keeping a sparsified model's weights, index buffers and state dicts in step: the module hooks.

    root forward        the weights are refreshed if the flat delta was written behind the optimizer's back
    root state_dict     likewise, so that a saved weight is the trained one
    load_state_dict     one that was saved with other settings is refused. Index buffers are filled up to their full
                        size; afterwards the weights are in step.
                        A trained state (resuming.py) has no frozen weights, and they are not missed

All hooks are plain functions, so that a model with them pickles and deep-copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparsify.common.names import ENGINE
from sparsify.common.shards import is_fully_sharded
from sparsify.errors import SparsifyError
from sparsify.masked.index_buffers import BUFFERS, padded, problem_with
from sparsify.masked.module import check_not_exported
from sparsify.training.engine import POSITION, STATE, Engine
from sparsify.training.flat_delta import VALUES
from sparsify.training.settings import SETTINGS, adopt_settings, check_settings, record_settings
from sparsify.training.sharding import check_sharding
from sparsify.training.trained_state import PartialLoad, check_same_base, is_trained_state

HANDLES = "_sparsify_handles"  # attribute of the root: the handles of the hooks placed here
SHARDED = "_sparsify_sharded"  # attribute of the root: it has run forward under FSDP2
PLAIN_LOADS = "_sparsify_plain_loads"  # attribute of the root while a state dict is loaded
PARTIAL_LOAD = "_sparsify_partial_load"  # likewise, where it is a trained state
NOT_BROADCAST = "_ddp_params_and_buffers_to_ignore"  # DDP leaves these names of the root alone
IGNORED_ON_SAVE = "_keys_to_ignore_on_save"  # transformers leaves these keys out of save_pretrained()


def engine_of(model: nn.Module) -> Engine | None:
    """The engine of a model that is itself the root of a sparsification; ``None`` for any other module."""
    engine: Engine | None = model.__dict__.get(ENGINE)
    return engine


def install(engine: Engine) -> None:
    """Places the hooks on the root."""
    root = engine.root
    root.__dict__[ENGINE] = engine
    root.__dict__[HANDLES] = [
        root.register_forward_pre_hook(_before_forward, prepend=True),  # the root's own parameters are tapped after it
        root.register_forward_hook(_after_forward, always_call=True),
        root.register_state_dict_pre_hook(_before_state_dict),
        root.register_load_state_dict_pre_hook(_before_load),
        root.register_load_state_dict_post_hook(_after_load),
    ]
    # the ranks see to it themselves that these are alike; they grow, and in a broadcast that would go unnoticed
    setattr(root, NOT_BROADCAST, [*getattr(root, NOT_BROADCAST, ()), *BUFFERS, POSITION, SETTINGS])
    # a checkpoint with packed weights has no merged ones, so it keeps what was trained beside them
    if hasattr(root, IGNORED_ON_SAVE) and not any(tensor.packed for tensor in engine.tensors):
        setattr(root, IGNORED_ON_SAVE, set(getattr(root, IGNORED_ON_SAVE) or ()) | set(STATE))


def uninstall(engine: Engine) -> None:
    """Takes back what :func:`install` did."""
    root = engine.root
    if hasattr(root, IGNORED_ON_SAVE):
        setattr(root, IGNORED_ON_SAVE, set(getattr(root, IGNORED_ON_SAVE)) - set(STATE))
    others = [name for name in getattr(root, NOT_BROADCAST) if name not in STATE]
    setattr(root, NOT_BROADCAST, others) if others else delattr(root, NOT_BROADCAST)
    for handle in root.__dict__.pop(HANDLES):
        handle.remove()
    del root.__dict__[ENGINE]


def _before_forward(root: nn.Module, args: Any) -> None:
    check_not_exported()
    if getattr(root, "_is_replica", False):
        raise SparsifyError(
            "the sparsified model was replicated by nn.DataParallel, whose copies train nothing; "
            "use one device (hide other GPUs with CUDA_VISIBLE_DEVICES)."
        )
    if is_fully_sharded(root) and SHARDED not in root.__dict__:
        _first_under_fsdp(root)
    engine = engine_of(root)
    if engine is not None:
        engine.enter()


def _first_under_fsdp(root: nn.Module) -> None:
    """From now on the weights are refreshed before FSDP2 gathers them, which it does in a hook of its own."""
    engine = engine_of(root)
    if engine is None:
        return
    check_sharding(engine)
    root.__dict__[SHARDED] = True
    handles = root.__dict__[HANDLES]
    handles[0].remove()
    handles[0] = root.register_forward_pre_hook(_before_forward, prepend=True)


def _after_forward(root: nn.Module, args: Any, output: Any) -> None:
    engine = engine_of(root)
    if engine is None:
        return
    engine.leave()
    if torch.is_grad_enabled() and engine.was_frozen:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(_refuse_frozen)


def _refuse_frozen(grad: Tensor) -> None:
    raise SparsifyError(
        f"`{VALUES}` does not require grad, and parameters do that no delta holds: this backward pass trains nothing "
        "that was sparsified. Something has frozen all parameters since sparsify() and added its own: get_peft_model() "
        f"does, and trainers that are given a peft_config. Call sparsify() afterwards, or "
        f"model.{VALUES}.requires_grad_(True). To train these parts alone for a while, let it require grad, and give "
        "the optimizer only them."
    )


def _before_state_dict(root: nn.Module, prefix: str, keep_vars: bool) -> None:
    engine = engine_of(root)
    if engine is not None:
        engine.refresh()
        record_settings(engine)


def _before_load(root: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Gives the state dict index buffers of the model's size, unless something is wrong with them there."""
    engine = engine_of(root)
    if engine is None:
        return
    engine.note_values()  # which load_state_dict(assign=True) replaces
    for left in (PARTIAL_LOAD, PLAIN_LOADS):  # by one that failed
        root.__dict__.pop(left, None)
    own = {name: state_dict[prefix + name] for name in STATE if prefix + name in state_dict}
    saved = check_settings(engine, own)
    stored = {name: value for name, value in own.items() if name in BUFFERS}
    if own:
        state_dict[prefix + SETTINGS] = record_settings(engine)  # of this model's size; earlier versions have none
    if not stored:
        root.__dict__[PLAIN_LOADS] = {
            tensor for tensor in engine.tensors if prefix + tensor.name in state_dict and not tensor.packed
        }
    elif problem := problem_with(stored, [tensor.numel for tensor in engine.tensors], engine.capacity):
        raise SparsifyError(problem)
    else:
        engine.weights.write_base()  # what was unmasked here may be masked there
        engine.weights.mark_stale()
        if is_trained_state(engine, state_dict, prefix):
            try:
                check_same_base(engine, stored)
            except SparsifyError:
                engine.weights.write()
                raise
            root.__dict__[PARTIAL_LOAD] = PartialLoad(engine, state_dict, prefix)
        state_dict.update({prefix + name: entries for name, entries in padded(stored, engine.capacity).items()})
        adopt_settings(engine, saved)


def _after_load(root: nn.Module, incompatible_keys: Any) -> None:
    engine = engine_of(root)
    if engine is not None:
        partial = root.__dict__.pop(PARTIAL_LOAD, None)
        if partial is not None:
            incompatible_keys.missing_keys[:] = partial.without_frozen(incompatible_keys.missing_keys)
        engine.state_loaded(root.__dict__.pop(PLAIN_LOADS, set()))
