"""How the selection went, seen afterwards: tensor sparsity and selection entropy over the optimizer steps.

In: a sparsified model. Out: points of its trajectory. Nothing is recorded for it: slots are given in order of
unmasking, and the schedule says how many entries are unmasked after each step, so that the entries unmasked by then
are those of the first so many slots.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsify.api import get_unmasker
from sparsify.errors import SparsifyError
from sparsify.masked.tensor import MaskedTensor
from sparsify.strategies.strategy import Increment, Repeat
from sparsify.training.engine import Engine
from sparsify.training.summary import selection_entropy, tensor_sparsity


@dataclass(frozen=True)
class TrajectoryPoint:
    """A sparsified model as it was after some optimizer steps.

    Attributes:
        step: optimizer steps done by then; 0 is before training.
        unmasked: entries unmasked by then.
        tensor_sparsity: share of the tensors with no unmasked entry.
        selection_entropy: in nats, at most the logarithm of the number of tensors; 0 where nothing is unmasked.
    """

    step: int
    unmasked: int
    tensor_sparsity: float
    selection_entropy: float


def trajectory(model: nn.Module, points: int = 100) -> list[TrajectoryPoint]:
    """Tensor sparsity and selection entropy over training so far, as :func:`sparsify.summary` would have shown them.

    Where a step found fewer entries with a gradient than the schedule asked for, the reconstruction runs ahead of what
    happened until the schedule was caught up. The model's count of entry updates tells, and a warning says so.

    Args:
        model: a sparsified model; it is only read.
        points: at most so many, spread evenly over the steps done; the first is before training, the last is now.

    Returns:
        The points by ascending step; every step has one where there are few.

    Raises:
        SparsifyError: when it is no model, is not sparsified, its entries are chosen afresh at each step (repeat-S),
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
            "steps. shares() and plot_shares() show where the entries of a delta are."
        )
    engine = get_unmasker(model)
    if isinstance(points, bool) or not isinstance(points, int) or points < 2:
        raise SparsifyError(f"points={points!r}; expected an int of at least 2: before training, and now.")
    if isinstance(engine.strategy.selection, Repeat):
        raise SparsifyError(
            f"{engine.strategy.selection} chooses its entries afresh at each step, and how many were new is not "
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
            "the planned number of training steps is not known, so there is no telling when entries were unmasked; set "
            "get_unmasker(model).steps to what it was in training."
        )
    return min(engine.unmasked, engine.schedule.target(step - 1, engine.steps, engine.budget))


def _check_updates(engine: Engine) -> None:
    """Warns where the schedule does not account for the entry updates done.

    No step unmasks beyond the schedule's target, so that equal sums over the steps mean equal counts in each of them.
    """
    planned = sum(_unmasked_after(engine, step) for step in range(1, engine.step + 1))
    if planned != engine.updates:
        warnings.warn(
            f"by the schedule, what is unmasked now would have been updated {planned:,} times in {engine.step:,} "
            f"steps, and the model counts {engine.updates:,}: some steps found too few entries with a gradient, or "
            "steps= or schedule= were others in training. The trajectory may show entries before they were unmasked.",
            stacklevel=3,
        )


def _counts(tensors: Sequence[MaskedTensor], unmasked: Sequence[int]) -> Tensor:
    """Entries (points, tensors) that each tensor had among the first ``unmasked`` (points,) of all, ascending."""
    limits = torch.tensor(unmasked)
    # the point from which on each entry is there; the last bin is for entries that came after all of them
    since = [torch.bucketize(tensor.slots.cpu(), limits, right=True) for tensor in tensors]
    return torch.stack([first.bincount(minlength=len(unmasked) + 1)[:-1].cumsum(0) for first in since], dim=1)
