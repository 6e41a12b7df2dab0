"""Tensor sparsity and selection entropy over the optimizer steps, reconstructed from the order of the slots."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsify.api import get_engine
from sparsify.core.tensor import MaskedTensor
from sparsify.errors import SparsifyError
from sparsify.strategies.strategy import Increment, Repeat
from sparsify.training.engine import Engine
from sparsify.training.summary import selection_entropy, tensor_sparsity


@dataclass(frozen=True)
class TrajectoryPoint:
    """The selection after ``step`` optimizer steps: the number of ``unmasked`` entries and where they are.

    ``tensor_sparsity`` is the share of the tensors with no unmasked entry, ``selection_entropy`` is in nats, at most
    the logarithm of the number of tensors, and 0 where nothing is unmasked.
    """

    step: int
    unmasked: int
    tensor_sparsity: float
    selection_entropy: float


def trajectory(model: nn.Module, points: int = 100) -> list[TrajectoryPoint]:
    """Returns tensor sparsity and selection entropy over training so far.

    A step that found fewer entries with a gradient than scheduled is not visible afterwards: the reconstruction is then
    ahead of what happened, and a warning says so.

    Args:
        model: a sparsified model; it is only read.
        points: maximum number of points, spread evenly over the steps; the first is before training, the last is now.

    Returns:
        The points by ascending step.

    Raises:
        SparsifyError: when it is no sparsified model, its entries are selected afresh at each step (repeat-S),
            ``points`` is below 2, or the planned number of steps is not known.

    Example:
        >>> from sparsify import sparsify
        >>> _ = torch.manual_seed(0)
        >>> model = sparsify(nn.Linear(4, 2), budget=6, steps=3)
        >>> optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
        >>> for _ in range(3):
        ...     model(torch.ones(1, 4)).square().sum().backward()
        ...     optimizer.step()
        >>> [(point.step, point.unmasked) for point in trajectory(model)]
        [(0, 0), (1, 2), (2, 4), (3, 6)]
    """
    if not isinstance(model, nn.Module):
        raise SparsifyError(
            f"expected a sparsified model, got {type(model).__name__}: only the model that was trained has its "
            "steps. shares() shows where the entries of a delta are."
        )
    engine = get_engine(model)
    if type(points) is not int or points < 2:
        raise SparsifyError(f"points={points!r}; expected an int of at least 2: before training, and now.")
    if isinstance(engine.strategy.selection, Repeat):
        raise SparsifyError(
            f"{engine.strategy.selection} selects its entries afresh at each step, and how many were new is not "
            "known afterwards; call summary(model) while it trains."
        )
    _check_updates(engine)
    steps = sorted({round(i * engine.step / (points - 1)) for i in range(points)})
    unmasked = [_unmasked_after(engine, step) for step in steps]
    names = [tensor.name for tensor in engine.tensors]
    sizes = {tensor.name: tensor.numel for tensor in engine.tensors}
    found = []
    for step, total, row in zip(steps, unmasked, _counts(engine.tensors, unmasked).tolist(), strict=True):
        counts = dict(zip(names, row, strict=True))
        found.append(TrajectoryPoint(step, total, tensor_sparsity(counts), selection_entropy(counts, sizes)))
    return found


def _unmasked_after(engine: Engine, step: int) -> int:
    """Number of entries unmasked once ``step`` optimizer steps were done, by the schedule."""
    if not isinstance(engine.strategy.selection, Increment):
        return engine.unmasked  # all from the start
    if step == 0:
        return 0
    if engine.steps is None:
        raise SparsifyError(
            "the planned number of training steps, and so when entries were unmasked, is not known; set "
            "get_engine(model).steps to what it was in training."
        )
    return min(engine.unmasked, engine.schedule.target(step - 1, engine.steps, engine.budget))


def _check_updates(engine: Engine) -> None:
    """Warns where the schedule does not account for the entry updates done: no step unmasks more than it planned."""
    planned = sum(_unmasked_after(engine, step) for step in range(1, engine.step + 1))
    if planned != engine.updates:
        warnings.warn(
            f"by the schedule, the unmasked entries would have been updated {planned:,} times in {engine.step:,} "
            f"steps, and the model counts {engine.updates:,}: some steps found too few entries with a gradient, or "
            "steps= or schedule= were others in training. The trajectory may show entries before they were unmasked.",
            stacklevel=3,
        )


def _counts(tensors: Sequence[MaskedTensor], unmasked: Sequence[int]) -> Tensor:
    """Entries (points, tensors) of each tensor among the first ``unmasked`` (points,) slots, ascending."""
    limits = torch.tensor(unmasked)
    # the first point at which each entry is unmasked; the last bin is for those after all points
    since = [torch.bucketize(tensor.slots.cpu(), limits, right=True) for tensor in tensors]
    return torch.stack([first.bincount(minlength=len(unmasked) + 1)[:-1].cumsum(0) for first in since], dim=1)
