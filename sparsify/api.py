"""The public verbs: make a model train only ``budget`` of its entries, inspect it, and make it plain again."""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from sparsify.common.interrupts import uninterrupted
from sparsify.common.names import find_engine, persistent_buffers
from sparsify.common.quantized import is_quantized
from sparsify.common.raw_bits import digest
from sparsify.core.install import values_dtype
from sparsify.core.schedule import Schedule
from sparsify.errors import SparsifyError
from sparsify.selection.static import Calibration, LossFunction, check_new, find_given, pruned, select_static
from sparsify.strategies import strategy as strategies
from sparsify.strategies.default import recommend
from sparsify.strategies.strategy import Given, Static, Strategy
from sparsify.strategies.targets import Pattern, Targets, find_targets
from sparsify.training.engine import Engine
from sparsify.training.install import install, uninstall
from sparsify.training.plan import Plan, check_candidates, check_model, find_new, find_resized, mask_candidates
from sparsify.training.quantized import check_possible, check_unchanged
from sparsify.training.settings import extend_run
from sparsify.training.state import trained_state_of
from sparsify.training.summary import Summary, num_parameters, summarize
from sparsify.training.weights import BaseWeights, Model, check_trained


def sparsify(
    model: Model, budget: int | float | None, strategy: str | Strategy | Mapping[str, Tensor] | None = None, *,
    steps: int | None = None, schedule: str | Schedule | None = None,
    target_modules: Pattern = None, exclude_modules: Pattern = None, modules_to_save: list[str] | None = None,
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None,
    calibration: Calibration | None = None, loss_fn: LossFunction | None = None,
    fresh_modules: Pattern = None, seed: int = 0,
) -> Model:  # fmt: skip
    """Makes a model train only ``budget`` of its entries, in place, and returns it.

    Apart from ``modules_to_save``, the model's only trainable parameter is then ``sparse_values`` (budget,); give it to
    any optimizer of ``torch.optim``. The entries that it stands for are selected while the model trains. An optimizer
    step may have several backward passes: its entries are selected by the sum of their gradients, or by the first one
    where values move in between (closures, SAM), and trained by all.

    Args:
        model: any PyTorch model; its parameters that require grad are the candidates.
        budget: how many entries to train: an int, or a float in (0, 1) for a share of the candidates; ``None`` where
            the strategy says how many (``"bitfit"``, ``"full"``, a given set).
        strategy: ``"id3"``, ``"pafi"``, ``"fish"``, ``"gsnr"``, ``"random"``, ``"bitfit"``, ``"sparseadapter"``,
            ``"d3-repeat"``, ``"full"``, a :class:`Strategy`, or a set of entries by tensor name: an earlier delta's
            ``support``, bool masks, or flat indices. ``None``: what runs on such models speak for, in linear layers:
            ``"random"`` for a causal language model and for 5 % or more of these layers, else, and for new adapters,
            ``"id3"`` with the schedule ``"early"``.
        steps: planned number of optimizer steps; needed by an incremental strategy before the first backward, and by
            repeat-S here; ``SparsifyCallback`` finds those of the Hugging Face Trainer.
        schedule: how the unmasked set grows: ``"uniform"``, the paper's, by the same number at every step; ``"early"``,
            the same within the first fifth of the steps, so that every entry is trained for long; ``"linear"``,
            ``"cubic"``, ``"cosine"``, or a :class:`Schedule`. Default: ``"uniform"`` for a strategy that is named.
        target_modules: narrows the candidates, as in PEFT: a list matches the ends of module names, a string is a
            regular expression for the whole name, ``"all-linear"`` every linear layer but the head. What is not
            targeted is frozen. A quantized weight, which cannot require grad, is a candidate only if this names its
            layer, and never in a PEFT model.
        exclude_modules: modules to leave out, matched in the same way.
        modules_to_save: modules to train dense and save whole, apart from the budget: the usual place for a new head.
        trainable_token_indices: tokens whose rows are trained whole from the start, in addition to the budget, as in
            PEFT: a list for the input embeddings, or a list by name of an embedding or head. The table's other rows are
            frozen.
        calibration: for a gradient importance with ``Static`` (``"fish"``, ``"gsnr"``) or ``Prune``
            (``"sparseadapter"``): batches, as dicts for the model's forward, or a function of the model that runs
            backward itself.
        loss_fn: the loss of (model, batch) in the calibration; default: ``model(**batch).loss``.
        fresh_modules: modules that the base does not have, as in ``target_modules``, besides PEFT's and adapters' and
            those that its checkpoint lacks, which are found. A delta stores new parameters whole; ``Prune`` prunes new
            matrices only, unless told otherwise.
        seed: of a random importance.

    Raises:
        SparsifyError: before anything has been changed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> model = sparsify(model, budget=20, steps=10)
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['sparse_values']

    Source: the paper's Algorithm 1, for ``strategy="id3"``.
    """
    check_model(model)
    if strategy is None:
        strategy, schedule, target_modules = recommend(model, budget, schedule, target_modules, modules_to_save)
    strategy = strategy if strategy == "full" else strategies.resolve_strategy(strategy)
    schedule = strategies.resolve_schedule("uniform" if schedule is None else schedule)
    steps = strategies.check_steps(steps)
    _check_calibration(strategy, calibration, loss_fn)
    if not isinstance(seed, int):
        raise SparsifyError(f"seed={seed!r:.100}; expected an int.")
    targets = find_targets(model, target_modules, exclude_modules, modules_to_save, trainable_token_indices)
    if not isinstance(strategy, Strategy):
        _freeze_others(budget, targets)
        return model
    check_candidates(model, targets.candidates)
    owners = mask_candidates(targets)
    tensors = tuple(owners)
    check_possible(tensors, strategy)
    selectable, device = [tensor for tensor in tensors if tensor.rows is None], tensors[0].parameter.device
    ids = [tensor.never_candidates.to(device) + tensor.offset for tensor in tensors if tensor.rows]
    kept = torch.cat([torch.empty(0, dtype=torch.int64, device=device), *ids])
    if isinstance(strategy.selection, Given):
        selected = find_given(selectable, strategy.selection.support, budget)
        number = capacity = selected.numel()
    else:
        candidates = {tensor.name: tensor.num_candidates for tensor in selectable}
        number = strategies.resolve_budget(budget, strategy, candidates)
        capacity = strategies.resolve_capacity(number, strategy, schedule, steps, candidates)
        selected = kept[:0]
    new_names = find_new(model, fresh_modules, targets.saved)
    check_new(selectable, strategy, new_names)
    resized = [name for name in find_resized(model) if name not in targets.saved]
    buffer_digests = {name: digest(buffer) for name, buffer in persistent_buffers(model).items()}
    buffer_digests |= dict.fromkeys(resized, "")  # stored whole, as what has changed
    if isinstance(strategy.selection, Static):
        selected = select_static(model, selectable, strategy, number, values_dtype(tensors), seed, calibration, loss_fn)
    with pruned(selectable, strategy.selection, selected):  # the pruned model is the base
        more, selected = kept.numel(), torch.cat([kept, selected.to(device)])
        install(Plan(
            model, targets, tensors, owners, strategy, schedule, steps, number + more, capacity + more, selected,
            (*new_names, *resized), buffer_digests, seed,
        ))  # fmt: skip
    return model


def desparsify(model: Model, *, dequantize: bool = False) -> Model:
    """Makes a model plain again, its weights trained, and returns it; parameters that required grad do so again.

    Args:
        model: a sparsified model.
        dequantize: turn masked quantized layers into ordinary linear layers in the dtype of the rest of the model.

    Raises:
        SparsifyError: when the model is not sparsified; when quantized weights have trained entries, which cannot be
            written into them, and ``dequantize`` is not set.

    Example:
        >>> model = sparsify(torch.nn.Linear(4, 4), budget=3, steps=1)
        >>> type(desparsify(model)).__name__
        'Linear'
    """
    engine = get_engine(model)
    check_trained(engine, "desparsify()")
    if engine.sharded:
        raise SparsifyError("a sharded model cannot be turned back; apply its SparseDelta to a plain base.")
    engine.refresh()
    if not dequantize:
        check_unchanged(engine.tensors)
    with uninterrupted():
        uninstall(engine, dequantize=dequantize)
    return model


def get_engine(model: nn.Module) -> Engine:
    """The engine of a sparsified model, found through wrappers such as DDP's or ``torch.compile``'s.

    Args:
        model: a sparsified model, or one that holds it.

    Returns:
        The engine; its ``steps`` may be set until the first backward, its ``unmasked`` is the count.

    Raises:
        SparsifyError: when the model is not sparsified, or several of its parts are.

    Example:
        >>> get_engine(sparsify(torch.nn.Linear(4, 4), budget=3, steps=1)).budget
        3
    """
    engine: Engine = find_engine(model)
    if not engine.paused:
        engine.catch_up()  # accelerate's load_checkpoint_in_model() replaces the buffers
    return engine


def extend(
    model: nn.Module, *, budget: int | float | None = None, steps: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:  # fmt: skip
    """Continues a run with a larger budget, or for more steps, than it was begun with.

    The unmasked entries stay; the schedule becomes that of the new budget and steps. To be called between two steps, as
    after loading an earlier run's state, and before DDP and ``fully_shard()``. A larger budget makes ``sparse_values``
    a new, longer parameter.

    Args:
        model: a sparsified model.
        budget: entries in all, or a share of the candidates; ``None``: as before.
        steps: optimizer steps in all, those done included; ``None``: as before.
        optimizer: one that holds ``sparse_values``: it gets the new parameter, and its state is padded with zeros, as
            if the budget had been larger from the start (SGD, the Adam family, Lion). ``None``: an optimizer is made
            afterwards.

    Raises:
        SparsifyError: when budget or steps get smaller, a step has begun, or the strategy chooses its entries before
            training; before anything has been changed.

    Example:
        >>> model = sparsify(torch.nn.Linear(4, 4), budget=3, strategy="id3", steps=10)
        >>> extend(model, budget=6, steps=20)
        >>> model.sparse_values.shape
        torch.Size([6])
    """
    extend_run(get_engine(model), budget, steps, optimizer)


def summary(model: nn.Module, *, verify: bool = False) -> Summary:
    """Budget, unmasked entries by tensor, tensor sparsity, selection entropy, updates and bytes, to be printed.

    Args:
        model: a sparsified model.
        verify: check, in one pass over all weights, that the frozen entries have the hash that they had at
            ``sparsify()``, that the schedule's number of entries is unmasked, and that a delta holds all that trains.

    Raises:
        SparsifyError: when the model is not sparsified.

    Example:
        >>> summary(sparsify(torch.nn.Linear(4, 4), budget=3, strategy="pafi"), verify=True).verification.ok
        True
    """
    return summarize(get_engine(model), model, verify=verify)


def print_trainable_parameters(model: nn.Module) -> None:
    """Prints the number of trainable parameters, in PEFT's words.

    Args:
        model: any model; the flat delta of a sparsified one counts as trainable, and not again among all.

    Example:
        >>> print_trainable_parameters(sparsify(torch.nn.Linear(10, 10), budget=11, steps=1))
        trainable params: 11 || all params: 110 || trainable%: 10.0000
    """
    trainable, total = sum(p.numel() for p in model.parameters() if p.requires_grad), num_parameters(model)
    print(f"trainable params: {trainable:,d} || all params: {total:,d} || trainable%: {100 * trainable / total:.4f}")


def base_weights(model: Model) -> AbstractContextManager[Model]:
    """Runs the pretrained model inside a ``with`` block, as a reference model (DPO, KL); O(budget), bit-exact.

    ``modules_to_save``, which have no base, keep their trained weights.

    Args:
        model: a sparsified model; the block may only run it forward.

    Raises:
        SparsifyError: when the model is not sparsified, or the block trains or exports it.

    Example:
        >>> model = sparsify(torch.nn.Linear(4, 4), budget=3, steps=1)
        >>> with base_weights(model):
        ...     reference = model(torch.ones(1, 4))
    """
    return BaseWeights(get_engine(model).weights, model)


def optimizer_stepped(model: nn.Module) -> None:
    """Counts an optimizer step and writes the flat delta into the weights; for optimizers outside of ``torch.optim``.

    To be called after each step of such an optimizer; otherwise an incremental strategy unmasks the entries of its
    first step only. Steps of optimizers that derive from ``torch.optim.Optimizer`` are counted without it.

    Args:
        model: a sparsified model.

    Raises:
        SparsifyError: when the model is not sparsified, or a ``torch.optim`` optimizer has counted the step.

    Example:
        >>> model = sparsify(torch.nn.Linear(4, 4), budget=10, steps=2)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> model.sparse_values.data.sub_(model.sparse_values.grad)[0].item()
        -1.0
        >>> optimizer_stepped(model)
        >>> summary(model).step
        1
    """
    get_engine(model).count_step()


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns a checkpoint of O(budget): the state dict without the tensors that are the base's.

    To resume a run, ``load_state_dict`` it, strictly, into a model that was built and sparsified in the same way, and
    the optimizer's state dict into the optimizer. Another strategy, schedule, budget or number of steps is refused;
    ``extend(model, budget=..., steps=...)`` changes the latter two once it is loaded.

    Args:
        model: a sparsified model, or one that holds it.

    Returns:
        Tensors by their names in the model's state dict: ``sparse_values``, ``sparse_position``, the settings that are
        compared when it is loaded, the entries, ``modules_to_save``, tensors that the base does not have, and
        buffers that training changed. All but the entries are the model's own, not copies.

    Raises:
        SparsifyError: when the model is not sparsified.

    Example:
        >>> model = sparsify(torch.nn.Linear(100, 100), budget=3, steps=1)
        >>> sum(tensor.numel() for tensor in trained_state(model).values()) < 2_000
        True
        >>> model.load_state_dict(trained_state(model))
        <All keys matched successfully>
    """
    return trained_state_of(get_engine(model), model)


def _freeze_others(budget: int | float | None, targets: Targets) -> None:
    if budget is not None:
        raise SparsifyError(f"budget={budget!r} with a strategy that trains every candidate; pass budget=None.")
    if packed := [candidate.name for candidate in targets.candidates if is_quantized(candidate.parameter)]:
        raise SparsifyError(f"`{packed[0]}` is quantized and cannot be trained whole; train entries of it, or LoRA.")
    if any(candidate.rows for candidate in targets.candidates):
        raise SparsifyError('trainable_token_indices with strategy "full", which trains whole tables; leave one out.')
    for parameter in targets.frozen.values():
        parameter.requires_grad_(False)


def _check_calibration(strategy: str | Strategy, calibration: Calibration | None, loss_fn: LossFunction | None) -> None:
    calibrates = isinstance(strategy, Strategy) and strategy.calibrates
    if not calibrates and (calibration is not None or loss_fn is not None):
        raise SparsifyError(f"calibration= and loss_fn= are not used by {strategy!r}; leave them out.")
    if calibrates and calibration is None:
        raise SparsifyError(f"{strategy!r} needs gradients before training; pass calibration=, batches or a function.")
