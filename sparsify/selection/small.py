"""Batches the gradients of small tensors: kept until all are there, then scanned together.

A bias has a few hundred entries: scanning each by itself would cost more than its entries do.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sparsify.common.shards import is_shard
from sparsify.core.devices import upload
from sparsify.core.gradients import DenseGradient, Gradient, Product
from sparsify.core.step import Pass
from sparsify.core.tensor import MaskedTensor
from sparsify.errors import SparsifyError
from sparsify.masked.tensor import matrix_shape

ALIKE = 1e-2  # by which share two norms of one gradient may differ, as sums in bfloat16 do
LARGEST = 1 << 14  # entries of a small tensor


def is_small(tensor: Any) -> bool:
    """Whether a tensor's gradient is to be batched; not where each rank has a part of it."""
    return tensor.numel <= LARGEST and tensor.shards == 1


class BatchingPass(Pass):
    """A backward pass that keeps the gradients of small tensors until its end."""

    def __init__(self, selector: Any) -> None:
        super().__init__(selector)
        self._small: defaultdict[torch.device, SmallGradients] = defaultdict(SmallGradients)

    def settle(self, tensor: MaskedTensor, gradient: Gradient) -> None:
        selector: Any = self.selector
        if isinstance(gradient, Product) and not gradient.numel:  # of a layer that got no tokens: it covers no row
            gradient = DenseGradient(gradient.right, torch.empty(0, dtype=torch.int64, device=gradient.device))
        if is_small(tensor) and (selector is None or selector.batches_small) and tensor not in self.settled:
            self.settled.add(tensor)
            self._small[gradient.device].add(tensor, gradient)
        else:
            super().settle(tensor, gradient)

    def settle_rest(self) -> None:
        super().settle_rest()
        check_alike(self._small.values())
        for small in self._small.values():
            entries = small.tensors[0].collector.entries
            slots, indices = zip(*[entries.of(tensor.number) for tensor in small.tensors], strict=True)
            self.taken.append((torch.cat(slots), small.take(indices)))
        selector: Any = self.selector
        if selector is not None and selector.batches_small:
            selector.offer_small(list(self._small.values()))


class SmallGradients:
    """Whole gradients of small tensors on one device, as they came in."""

    def __init__(self) -> None:
        self.tensors: list[MaskedTensor] = []
        self.values: list[Tensor] = []  # of their gradients
        self._starts: list[int] = []  # where each of these begins once they are joined
        self.numel = 0  # entries of all

    def add(self, tensor: MaskedTensor, gradient: Gradient) -> None:
        """Keeps a tensor's gradient, in memory of its own: another backward may write into what it got."""
        gradient = gradient.dense()
        if gradient.rows is not None:
            gradient = DenseGradient(gradient.values.new_zeros(matrix_shape(tensor))).add(gradient)
        self.tensors.append(tensor)
        self.values.append(gradient.own().values.reshape(-1))
        self._starts.append(self.numel)
        self.numel += tensor.numel

    @cached_property
    def joined(self) -> Tensor:
        """(numel,) the gradients of all tensors, once these are complete."""
        return torch.cat(self.values)

    def take(self, indices: Sequence[Tensor]) -> Tensor:
        """Returns the gradient at flat indices (n,) of each tensor; not after :meth:`entries`."""
        return self.joined[self._places(indices)]

    def entries(self, excluded: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, gradients and global ids (n,) of all entries, those of excluded flat indices without a gradient."""
        grad, weight = self.joined, torch.cat([tensor.weight.reshape(-1) for tensor in self.tensors])
        grad.index_fill_(0, self._places(excluded), 0)  # and so never offered
        # an entry's place here is its flat index, and its id, less a number of its tensor
        less = [start - tensor.offset for start, tensor in zip(self._starts, self.tensors, strict=True)]
        ids = torch.arange(self.numel, device=grad.device)
        ids -= _repeated(less, [tensor.numel for tensor in self.tensors], grad.device)
        return weight, grad, ids

    def _places(self, indices: Sequence[Tensor]) -> Tensor:
        """Where some flat indices of each tensor are in the joined gradients."""
        places = torch.cat(list(indices)).to(self.values[0].device)
        return places + _repeated(self._starts, [own.numel() for own in indices], places.device)


def check_alike(batches: Iterable[SmallGradients]) -> None:
    """Raises ``SparsifyError`` where tensor-parallel ranks differ in a gradient that all of them have."""
    collector = next((small.tensors[0].collector for small in batches), None)
    if collector is None or collector.parallel == 1 or collector.sharded or collector.entries.step > 1:
        return
    mesh = next(p.device_mesh for p in collector.root.parameters() if is_shard(p))
    found = torch.zeros(1 + len(collector.tensors), dtype=torch.float64, device="cpu")
    found[0] = mesh.mesh.min()  # the first rank of this copy of the model
    for small in batches:
        tensor: Any
        for tensor, values in zip(small.tensors, small.values, strict=True):
            found[1 + tensor.number] = 0 if tensor.is_partial else values.norm()
    first, norms = collector.ranks.gather(found).split([1, len(collector.tensors)], dim=1)
    others = norms[first.squeeze(1).long()]
    largest = torch.maximum(norms, others).clamp(min=ALIKE * norms.max())  # a smaller one may be the rounding of zero
    apart = ((norms - others).abs() > ALIKE * largest).any(0)
    if bool(apart.any()):
        name = collector.tensors[int(apart.int().argmax())].name
        problem = f"`{name}` is whole on each tensor-parallel rank, and its gradient is another on each"
        remedy = "parallelize what sees a rank's tokens or heads alone, as a norm within heads (SequenceParallel), and"
        raise SparsifyError(f"{problem}: {remedy} give these ranks the same batches, one for each copy of the model.")


def _repeated(numbers: Sequence[int], counts: Sequence[int], device: torch.device) -> Tensor:
    return upload(numbers, device).repeat_interleave(upload(counts, device), output_size=sum(counts))
