"""Where the entries of a sparse fine-tuning are, computed afterwards: nothing is recorded during training.

``examples/analysis/`` draws shares and trajectory, and compares the changes of two fine-tunings.
"""

import math
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from sparsify.api import get_engine
from sparsify.common.names import plain_name
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import SparsifyError
from sparsify.selection.policies import target_of
from sparsify.strategies.strategy import Repeat
from sparsify.training.engine import Engine
from sparsify.training.summary import selection_entropy, tensor_sparsity

__all__ = ["TensorShare", "TrajectoryPoint", "shares", "trajectory"]

Source = nn.Module | SparseDelta

_EXPERT = re.compile(r"(?<=\bexperts\.)(\w+_)?\d+(?=\.|$)")  # Mixtral's experts.7, Switch's experts.expert_7


@dataclass(frozen=True)
class TensorShare:
    """The unmasked share of one tensor: its ``name`` in the plain model and its numbers of entries.

    ``layer`` is a number, or ``None`` outside the numbered layers; ``kind`` is its name within the layer, equal in all
    layers of a stack.
    """

    name: str
    layer: int | None
    kind: str
    unmasked: int
    size: int

    @property
    def share(self) -> float:
        """Unmasked entries per entry."""
        return self.unmasked / self.size


def shares(source: Source) -> list[TensorShare]:
    """Returns the unmasked share of each tensor, with its layer and kind (:func:`places`).

    Args:
        source: a sparsified model, for a row for each candidate; or a :class:`sparsify.SparseDelta`, for a row for each
            tensor that it changes. Tensors trained dense have none.

    Returns:
        The rows in the source's order.

    Raises:
        SparsifyError: when the source is neither, or its model is not sparsified.

    Example:
        >>> import torch
        >>> from sparsify import sparsify
        >>> model = sparsify(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), None, strategy="bitfit")
        >>> for row in shares(model):
        ...     print(row.layer, row.kind, row.unmasked, row.size, row.share)
        0 weight 0 4 0.0
        0 bias 2 2 1.0
        1 weight 0 4 0.0
        1 bias 2 2 1.0
    """
    if isinstance(source, SparseDelta):
        rows = [(name, tensor.count, math.prod(tensor.shape)) for name, tensor in source.tensors.items()]
    else:
        rows = [(plain_name(tensor.name), tensor.count, tensor.numel) for tensor in get_engine(source).tensors]
    found = places(name for name, *_ in rows)
    return [TensorShare(name, *found[name], *counts) for name, *counts in rows]


def places(names: Iterable[str]) -> dict[str, tuple[int | None, str]]:
    """Derives each tensor's layer, ``None`` outside of layers, and kind from its plain name.

    The layer is the first component that is a number, the kind the components after it. Where layers are numbered in
    several stacks (an encoder and a decoder), the kind begins with the stack's path. The experts of a mixture are one
    kind, ``experts.*``; other further numbers stay in the kind. Outside of layers, the kind is the name, without the
    model's prefix: a first component that all layers' names have, too.

    Example:
        >>> places(["bert.embeddings.weight", "bert.encoder.layer.3.output.dense.bias"]).values()
        dict_values([(None, 'embeddings.weight'), (3, 'output.dense.bias')])
    """
    paths = {name: tuple(name.split(".")) for name in names}
    numbers = {name: next((at for at, part in enumerate(paths[name]) if part.isdecimal()), None) for name in paths}
    stacks = {paths[name][:at] for name, at in numbers.items() if at is not None}
    prefixes = {stack[:1] if len(stack) > 1 else () for stack in stacks}
    prefix = prefixes.pop() if len(prefixes) == 1 else ()
    found: dict[str, tuple[int | None, str]] = {}
    for name, path in paths.items():
        at = numbers[name]
        if at is None:
            found[name] = None, ".".join(path[1:] if len(path) > 2 and path[:1] == prefix else path)
        else:
            label = path[len(prefix) : at] if len(stacks) > 1 else ()
            kind = path[at + 1 :] or path[:at][-1:] or path  # a ParameterList numbers its tensors themselves
            found[name] = int(path[at]), _EXPERT.sub("*", ".".join(label + kind))
    return found


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
