"""One backward pass: what lives from its first node to its commit, and is gone afterwards."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from sparsify.masked.gradients import Gradient
from sparsify.masked.module import without_autocast
from sparsify.masked.tensor import MaskedTensor
from sparsify.selection.selectors import Selector
from sparsify.selection.small_tensors import SmallGradients, is_small


class BackwardPass:
    """The flat gradient as it fills up, and who chooses this step's entries.

    Attributes:
        graph: autograd's id of the pass.
        grad: (capacity,) the flat gradient.
        selector: finds this step's entries; ``None`` when this pass chooses nothing.
        unmasked: number of entries that were unmasked when it began.
        thread: the thread that its first node ran in.
        held: sums over the uses of tensors that are used more than once.
    """

    def __init__(self, graph: int, values: Tensor, selector: Selector | None, unmasked: int) -> None:
        self.graph = graph
        self.unmasked = unmasked
        self.thread = threading.get_ident()
        self.grad = torch.zeros_like(values)
        self.selector = selector
        self.held: dict[MaskedTensor, Gradient] = {}
        self._settled: set[MaskedTensor] = set()
        self._small = SmallGradients()
        self._keeps_small = selector is None or selector.offer_small is not None

    def settle(self, tensor: MaskedTensor, gradient: Gradient) -> None:
        """Takes what is needed from a tensor's whole gradient."""
        with without_autocast(gradient.device):  # in which the forward pass may have been, or backward is called
            if not gradient.numel:
                if self.selector is not None:
                    self.selector.skip(tensor)
                return
            self._take(tensor, gradient)

    def settle_held(self) -> None:
        """Settles what is held still: nothing more will come."""
        while self.held:
            self.settle(*self.held.popitem())

    def settle_small(self) -> None:
        """Settles what is small, after all else."""
        small = self._small
        if not small.pairs:
            return
        slots = torch.cat([tensor.slots for tensor in small.tensors]).to(self.grad.device)
        self.grad[slots] += small.take().to(self.grad)
        if self.selector is not None and self.selector.offer_small is not None:
            self.selector.offer_small(small)

    def _take(self, tensor: MaskedTensor, gradient: Gradient) -> None:
        again = tensor in self._settled  # a graph that was kept runs backward together with a newer one
        self._settled.add(tensor)
        if is_small(gradient) and self._keeps_small and not again:
            self._small.add(tensor, gradient)
            return
        if self.selector is not None and not again:
            taken = self.selector.offer(tensor, gradient)
        else:
            taken = gradient.take(tensor.indices)
        if tensor.count:
            slots, taken = tensor.slots.to(self.grad.device), taken.to(self.grad)
            self.grad[slots] = self.grad[slots] + taken if again else taken
