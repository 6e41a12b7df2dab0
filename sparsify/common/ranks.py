"""The other ranks of a training run: what they are asked, and how many bytes that takes.

In: small tensors of one rank. Out: those of all ranks, or their mean. Every exchange begins with a *header*: a few
integers from each rank that say where in its backward pass it is. So ranks that are in different places all get the
same error, instead of waiting for each other, and whatever follows is decided on numbers that all of them have.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch import distributed as dist

from sparsify.errors import SparsifyError

BEGIN, END = -2, -1  # the places of a rank before its backward pass, and at the end of it
WIDTH = 8  # numbers in a header
MODES = ("exact", "candidates")
TIMEOUT_SECONDS = 600.0  # as long as torch lets NCCL wait

# a process group of our own, since those of DDP and FSDP are in use during a backward pass; one for each default group
_GROUPS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def num_ranks() -> int:
    """Number of processes that train together; 1 where training is not distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Ranks:
    """Exchanges with all other ranks.

    Attributes:
        timeout: seconds to wait for a rank in an exchange; to be set before the first backward.
        bytes_sent: bytes that this rank has sent so far to choose the same entries as the others, as ring algorithms
            send them.
        bytes_averaging: likewise, to average the flat gradient under FSDP2; DDP does that by itself.
        exchanges: number of collective calls so far.
    """

    def __init__(self) -> None:
        self.timeout = TIMEOUT_SECONDS
        self.bytes_sent = 0
        self.bytes_averaging = 0
        self.exchanges = 0

    def gather(self, own: Tensor) -> Tensor:
        """(ranks, n): what each rank gave, all of the same shape (n,)."""
        parts = [torch.empty_like(own) for _ in range(num_ranks())]
        self._call(dist.all_gather, parts, own.contiguous())
        self._count(own.nbytes * (len(parts) - 1))
        return torch.stack(parts)

    def headers(self, place: int, numbers: Sequence[int], names: Sequence[str], device: torch.device) -> Tensor:
        """(ranks, numbers) int64, on the CPU: what each rank says of itself at a place that all of them are at.

        Args:
            place: the number of the tensor that this rank is at, ``BEGIN`` or ``END``.
            numbers: what it has to say, less than ``WIDTH`` of them.
            names: of the tensors.
            device: one that the exchange is possible from.

        Raises:
            SparsifyError: on all ranks, when they are at different places.
        """
        own = [place, *numbers] + [0] * (WIDTH - 1 - len(numbers))  # the same length wherever a rank is
        headers = self.gather(torch.tensor(own, dtype=torch.int64, device=device)).cpu()
        if bool((headers[:, 0] != place).any()):
            raise SparsifyError(_apart(headers[:, 0].tolist(), names))
        return headers[:, 1 : 1 + len(numbers)]

    def union(self, own: Tensor, most: int, limit: int) -> Tensor:
        """(k,) int64, ascending: the indices that any rank has.

        Args:
            own: (n,) int64, without duplicates.
            most: the largest n of any rank.
            limit: what all indices are below.
        """
        dtype = torch.int32 if limit < 2**31 else torch.int64
        padded = own.new_full((most,), -1, dtype=dtype)
        padded[: own.numel()] = own.to(dtype)
        found = self.gather(padded).unique().long()
        return found[found >= 0]

    @property
    def is_first(self) -> bool:
        return num_ranks() == 1 or dist.get_rank() == 0

    def sum_(self, values: Tensor) -> Tensor:
        """The sum of the ranks' values, of any one shape, in their place."""
        ranks = num_ranks()
        if values.numel() and ranks > 1:
            self._call(dist.all_reduce, values)
            self._count(2 * values.nbytes * (ranks - 1) // ranks)
        return values

    def mean_(self, values: Tensor) -> Tensor:
        """The mean of the ranks' values, of any one shape, in their place."""
        return self.sum_(values).div_(num_ranks())

    def average_(self, grad: Tensor) -> Tensor:
        """The mean of the ranks' flat gradients, in its place."""
        before = self.bytes_sent
        self.mean_(grad)
        self.bytes_averaging += self.bytes_sent - before
        self.bytes_sent = before
        return grad

    def _call(self, collective: Any, *tensors: Any) -> None:
        try:
            collective(*tensors, group=self._group())
        except (SparsifyError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            self._fail(error)
        self.exchanges += 1

    def _fail(self, error: RuntimeError) -> NoReturn:
        raise SparsifyError(
            f"rank {dist.get_rank()} of {num_ranks()} got no answer from another rank within {self.timeout:.0f} s, or "
            "lost it: that rank has died (its own error is in its output), or it runs fewer backward passes than this "
            "one. Every rank has to run as many, over the same modules; a rank that is merely slow, say in an "
            "evaluation of its own, needs a larger get_unmasker(model).ranks.timeout."
        ) from error

    def _group(self) -> Any:
        world = dist.group.WORLD
        if world not in _GROUPS:
            _GROUPS[world] = dist.new_group(timeout=timedelta(seconds=self.timeout))
        return _GROUPS[world]

    def _count(self, sent: int) -> None:
        self.bytes_sent += sent


def _apart(places: Sequence[int], names: Sequence[str]) -> str:
    shown = [f"rank {rank} is at {_place(place, names)}" for rank, place in enumerate(places)]
    return (
        f"the ranks are at different places of their backward passes: {', '.join(shown[:8])}"
        f"{', ...' if len(shown) > 8 else ''}. To choose the same entries, every rank has to run the same modules in "
        "each backward that chooses some. Let a module that a batch does not need run on an empty input, or take its "
        "parameters out of the candidates with exclude_modules; run a compiled model under no_grad() where it is only "
        "evaluated."
    )


def _place(place: int, names: Sequence[str]) -> str:
    return {BEGIN: "the beginning", END: "the end"}.get(place) or f"`{names[place]}`"
