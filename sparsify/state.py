"""Keeping a sparsified model's weights, index buffers and state dicts in step: the module hooks.

    root forward        the weights are refreshed if the flat delta was written behind the optimizer's back
    root state_dict     likewise, so that a saved weight is the trained one
    load_state_dict     index buffers take the size they have in the state dict; afterwards the weights are in step

All hooks are plain functions, so that a model with them pickles and deep-copies.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sparsify.errors import SparsifyError
from sparsify.masked.module import masked_tensors
from sparsify.masked.tensor import MaskedTensor
from sparsify.names import ENGINE
from sparsify.unmasker import POSITION, Unmasker
from sparsify.values import VALUES

HANDLES = "_sparsify_handles"  # attribute of a module: the handles of the hooks placed here
PLAIN_LOADS = "_sparsify_plain_loads"  # attribute of the root while a state dict is loaded
IGNORED_ON_SAVE = "_keys_to_ignore_on_save"  # transformers leaves these keys out of save_pretrained()


def engine_of(model: nn.Module) -> Unmasker | None:
    """The engine of a model that is itself the root of a sparsification; ``None`` for any other module."""
    engine: Unmasker | None = model.__dict__.get(ENGINE)
    return engine


def install(engine: Unmasker) -> None:
    """Places the hooks on the root and on every module that holds index buffers."""
    root = engine.root
    root.__dict__[ENGINE] = engine
    root.__dict__[HANDLES] = [
        root.register_forward_pre_hook(_before_forward, prepend=True),  # the root's own parameters are tapped after it
        root.register_forward_hook(_after_forward, always_call=True),
        root.register_state_dict_pre_hook(_before_state_dict),
        root.register_load_state_dict_post_hook(_after_load),
    ]
    for module in _owners(engine):
        handle = module.register_load_state_dict_pre_hook(_before_load)
        module.__dict__.setdefault(HANDLES, []).append(handle)
    for module, keys in _own_keys(engine):
        setattr(module, IGNORED_ON_SAVE, set(getattr(module, IGNORED_ON_SAVE) or ()) | keys)


def uninstall(engine: Unmasker) -> None:
    """Takes back what :func:`install` did."""
    for module, keys in _own_keys(engine):
        setattr(module, IGNORED_ON_SAVE, set(getattr(module, IGNORED_ON_SAVE)) - keys)
    for module in {engine.root, *_owners(engine)}:
        for handle in module.__dict__.pop(HANDLES):
            handle.remove()
    del engine.root.__dict__[ENGINE]


def _owners(engine: Unmasker) -> dict[nn.Module, None]:
    return dict.fromkeys(tensor.owner for tensor in engine.tensors)


def _own_keys(engine: Unmasker) -> list[tuple[nn.Module, set[str]]]:
    """For every module that transformers can save: the keys in its state dict that are ours."""
    buffers = {(tensor.owner, name) for tensor in engine.tensors for name in tensor.buffer_names}
    buffers |= {(engine.root, VALUES), (engine.root, POSITION)}
    savable = [module for module in engine.root.modules() if hasattr(module, IGNORED_ON_SAVE)]
    return [
        (
            top,
            {f"{prefix}.{name}" if prefix else name for prefix, module in _paths(top) for name in _of(module, buffers)},
        )
        for top in savable
    ]


def _paths(top: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(top.named_modules(remove_duplicate=False))


def _of(module: nn.Module, buffers: set[tuple[nn.Module, str]]) -> list[str]:
    return [name for owner, name in buffers if owner is module]


def _before_forward(root: nn.Module, args: Any) -> None:
    if getattr(root, "_is_replica", False):
        raise SparsifyError(
            "the sparsified model was replicated by nn.DataParallel, whose copies train nothing; "
            "use one device (hide other GPUs with CUDA_VISIBLE_DEVICES)."
        )
    _refresh(root)
    _set_running(root, True)


def _after_forward(root: nn.Module, args: Any, output: Any) -> None:
    _set_running(root, False)


def _set_running(root: nn.Module, running: bool) -> None:
    engine = engine_of(root)
    if engine is not None:
        engine.running = running


def _before_state_dict(root: nn.Module, prefix: str, keep_vars: bool) -> None:
    _refresh(root)


def _refresh(root: nn.Module) -> None:
    engine = engine_of(root)
    if engine is not None:
        engine.refresh()


def _before_load(
    module: nn.Module,
    state_dict: dict[str, Tensor],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Gives the module's index buffers the sizes that they have in the state dict."""
    for tensor in masked_tensors(module).values():
        if tensor.owner is not module:
            continue
        engine = _engine(tensor)
        stored = [state_dict.get(prefix + name) for name in tensor.buffer_names]
        present = [buffer for buffer in stored if buffer is not None]
        if not present:
            if prefix + tensor.attribute in state_dict:
                engine.root.__dict__.setdefault(PLAIN_LOADS, set()).add(tensor)
            continue
        if len({buffer.shape for buffer in present}) != 1 or len(present) != len(stored) or present[0].dim() != 1:
            error_msgs.append(
                f"the index buffers of `{prefix}{tensor.attribute}` do not agree: "
                f"{[None if buffer is None else tuple(buffer.shape) for buffer in stored]}; "
                f"expected {', '.join(tensor.buffer_names)} of one length."
            )
            continue
        if present[1].numel() and int(present[1].max()) >= engine.capacity:
            error_msgs.append(
                f"the state dict has more than {engine.capacity:,} unmasked entries, which this model has room for; "
                "sparsify it with the budget of the model that was saved."
            )
            continue
        for name, buffer in zip(tensor.buffer_names, present, strict=True):
            own = module._buffers[name]
            assert own is not None
            module._buffers[name] = own.new_empty(buffer.shape)


def _engine(tensor: MaskedTensor) -> Unmasker:
    engine = tensor.collector
    assert isinstance(engine, Unmasker)
    return engine


def _after_load(root: nn.Module, incompatible_keys: Any) -> None:
    engine = engine_of(root)
    if engine is not None:
        engine.state_loaded(root.__dict__.pop(PLAIN_LOADS, set()))
