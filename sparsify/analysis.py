"""Where the entries of a sparse fine-tuning are, computed afterwards: nothing is recorded during training.

``examples/analysis/`` draws the shares, says how they came about step by step, and compares two fine-tunings' changes.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from sparsify.api import get_engine
from sparsify.common.names import plain_name
from sparsify.delta.sparse_delta import SparseDelta

__all__ = ["TensorShare", "shares"]

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
