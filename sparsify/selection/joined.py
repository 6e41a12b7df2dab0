"""Joins the gradients of several tensors, which are then scanned together.

A bias has a few hundred entries: scanning each by itself would cost more than its entries do. So small tensors wait for
the end of the pass. On a GPU, where each launch counts, larger ones are joined to their neighbours, a few at a time.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from sparsify.common.ranks import num_ranks
from sparsify.common.shards import is_shard
from sparsify.core.devices import runs_ahead, upload
from sparsify.core.gradients import DenseGradient, Gradient, Product
from sparsify.core.step import Pass
from sparsify.core.tensor import MaskedTensor
from sparsify.errors import SparsifyError
from sparsify.masked.tensor import are_plain, matrix_shape

ALIKE = 1e-2  # by which share two norms of one gradient may differ, as sums in bfloat16 do
LARGEST = 1 << 14  # entries of a small tensor
LARGEST_AHEAD = 3 << 20  # of one that is joined to its neighbours on a GPU, and
AT_ONCE = 1 << 23  # of all that are: gradients, a copy of them, and one of the weights
_flat = torch._utils._flatten_dense_tensors  # copies, one after the other: (n,); without a view of each in Python


def is_small(tensor: Any) -> bool:
    """Whether a tensor's gradient waits for the end of a pass; not where each rank has a part of it."""
    return tensor.numel <= LARGEST and tensor.shards == 1


class JoiningPass(Pass):
    """A backward pass that settles the gradients of several tensors together."""

    def __init__(self, selector: Any) -> None:
        super().__init__(selector)
        self._joins = selector is None or selector.joins
        self._joins_neighbours = selector is None or (self._joins and num_ranks() == 1)  # ranks select in one order
        self._small: defaultdict[torch.device, Joined] = defaultdict(Joined)
        self._spans: defaultdict[torch.device, Span] = defaultdict(Span)

    def hold(self, gradients: Mapping[MaskedTensor, Gradient | Tensor]) -> None:
        if not self._hold_together(gradients):
            super().hold(gradients)

    def _hold_together(self, gradients: Any) -> bool:
        """Takes the gradients of a shared node's taps as they are; returns whether it did."""
        first = next(iter(gradients.values()), None)
        if len(gradients) < 2 or not isinstance(first, Tensor) or not self._joins:
            return False
        if first.dim() == 1:
            self._small[first.device].add(gradients, torch.cat([*gradients.values()]))
            return True
        used = self.settled.union(self.held, *(joined.gradients for joined in self._small.values()))
        if not self._joins_neighbours or not used.isdisjoint(gradients) or any(own.waiting for own in gradients):
            return False
        self.settled.update(gradients)
        self._settle([Span(gradients)])
        return True

    def add(self, tensor: Any, gradient: Gradient) -> None:
        if tensor.rows is not None:
            gradient = tensor.of_rows(gradient)
        if isinstance(gradient, Product) and not gradient.numel:  # of a layer that got no tokens: it covers no row
            gradient = DenseGradient(gradient.right, torch.empty(0, dtype=torch.int64, device=gradient.device))
        if is_small(tensor) and (self._joins or not tensor.collector.sharded):
            dense = gradient.dense()
            if dense.rows is not None:
                dense = DenseGradient(dense.values.new_zeros(matrix_shape(tensor))).add(dense)
            # a copy, unless it is the pass's own: another backward may write into it
            self._small[gradient.device].add([tensor], dense.own().values.view(-1))
        elif self._joins_neighbours and self._is_joined(tensor, gradient):
            if not self._spans[gradient.device].take(tensor, gradient):
                self._settle([self._spans.pop(gradient.device)])
                self._spans[gradient.device].take(tensor, gradient)
            self.settled.add(tensor)
        else:
            super().add(tensor, gradient)

    def _is_joined(self, tensor: Any, gradient: Gradient) -> bool:
        """Whether a gradient that is not small is whole, and cheaper to settle with others."""
        if tensor.numel > LARGEST_AHEAD or tensor.shards > 1 or not runs_ahead(gradient.device):
            return False
        return not (tensor.waiting or tensor in self.held or tensor in self.settled or gradient.rows is not None)

    def _settle(self, batches: Sequence["Joined"]) -> None:
        for joined in batches:
            slots, places = joined.unmasked
            self.taken.append((slots, joined.values.take(places)))
        if self.selector is not None:
            selector: Any = self.selector
            selector.offer_joined(batches)

    def settle_rest(self) -> None:
        super().settle_rest()
        small = list(self._small.values())
        check_alike(small)
        if self._joins:
            self._settle([*self._spans.values(), *small])
        else:
            for tensor, values in (own for joined in small for own in joined.gradients.items()):
                self.settle(tensor, DenseGradient(values.view(matrix_shape(tensor))))


class Joined:
    """Whole gradients of tensors on one device: added up as they come in, and joined when they are all there."""

    def __init__(self, gradients: Mapping[MaskedTensor, Tensor] | tuple[()] = ()) -> None:
        self.gradients = dict(gradients)  # (n,) in memory of their own, but those that are settled at once

    def add(self, tensors: Collection[MaskedTensor], gradients: Tensor) -> None:
        """Adds the gradients (n,) of one use, one after the other, in memory of their own."""
        for tensor, own in zip(tensors, gradients.split([tensor.numel for tensor in tensors]), strict=True):
            self.gradients[tensor] = self.gradients[tensor] + own if tensor in self.gradients else own

    @cached_property
    def tensors(self) -> list[Any]:
        """The tensors, in the order of their values."""
        return list(self.gradients)

    @cached_property
    def values(self) -> Tensor:
        """(n,) the gradients of all tensors, one after the other."""
        return self._join([self.gradients[tensor] for tensor in self.tensors])

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        return _flat(parts)

    @cached_property
    def _starts(self) -> list[int]:
        """Where each tensor's values begin."""
        return [0, *accumulate([tensor.numel for tensor in self.tensors])][:-1]

    @property
    def _offsets(self) -> list[int]:
        """What the ids of each tensor's values are greater than their places."""
        return [tensor.offset - start for tensor, start in zip(self.tensors, self._starts, strict=True)]

    @cached_property
    def unmasked(self) -> tuple[Tensor, Tensor]:
        """Slots (k,) of the unmasked entries, and their places in ``values``."""
        entries = self.tensors[0].collector.entries
        counts = [entries.counts[tensor.number] for tensor in self.tensors]
        slots, ids = entries.by_tensor  # of all tensors, of which these are some
        ends = [entries.starts[tensor.number + 1] for tensor in self.tensors]
        before = [end - own for end, own in zip(ends, accumulate(counts), strict=True)]
        at, offsets = _repeated([before, self._offsets], counts, slots.device)
        at = at + torch.arange(sum(counts), device=slots.device)
        return slots[at], (ids[at] - offsets).to(self.values.device)

    def places(self, indices: Mapping[MaskedTensor, Tensor]) -> Tensor:
        """Where flat indices (n,) of some tensors are in ``values``."""
        starts = dict(zip(self.tensors, self._starts, strict=True)) if indices else {}
        none = torch.empty(0, dtype=torch.int64, device=self.values.device)
        return torch.cat([none, *[own + starts[tensor] for tensor, own in indices.items()]])

    def entries(self, excluded: Tensor) -> tuple[Tensor, Tensor, int, Tensor | None]:
        """Weights and gradients (n,) of all values, and their ids: that of the first where they are consecutive.

        Those in the excluded places have no gradient, and so are never offered.
        """
        plain = are_plain(self.tensors)
        whole = [own.parameter if plain else own.weight for own in self.tensors]
        self.values.index_fill_(0, excluded, 0)
        return self._join(whole), self.values, *self._ids()

    def _ids(self) -> tuple[int, Tensor | None]:
        ids = torch.arange(self.values.numel(), device=self.values.device)
        return 0, ids.add_(_repeated([self._offsets], [tensor.numel for tensor in self.tensors], ids.device)[0])


class Span(Joined):
    """Gradients of neighbours, with zeros for what lies between them, so that the values' ids are consecutive."""

    def take(self, tensor: MaskedTensor, gradient: Gradient) -> bool:
        """Takes a tensor's only gradient, unless it lies too far from the others; returns whether it did."""
        ids = [id for own in (*self.gradients, tensor) for id in (own.offset, own.offset + own.numel)]
        if self.gradients and max(ids) - min(ids) > AT_ONCE:
            return False
        self.gradients[tensor] = gradient.dense().own().values.view(-1)
        return True

    @cached_property
    def tensors(self) -> list[Any]:
        return sorted(self.gradients, key=attrgetter("number"))

    @cached_property
    def _gaps(self) -> Sequence[Tensor]:
        """Zeros (n,) for what lies before each tensor."""
        ends = [self.tensors[0].offset, *[tensor.offset + tensor.numel for tensor in self.tensors]]
        gaps = [tensor.offset - end for tensor, end in zip(self.tensors, ends, strict=False)]
        return self.gradients[self.tensors[0]].new_zeros(sum(gaps)).split_with_sizes(gaps)

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        return _flat([*chain(*zip(self._gaps, parts, strict=True))])

    @cached_property
    def _starts(self) -> list[int]:
        return [tensor.offset - self.tensors[0].offset for tensor in self.tensors]

    @cached_property
    def unmasked(self) -> tuple[Tensor, Tensor]:
        entries = self.tensors[0].collector.entries
        first, stop = entries.starts[self.tensors[0].number], entries.starts[self.tensors[-1].number + 1]
        slots, ids = (part[first:stop] for part in entries.by_tensor)
        return slots, (ids - self.tensors[0].offset).to(self.values.device)

    def _ids(self) -> tuple[int, Tensor | None]:
        return self.tensors[0].offset, None


def check_alike(batches: Iterable[Joined]) -> None:
    """Raises ``SparsifyError`` where tensor-parallel ranks differ in a gradient that all of them have."""
    collector = next((tensor.collector for joined in batches for tensor in joined.gradients), None)
    if collector is None or collector.parallel == 1 or collector.sharded or collector.entries.step > 1:
        return
    mesh = next(p.device_mesh for p in collector.root.parameters() if is_shard(p))
    found = torch.zeros(1 + len(collector.tensors), dtype=torch.float64, device="cpu")
    found[0] = mesh.mesh.min()  # the first rank of this copy of the model
    for joined in batches:
        tensor: Any
        for tensor, values in joined.gradients.items():
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


def _repeated(rows: Sequence[Sequence[int]], counts: Sequence[int], device: torch.device) -> Tensor:
    """Rows (m, n) of numbers, each of which is repeated as often as the counts say."""
    table = upload([*chain(*rows), *counts], device).view(-1, len(counts))
    return table[:-1].repeat_interleave(table[-1], dim=1, output_size=sum(counts))
