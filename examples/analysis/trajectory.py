"""How a selection came about: tensor sparsity and selection entropy after each step, from the entries' order.

In: a sparsified model. Out: points over the steps, for :func:`examples.analysis.plot_trajectory` or a table.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import nn

from sparsify import SparsifyError, get_engine
from sparsify.selection.policies import target_of
from sparsify.strategies.strategy import Repeat
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

    A step that found fewer entries with a gradient than scheduled is not visible afterwards: a warning says so.

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
        >>> model = sparsify(nn.Linear(4, 2), budget=6, strategy="id3", steps=3)
        >>> optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
        >>> for _ in range(3):
        ...     model(torch.ones(1, 4)).square().sum().backward()
        ...     optimizer.step()
        >>> [(point.step, point.unmasked) for point in trajectory(model)]
        [(0, 0), (1, 2), (2, 4), (3, 6)]
    """
    engine = get_engine(model)
    if type(points) is not int or points < 2:
        raise SparsifyError(f"points={points!r}; expected an int of at least 2: before training, and now.")
    if isinstance(engine.strategy.selection, Repeat):
        problem = "how many of them were new is not known afterwards; call summary(model) while it trains."
        raise SparsifyError(f"{engine.strategy.selection} selects its entries afresh at each step: {problem}")
    planned = sum(_unmasked_after(engine, step) for step in range(1, engine.step + 1))
    if planned != engine.entries.updates:
        text = f"by the schedule, entries had been updated {planned:,} times in {engine.step:,} steps, and the model "
        text += f"counts {engine.entries.updates:,}: some steps found too few entries with a gradient, or steps= or "
        text += "schedule= were others in training. The trajectory may show entries before they were unmasked."
        warnings.warn(text, stacklevel=2)
    sizes = {tensor.name: tensor.numel for tensor in engine.tensors}
    slots = {tensor.name: tensor.slots.cpu().sort().values for tensor in engine.tensors}  # in order of unmasking
    found = []
    for step in sorted({round(i * engine.step / (points - 1)) for i in range(points)}):
        unmasked = _unmasked_after(engine, step)
        counts = {name: int(torch.searchsorted(own, unmasked)) for name, own in slots.items()}
        found.append(TrajectoryPoint(step, unmasked, tensor_sparsity(counts), selection_entropy(counts, sizes)))
    return found


def _unmasked_after(engine: Engine, step: int) -> int:
    """Number of entries unmasked once ``step`` optimizer steps were done, by the schedule."""
    if step and engine.steps is None and not engine.policy.static:
        remedy = "set get_engine(model).steps to what it was in training."
        raise SparsifyError(f"the planned number of steps, and so when entries were unmasked, is not known; {remedy}")
    return min(engine.unmasked, target_of(engine.policy, step))
