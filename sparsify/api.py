"""The public verbs: turn a model into one that trains only ``budget`` of its entries, look at it, turn it back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sparsify.errors import SparsifyError
from sparsify.masked.module import masked_tensors
from sparsify.masked.swap import check_maskable, frozen_row, swap, unswap
from sparsify.masked.tensor import MaskedTensor
from sparsify.names import find_engine
from sparsify.report import Summary, num_parameters, summarize
from sparsify.schedules import Schedule, resolve_schedule
from sparsify.selection import Pool, offer_weight
from sparsify.state import engine_of, install, uninstall
from sparsify.strategies import Dense, Static, Strategy, resolve_strategy
from sparsify.targets import Candidate, Pattern, Targets, find_targets
from sparsify.unmasker import POSITION, Unmasker
from sparsify.values import VALUES, SparseValues

Model = TypeVar("Model", bound=nn.Module)


def sparsify(
    model: Model,
    budget: int | float | None,
    strategy: str | Strategy = "id3",
    *,
    steps: int | None = None,
    schedule: str | Schedule = "uniform",
    target_modules: Pattern = None,
    exclude_modules: Pattern = None,
    modules_to_save: list[str] | None = None,
    seed: int = 0,
) -> Model:
    """Makes a model train only ``budget`` of its entries, in place.

    The model's only trainable parameter is then ``sparse_values`` (budget,), beside ``modules_to_save``; give it to
    any optimizer of ``torch.optim``. Which entries its numbers stand for is decided while it trains.

    Args:
        model: any PyTorch model; its parameters that require grad are the candidates.
        budget: how many entries to train: an int, or a float in (0, 1) for a share of the candidates; ``None`` where
            the strategy says how many (``"bitfit"``, ``"full"``).
        strategy: ``"id3"``, ``"pafi"``, ``"random"``, ``"bitfit"``, ``"full"``, or a :class:`Strategy`.
        steps: planned number of optimizer steps; needed by an incremental strategy before the first backward.
        schedule: how the unmasked set grows: ``"uniform"``, ``"linear"``, ``"cubic"``, ``"cosine"``, or a
            :class:`Schedule`.
        target_modules: narrows the candidates, as in PEFT: a list matches the ends of module names, a string is a
            regular expression for the whole name, ``"all-linear"`` every linear layer but the head. What is not
            targeted is frozen.
        exclude_modules: modules to leave out, in the same words.
        modules_to_save: modules to train dense and save whole, apart from the budget: the usual place for a new head.
        seed: of the random strategy.

    Returns:
        The same model object.

    Raises:
        SparsifyError: before anything has been changed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> model = sparsify(model, budget=20, steps=10)
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['sparse_values']

    Source: the paper's Algorithm 1, for ``strategy="id3"``.
    """
    _check_model(model)
    strategy, schedule = resolve_strategy(strategy), resolve_schedule(schedule)
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1):
        raise SparsifyError(f"steps={steps!r}; expected the planned number of optimizer steps, an int of at least 1.")
    targets = find_targets(model, target_modules, exclude_modules, modules_to_save)
    if isinstance(strategy.selection, Dense):
        if budget is not None:
            raise SparsifyError(f"budget={budget!r} with a strategy that trains every candidate; pass budget=None.")
        _freeze(targets.frozen.values())
        return model
    _check_maskable(targets.candidates)
    entries = _resolve_budget(budget, strategy, targets.candidates)

    selected = _select_by_weight(targets.candidates, strategy, entries, seed)
    engine = _mask(model, targets, strategy, entries, schedule, steps)
    if selected is not None:
        engine.append(selected, torch.arange(entries, device=selected.device))
    engine.sync()
    return model


def desparsify(model: Model) -> Model:
    """Gives back the plain modules, the trained values in their weights; what required grad before does so again.

    Args:
        model: a sparsified model.

    Returns:
        The same model object.

    Raises:
        SparsifyError: when the model is not sparsified.

    Example:
        >>> model = sparsify(torch.nn.Linear(4, 4), budget=3, steps=1)
        >>> type(desparsify(model)).__name__
        'Linear'
    """
    engine = get_unmasker(model)
    engine.refresh()
    uninstall(engine)
    engine.retire()
    for module in list(engine.root.modules()):
        unswap(module)
    for tensor in engine.tensors:
        tensor.remove_buffers()
    del engine.root._parameters[VALUES], engine.root._buffers[POSITION]
    parameters = dict(engine.root.named_parameters())
    for name in engine.frozen_names:
        parameters[name].requires_grad_(True)
    return model


def get_unmasker(model: nn.Module) -> Unmasker:
    """The engine of a sparsified model, found through wrappers such as DDP's or ``torch.compile``'s.

    Args:
        model: a sparsified model, or one that holds it.

    Returns:
        The engine; its ``steps`` may be set until the first backward, its ``unmasked`` tells the count.

    Raises:
        SparsifyError: when the model is not sparsified, or several of its parts are.

    Example:
        >>> get_unmasker(sparsify(torch.nn.Linear(4, 4), budget=3, steps=1)).budget
        3
    """
    engine: Unmasker | None = find_engine(model)
    if engine is None:
        raise SparsifyError(
            f"this {type(model).__name__} is not sparsified; call sparsify(model, budget, strategy) first "
            '(strategy "full" leaves the model plain).'
        )
    return engine


def summary(model: nn.Module) -> Summary:
    """Budget, unmasked entries by tensor, tensor sparsity, selection entropy, updates and bytes; prints well.

    Args:
        model: a sparsified model.

    Returns:
        The numbers; ``print`` lays them out.

    Raises:
        SparsifyError: when the model is not sparsified.

    Example:
        >>> summary(sparsify(torch.nn.Linear(4, 4), budget=3, strategy="pafi")).unmasked
        3
    """
    return summarize(get_unmasker(model))


def print_trainable_parameters(model: nn.Module) -> None:
    """Prints the number of trainable parameters, in PEFT's words.

    Args:
        model: any model; the flat delta of a sparsified one counts as trainable, and not again among all.

    Example:
        >>> print_trainable_parameters(sparsify(torch.nn.Linear(10, 10), budget=11, steps=1))
        trainable params: 11 || all params: 110 || trainable%: 10.0000
    """
    trainable, total = num_parameters(model, trainable=True), num_parameters(model)
    print(f"trainable params: {trainable:,d} || all params: {total:,d} || trainable%: {100 * trainable / total:.4f}")


@contextmanager
def base_weights(model: Model) -> Iterator[Model]:
    """Runs the pretrained model inside a ``with`` block, as a reference model (DPO, KL); O(budget), bit-exact.

    ``modules_to_save`` keep their trained weights; they have no base.

    Args:
        model: a sparsified model; the block may only run it forward.

    Raises:
        SparsifyError: when the model is not sparsified, or the block trains or exports it.

    Example:
        >>> model = sparsify(torch.nn.Linear(4, 4), budget=3, steps=1)
        >>> with base_weights(model):
        ...     reference = model(torch.ones(1, 4))
    """
    with get_unmasker(model).base_weights():
        yield model


def sync(model: nn.Module) -> None:
    """Writes the flat delta into the weights now; needed only by optimizers that are not ``torch.optim``'s.

    Every forward pass of the root, ``state_dict()`` and step of a ``torch.optim`` optimizer does so by itself.

    Args:
        model: a sparsified model.

    Raises:
        SparsifyError: when the model is not sparsified.

    Example:
        >>> model = sparsify(torch.nn.Linear(4, 4), budget=16, strategy="pafi", target_modules=None)
        >>> model.sparse_values.data.add_(1.0)[0].item()
        1.0
        >>> sync(model)
    """
    get_unmasker(model).sync()


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise SparsifyError(f"expected a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise SparsifyError("a TorchScript module cannot be sparsified; sparsify the Python module it was made from.")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise SparsifyError(
            f"the model is wrapped in {type(model).__name__}; call sparsify() on the model itself"
            + (", and train on one device." if isinstance(model, nn.DataParallel) else " before wrapping it.")
        )
    for name, module in model.named_modules():
        if engine_of(module) is not None or masked_tensors(module):
            raise SparsifyError(
                f"`{name or '(root)'}` is already sparsified; call desparsify(model) first to start afresh."
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise SparsifyError(
                f"`{name}` is partitioned by DeepSpeed ZeRO stage 3, which keeps weights away between layers; "
                "use ZeRO stage 0."
            )


def _check_maskable(candidates: tuple[Candidate, ...]) -> None:
    for candidate in candidates:
        for name, module, attribute in candidate.owners:
            check_maskable(name, module, attribute)


def _resolve_budget(budget: int | float | None, strategy: Strategy, candidates: tuple[Candidate, ...]) -> int:
    """The budget as a number of entries."""
    covered = [_num_candidates(candidate) for candidate in candidates if _covers(strategy, candidate)]
    available = sum(covered)
    if available == 0:
        raise SparsifyError(f"{strategy.importance} finds no entry among the {len(candidates)} candidate tensors.")
    if budget is None:
        if strategy == resolve_strategy("bitfit"):
            return available
        raise SparsifyError(
            f"budget=None with {strategy.importance}; expected a number of entries, 1 to {available:,}, or a share of "
            "the candidates, a float in (0, 1). Only bitfit and full say by themselves how many they train."
        )
    if isinstance(budget, bool) or not isinstance(budget, Real):
        raise SparsifyError(f"budget={budget!r}; expected an int (entries), a float in (0, 1) (a share), or None.")
    if not isinstance(budget, Integral):
        if not 0 < budget < 1:  # a share
            raise SparsifyError(
                f"budget={budget!r} is a float and so a share of the candidates, which must lie in (0, 1); "
                "pass an int for a number of entries."
            )
        budget = int(budget * available)
    if not 1 <= budget <= available:
        raise SparsifyError(
            f"budget={budget:,} entries; expected 1 to {available:,}, the number of candidates. "
            "Lower the budget, or let more parameters require grad."
        )
    return int(budget)


def _num_candidates(candidate: Candidate) -> int:
    excluded = candidate.parameter.shape[-1] if _frozen_row(candidate) is not None else 0
    return candidate.parameter.numel() - excluded


def _frozen_row(candidate: Candidate) -> int | None:
    rows = (frozen_row(module) for _, module, attribute in candidate.owners if attribute == "weight")
    return next((row for row in rows if row is not None), None)


def _covers(strategy: Strategy, candidate: Candidate) -> bool:
    importance: Any = strategy.importance
    covered: bool = importance.uses_gradient or importance.covers(candidate.name)
    return covered


def _select_by_weight(candidates: tuple[Candidate, ...], strategy: Strategy, budget: int, seed: int) -> Tensor | None:
    """Global ids (budget,) of the entries that a static strategy chooses, best first; ``None`` for the others."""
    if not isinstance(strategy.selection, Static):
        return None
    importance: Any = strategy.importance
    dtype, device = _values_dtype(candidates), candidates[0].parameter.device
    pool = Pool(budget, dtype, device)
    offset = 0
    for candidate in candidates:
        weight = candidate.parameter.detach()
        if importance.covers(candidate.name):
            row = _frozen_row(candidate)
            excluded = None if row is None else slice(row * weight.shape[-1], (row + 1) * weight.shape[-1])
            digest = hashlib.sha256(f"{seed}:{candidate.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
            offer_weight(pool, importance, weight, offset, generator, excluded)
        offset += weight.numel()
    return pool.winners().ids


def _values_dtype(candidates: tuple[Candidate, ...]) -> torch.dtype:
    """The flat delta's dtype: float32, or float64 where a weight is."""
    is_double = any(candidate.parameter.dtype == torch.float64 for candidate in candidates)
    return torch.float64 if is_double else torch.float32


def _mask(
    model: nn.Module, targets: Targets, strategy: Strategy, budget: int, schedule: Schedule, steps: int | None
) -> Unmasker:
    """Everything that changes the model: buffers, flat delta, masked modules, hooks, frozen parameters."""
    values = torch.zeros(budget, dtype=_values_dtype(targets.candidates), device=targets.candidates[0].parameter.device)
    engine = Unmasker(
        model,
        strategy,
        budget,
        schedule,
        steps,
        dense_names=tuple(targets.saved),
        frozen_names=tuple([candidate.name for candidate in targets.candidates] + list(targets.frozen)),
    )
    by_module: dict[nn.Module, dict[str, MaskedTensor]] = {}
    offset = 0
    for candidate in targets.candidates:
        _, owner, attribute = candidate.owners[0]
        tensor = MaskedTensor(owner, attribute, candidate.name, offset, engine, _frozen_row(candidate))
        tensor.register_buffers()
        engine.tensors.append(tensor)
        for _, module, name in candidate.owners:
            by_module.setdefault(module, {})[name] = tensor
        offset += candidate.parameter.numel()

    for module, tensors in by_module.items():
        swap(module, tensors)
    model.register_parameter(VALUES, SparseValues(values))
    model.register_buffer(POSITION, torch.zeros(2, dtype=torch.int64, device=values.device))
    install(engine)
    _freeze([candidate.parameter for candidate in targets.candidates])
    _freeze(targets.frozen.values())
    return engine


def _freeze(parameters: Any) -> None:
    for parameter in parameters:
        parameter.requires_grad_(False)
