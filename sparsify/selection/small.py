"""Batches the gradients of small tensors: kept until all are there, then scanned together.

A bias has a few hundred entries: scanning each by itself would cost more than its entries do.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
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
_flat = torch._utils._flatten_dense_tensors  # copies, one after the other: (n,); without a view of each in Python


def is_small(tensor: Any) -> bool:
    """Whether a tensor's gradient is to be batched; not where each rank has a part of it."""
    return tensor.numel <= LARGEST and tensor.shards == 1


class BatchingPass(Pass):
    """A backward pass that keeps the gradients of small tensors until its end."""

    def __init__(self, selector: Any) -> None:
        super().__init__(selector)
        self._small: defaultdict[torch.device, SmallGradients] = defaultdict(SmallGradients)

    def hold(self, gradients: Iterable[tuple[MaskedTensor, Gradient]]) -> None:
        selector: Any = self.selector
        small: list[tuple[MaskedTensor, Gradient]] = []
        others: list[tuple[MaskedTensor, Gradient]] = []
        tensor: Any
        for tensor, gradient in gradients:
            if tensor.rows is not None:
                gradient = tensor.of_rows(gradient)
            if isinstance(gradient, Product) and not gradient.numel:  # of a layer that got no tokens: it covers no row
                gradient = DenseGradient(gradient.right, torch.empty(0, dtype=torch.int64, device=gradient.device))
            can_wait = selector is None or selector.batches_small or not tensor.collector.sharded
            (small if is_small(tensor) and can_wait else others).append((tensor, gradient))
        if small:
            self._small[small[0][1].device].add(small)  # those of one use are on one device
        if others:
            super().hold(others)

    def settle_rest(self) -> None:
        super().settle_rest()
        selector: Any = self.selector
        batches = list(self._small.values())
        check_alike(batches)
        for small in batches:
            if selector is None or selector.batches_small:
                slots, places = small.unmasked
                self.taken.append((slots, small.joined[places]))
            else:
                for tensor, values in small.values.items():
                    self.settle(tensor, DenseGradient(values.view(matrix_shape(tensor))))
        if selector is not None and selector.batches_small:
            selector.offer_small(batches)


class SmallGradients:
    """Whole gradients of small tensors on one device: added up as they come in, and joined at the end of the pass."""

    def __init__(self) -> None:
        self.values: dict[MaskedTensor, Tensor] = {}  # (n,) in memory of their own

    def add(self, gradients: Sequence[tuple[MaskedTensor, Gradient]]) -> None:
        """Adds the gradients of one use, and copies them at once: another backward may write into what it got."""
        if len(gradients) == 1:
            copies = [_whole(*gradients[0]).own().values.view(-1)]
        else:  # in one operation
            parts = [_whole(tensor, gradient).values for tensor, gradient in gradients]
            copies = [*_flat(parts).split([tensor.numel for tensor, _ in gradients])]
        for (tensor, _), own in zip(gradients, copies, strict=True):
            self.values[tensor] = self.values[tensor] + own if tensor in self.values else own

    @cached_property
    def joined(self) -> Tensor:
        """(n,) the gradients of all tensors, one after the other."""
        return torch.cat(list(self.values.values()))

    @cached_property
    def _starts(self) -> list[int]:
        """Where each tensor's gradient begins in ``joined``."""
        return [0, *accumulate([tensor.numel for tensor in self.values])][:-1]

    @cached_property
    def unmasked(self) -> tuple[Tensor, Tensor]:
        """Slots (k,) of the unmasked entries, and their places in ``joined``."""
        entries = next(iter(self.values)).collector.entries
        ends, counts = [*accumulate(entries.counts)], [entries.counts[tensor.number] for tensor in self.values]
        slots, indices = entries.by_tensor  # of all tensors, of which these are some
        firsts = [ends[tensor.number] - end for tensor, end in zip(self.values, accumulate(counts), strict=True)]
        at = torch.arange(sum(counts), device=slots.device) + _repeated(firsts, counts, slots.device)
        return slots[at], (indices[at] + _repeated(self._starts, counts, slots.device)).to(self.joined.device)

    def places(self, indices: Mapping[MaskedTensor, Tensor]) -> Tensor:
        """Where flat indices (n,) of some tensors are in ``joined``."""
        starts = dict(zip(self.values, self._starts, strict=True)) if indices else {}
        none = torch.empty(0, dtype=torch.int64, device=self.joined.device)
        return torch.cat([none, *[own + starts[tensor] for tensor, own in indices.items()]])

    def entries(self, excluded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, gradients and global ids (n,) of all entries, those in the excluded places without a gradient."""
        tensors: list[Any] = [*self.values]
        whole = [own.weight if is_shard(own.parameter) or own.is_quantized else own.parameter for own in tensors]
        grad, weight = self.joined, _flat(whole)
        grad.index_fill_(0, excluded, 0)  # and so never offered
        more = [tensor.offset - start for tensor, start in zip(tensors, self._starts, strict=True)]
        ids = torch.arange(grad.numel(), device=grad.device)
        ids += _repeated(more, [tensor.numel for tensor in tensors], grad.device)
        return weight, grad, ids


def _whole(tensor: MaskedTensor, gradient: Gradient) -> DenseGradient:
    dense = gradient.dense()
    return dense if dense.rows is None else DenseGradient(dense.values.new_zeros(matrix_shape(tensor))).add(dense)


def check_alike(batches: Iterable[SmallGradients]) -> None:
    """Raises ``SparsifyError`` where tensor-parallel ranks differ in a gradient that all of them have."""
    collector = next((tensor.collector for small in batches for tensor in small.values), None)
    if collector is None or collector.parallel == 1 or collector.sharded or collector.entries.step > 1:
        return
    mesh = next(p.device_mesh for p in collector.root.parameters() if is_shard(p))
    found = torch.zeros(1 + len(collector.tensors), dtype=torch.float64, device="cpu")
    found[0] = mesh.mesh.min()  # the first rank of this copy of the model
    for small in batches:
        tensor: Any
        for tensor, values in small.values.items():
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
    each, repeats = upload([*numbers, *counts], device).chunk(2)
    return each.repeat_interleave(repeats, output_size=sum(counts))
