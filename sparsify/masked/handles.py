"""Masked tensors as numbers in tensors, so that a compiled graph can name one at run time.

A handle is an ordinary input of a graph: layers that were compiled once share their graph, whatever their numbers, and
a graph that was stored and read back in another process finds that process's tensors.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

_NUMBERS = itertools.count()
_HELD: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def new_handle(thing: Any) -> Tensor:
    """A handle () int64, on the CPU, of something that is only held weakly.

    Example:
        >>> class Thing: ...
        >>> thing = Thing()
        >>> held_by(new_handle(thing)) is thing
        True
    """
    number = next(_NUMBERS)
    _HELD[number] = thing
    return torch.tensor(number, device="cpu")


def held_by(handle: Tensor) -> Any:
    """What a handle stands for.

    Raises:
        KeyError: when it lives no more.
    """
    return _HELD[int(handle)]
