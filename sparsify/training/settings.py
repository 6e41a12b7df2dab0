"""The settings of a run: kept in its state dict, compared when that is loaded, and extended on request.

In: the engine of a sparsified model. Out: the settings as a tensor, since checkpoints hold nothing else; an error where
a state dict was saved with others; or a longer flat delta, with the optimizer's state for it.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim import Optimizer

from sparsify.common.names import RECORD, SETTINGS
from sparsify.common.raw_bits import digest
from sparsify.core.entries import BASE, IDS, VALUES
from sparsify.errors import SparsifyError
from sparsify.strategies.importance import Random
from sparsify.strategies.strategy import Given, Increment, Repeat, check_steps, resolve_budget, resolve_capacity
from sparsify.training.engine import Engine
from sparsify.training.entries import SparseValues
from sparsify.training.export import record_of
from sparsify.training.optimizer_steps import holds

EXTENDED, SUMMED = "extended_at", "summed"  # in the tensor with the settings: no settings, but part of the state
_SIZE = 512  # bytes for the settings: the steps may become known in one copy of a model and not in another


def settings_of(engine: Engine) -> dict[str, Any]:
    """The settings that a run depends on once it has begun, in JSON types; a state dict itself has the entries."""
    strategy, schedule = engine.strategy, engine.policy.schedule
    shapes = [(t.name, tuple(t.shape), *([] if t.rows is None else [t.rows])) for t in engine.tensors]
    names = hashlib.sha256(repr(shapes).encode()).hexdigest()
    candidates = f"{len(engine.tensors)} tensors of {engine.entries.ends[-1]:,} entries, digest {names[:12]}"
    settings = {**strategy.to_dict(), "budget": engine.budget, "candidates": candidates}
    settings["modules_to_save"] = f"{len(engine.dense_names)} parameters"
    if isinstance(strategy.selection, Increment):
        settings["schedule"] = {"name": schedule.shape, "every": schedule.every, "until": schedule.until}
        settings["steps"] = engine.steps
    if isinstance(strategy.selection, Repeat):
        settings["capacity"] = engine.values.numel()
    if isinstance(strategy.selection, Given):
        settings["entries"] = f"{engine.unmasked:,} given ones, digest {digest(engine.entries.ids)[:12]}"
    if isinstance(strategy.importance, Random) and isinstance(strategy.selection, (Increment, Repeat)):
        settings["seed"] = engine.seed
    return settings


def record_settings(engine: Engine) -> Tensor:
    """Sets and returns the root's buffer (n,) uint8, as long in all copies: settings and a delta's record, as JSON."""
    record = record_of(engine)
    state = {EXTENDED: engine.extended_at, SUMMED: engine.policy.summed}
    text = json.dumps({**settings_of(engine), **state, RECORD: record}, default=str)
    size = 1 << (_SIZE + len(json.dumps(record, default=str))).bit_length()
    packed = torch.frombuffer(bytearray(text.ljust(size).encode()), dtype=torch.uint8).to(engine.values.device)
    engine.root.register_buffer(SETTINGS, packed)
    return packed


def check_settings(engine: Engine, state: Mapping[str, Tensor]) -> dict[str, Any]:
    saved = _unpacked(state[SETTINGS]) if SETTINGS in state else {}
    own: dict[str, Any] = json.loads(json.dumps(settings_of(engine), default=str))
    differing = [name for name in own if name in saved and saved[name] != own[name]]
    if "steps" in differing and None in (saved["steps"], own["steps"]):
        differing.remove("steps")  # not known yet
    if differing:
        then, now = (", ".join(f"{name}={part[name]}" for name in differing) for part in (saved, own))
        both = f"with {then}, and this model is sparsified with {now}"
        remedy = "Call sparsify() with all settings of the saved run, target_modules and modules_to_save among them"
        more = "extend(model, ...) gives more budget or steps afterwards."
        raise SparsifyError(f"the state dict was saved {both}; nothing was loaded. {remedy}; {more}")
    return saved


def extend_run(engine: Engine, budget: int | float | None, steps: int | None, optimizer: Optimizer | None) -> None:
    if budget is not None and not isinstance(engine.strategy.selection, (Increment, Repeat)):
        problem = f"extend(budget={budget!r}) with {engine.strategy.selection}: its entries were chosen before training"
        learned = "SparseDelta.from_model(model).apply(base), then sparsify(base, ...)"
        raise SparsifyError(f"{problem}. Start afresh, or on what was learned: {learned}.")
    if engine.selected:
        raise SparsifyError("extend() between a backward pass and its optimizer step; call it after the step.")
    candidates = {tensor.name: tensor.num_candidates for tensor in engine.tensors if tensor.rows is None}
    kept = engine.policy.kept
    new_budget = engine.budget if budget is None else kept + resolve_budget(budget, engine.strategy, candidates)
    new_steps = engine.steps if steps is None else check_steps(steps)
    if new_budget < engine.budget or (new_steps or 0) < (engine.steps or 0):
        run = f"a run with budget={engine.budget:,} and steps={engine.steps}"
        raise SparsifyError(f"extend(budget={budget!r}, steps={steps!r}) of {run}; expected no less of either.")
    is_over = isinstance(engine.strategy.selection, Increment) and (new_steps or engine.step + 1) <= engine.step
    if new_budget > engine.budget and is_over:
        raise SparsifyError(f"extend(budget={budget!r}) after the last of {engine.step:,} steps: give more steps too.")
    schedule = engine.policy.schedule
    capacity = kept + resolve_capacity(new_budget - kept, engine.strategy, schedule, new_steps, candidates)
    is_longer = capacity > engine.values.numel()
    if engine.sharded and is_longer:
        raise SparsifyError("extend() of a model that fully_shard() has sharded; call it before fully_shard().")
    if optimizer is not None and not holds(optimizer, engine.values):
        raise SparsifyError(f"extend(): the optimizer does not hold `{VALUES}`; pass the one that does, or none.")
    if is_longer:
        _lengthen(engine, capacity, optimizer)
    engine.policy.budget, engine.policy.steps, engine.extended_at = new_budget, new_steps, engine.unmasked
    engine.restart()


@torch.no_grad()
def _lengthen(engine: Engine, capacity: int, optimizer: Optimizer | None) -> None:
    """Gives the root a longer flat delta; the new numbers and their optimizer state are zero."""
    old = engine.values
    more = 0, capacity - old.numel()
    new = SparseValues(pad(old.detach(), more), old.requires_grad)
    engine.root._parameters[VALUES] = new
    for name in (IDS, BASE):
        engine.root._buffers[name] = pad(engine.root.get_buffer(name), more)
    engine.entries.remember()
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
    if old in optimizer.state:
        state = optimizer.state[new] = optimizer.state.pop(old)
        of_entries = [name for name, own in state.items() if isinstance(own, Tensor) and own.shape == old.shape]
        state |= {name: pad(state[name], more) for name in of_entries}


def _unpacked(packed: Tensor) -> dict[str, Any]:
    try:
        saved = json.loads(packed.to("cpu", torch.uint8).numpy().tobytes())
    except (ValueError, RecursionError):
        saved = None
    numbers = [saved.get(key) for key in ("budget", "steps", EXTENDED, SUMMED)] if isinstance(saved, dict) else [False]
    if not all(number is None or (type(number) is int and number >= 0) for number in numbers):
        raise SparsifyError(f"`{SETTINGS}` of the state dict is damaged; nothing was loaded. Load what was saved.")
    return dict(saved)
