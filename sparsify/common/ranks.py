"""Exchanges between the ranks of a training run.

The exchanges of a backward pass begin with a *header*: a few integers that tell where in its pass each rank is. Ranks
at different places all raise the same error. Headers are CPU tensors, over gloo where the ranks' own backend has no CPU
(NCCL): a collective call on a device is launched only once all ranks have come to it. Each makes the host wait for the
other ranks, so one is for several tensors.
"""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from sparsify.common.names import listed
from sparsify.errors import SparsifyError

# the places before the first tensor of a backward pass, and after the last one; none
BEGIN, END, NOWHERE = -2, -1, -3
PLACES, NUMBERS = 16, 8  # integers in a header, at most

# for each default group two of our own, as DDP uses that in a backward pass: of its kind, and for tensors on a CPU
_GROUPS: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()
# and by mesh that of the ranks with the same shards
_COPIES: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def num_ranks() -> int:
    """Number of processes that train together; 1 where training is not distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Ranks:
    """Collective calls with all other ranks."""

    def __init__(self) -> None:
        self.timeout = 600.0  # seconds to wait for a rank in an exchange; to be set before the first backward
        self.bytes_sent = 0  # by this rank, to select the same entries as the others, as ring algorithms send them

    def gather(self, own: Tensor) -> Tensor:
        """Gathers tensors of one shape (n,): (ranks, n)."""
        parts = [torch.empty_like(own) for _ in range(num_ranks())]
        self._call(dist.all_gather, parts, own.contiguous())
        self.bytes_sent += own.nbytes * (len(parts) - 1)
        return torch.stack(parts)

    def headers(self, places: Sequence[int], numbers: Sequence[int], names: Sequence[str]) -> Tensor:
        """Compares the numbers of all ranks; returns which are the same (numbers,) bool, on the CPU.

        Raises ``SparsifyError`` unless all ranks are at the same places: the next exchanges, by tensors' numbers.
        """
        padded = [*places, *[NOWHERE] * (PLACES - len(places)), *numbers, *[0] * (NUMBERS - len(numbers))]
        own = torch.tensor(padded, dtype=torch.int64, device="cpu")
        lowest, highest = self._range(own)
        same = lowest == highest
        if not bool(same[:PLACES].all()):
            others = {BEGIN: "the beginning", END: "the end", NOWHERE: "the end"}
            first = int(same.int().argmin())
            where = [others.get(place) or f"`{names[place]}`" for place in self.gather(own)[:, first].tolist()]
            shown = listed([f"rank {rank} is at {place}" for rank, place in enumerate(where)])
            raise SparsifyError(
                f"the ranks are at different places of their backward passes: {shown}. Every rank has to run the same "
                "modules in each backward that selects entries: let a module that a batch does not need run on an "
                "empty input, or name it in exclude_modules; evaluate a compiled model under no_grad()."
            )
        return same[PLACES : PLACES + len(numbers)]

    def _range(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """The least and greatest of all ranks' numbers (n,), each after as many messages as the ranks have digits.

        Libraries send such small tensors around a ring, where hundreds of ranks would wait for each other in turn.
        """
        rank, ranks, both, distance = dist.get_rank(), num_ranks(), torch.cat([-own, own]), 1
        while distance < ranks:
            other = torch.empty_like(both)
            sending = self._call(dist.isend, both, dst=(rank + distance) % ranks)
            self._call(dist.recv, other, src=(rank - distance) % ranks)
            self._call(sending.wait)
            self.bytes_sent += both.nbytes
            both, distance = both.maximum(other), 2 * distance
        least, greatest = both.chunk(2)
        return -least, greatest

    def sum_(self, values: Tensor, op: Any = None) -> Tensor:
        """Sums the ranks' values, of any one shape, in place, or reduces them by another operation."""
        if values.numel() and (ranks := num_ranks()) > 1:
            self._call(dist.all_reduce, values, op=dist.ReduceOp.SUM if op is None else op)
            self.bytes_sent += 2 * values.nbytes * (ranks - 1) // ranks
        return values

    def copies(self, mesh: Any) -> Any:
        """The group of the ranks that hold the same shards of a model, tensor-parallel over a mesh's last dimension."""
        groups = _COPIES.setdefault(dist.group.WORLD, {})
        if mesh not in groups:
            shard, timeout = mesh.get_coordinate()[-1], timedelta(seconds=self.timeout)
            shards = self.gather(torch.tensor([shard], device="cpu")).flatten().tolist()
            for each in dict.fromkeys(shards):  # all ranks make all groups
                group = dist.new_group([rank for rank, own in enumerate(shards) if own == each], timeout=timeout)
                if each == shard:
                    groups[mesh] = group
        return groups[mesh]

    def mean_share(self, values: Tensor, group: Any = None) -> Callable[[], Tensor]:
        """Begins to average the values (n,), padded with zeros, of all ranks or those of a group.

        Returns a function that waits for the mean, and returns this rank's share of it (ceil(n / ranks),).
        """
        ranks = dist.get_world_size(group)
        if ranks == 1:
            return lambda: values
        if missing := -values.numel() % ranks:
            values = torch.nn.functional.pad(values, (0, missing))
        share = values.new_empty(values.numel() // ranks)
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # before torch 2.13
        work = self._call(reduce_scatter, share, values, async_op=True, group=group)
        self.bytes_sent += share.nbytes * (ranks - 1)

        def mean(values: Tensor = values) -> Tensor:  # the values live until then
            self._call(work.wait)
            return share.div_(ranks)

        return mean

    def average_(self, grad: Tensor) -> Tensor:
        """Averages the ranks' flat gradients in place; ``bytes_sent`` does not count them, as under DDP."""
        self._call(dist.all_reduce, grad)
        return grad.div_(num_ranks())

    def _call(self, collective: Any, *tensors: Any, **options: Any) -> Any:
        try:
            if tensors:
                options["group"] = options.get("group") or self._group(tensors[-1].device)
            return collective(*tensors, **options)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            other = f"rank {1 - dist.get_rank()}" if num_ranks() == 2 else "another rank"  # gloo does not tell which
            raise SparsifyError(
                f"rank {dist.get_rank()} of {num_ranks()} got no answer from {other} within {self.timeout:.0f} s, "
                "or lost it: that rank has died (its own error is in its output), or it runs fewer backward passes "
                "than this one; for one that is merely slow set a larger get_engine(model).ranks.timeout."
            ) from error

    def _group(self, device: torch.device) -> Any:
        """The process group for tensors on a device; all ranks make them at the same place."""
        world = dist.group.WORLD
        if world not in _GROUPS:
            timeout = timedelta(seconds=self.timeout)
            own = dist.new_group(timeout=timeout)
            has_cpu = "cpu:" in dist.get_backend_config()
            _GROUPS[world] = own, own if has_cpu else dist.new_group(timeout=timeout, backend="gloo")
        own, on_cpu = _GROUPS[world]
        return on_cpu if device.type == "cpu" else own
