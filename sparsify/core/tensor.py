"""One parameter that is trained at some of its entries, and its uses in the graphs that are alive.

    forward    each use of the parameter is counted: ``tensor.waiting`` has its number
    backward   the use's node hands over the gradient, and its number is taken back; the sum over the uses is complete
               once none waits
    dropped    a node that dies takes its number back, whether it has run or not

A graph that is kept (``retain_graph=True``, or an output that never runs backward) keeps its numbers, so that the sums
of its tensors wait for the end of each backward pass: complete all the same, in more memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparsify.core.devices import put
from sparsify.core.gradients import Gradient, as_matrix, tap_gradient
from sparsify.errors import SparsifyError

REENTRANT = (
    "`{name}` was recomputed inside a backward pass of its own, as by reentrant activation checkpointing; entries are "
    "selected over the whole model, in one pass. Use the non-reentrant form: checkpoint(..., use_reentrant=False), or "
    'gradient_checkpointing_kwargs={{"use_reentrant": False}}. A cached loss has to call the sparsified model itself.'
)
NOT_TRANSFORMED = (
    "`{name}` was used in a transform of torch.func (vmap, grad, jacrev), which does not reach the flat delta: call "
    "the model outside of it, or by functional_call(model, weights, inputs) with all weights detached: {{n: p.detach() "
    "for n, p in model.named_parameters() if p is not model.sparse_values}}."
)
NOT_TWICE = (
    "a backward pass with create_graph=True reached a sparsified model, and its gradients cannot be differentiated a "
    "second time (double backward, as for gradient penalties and Hessians). Leave out create_graph, or train the plain "
    "model: desparsify(model)."
)
_NUMBERS = itertools.count()


class Use:
    """One use of some tensors in a forward pass, held by its autograd node.

    ``root`` (1,) is the node's input through which autograd reaches the flat delta, after the last use. Where
    checkpointing computes the use again (``recomputed``), its own node only refills the first one's.
    """

    def __init__(self, tensors: Sequence[MaskedTensor], root: Tensor, recomputed: bool = False) -> None:
        self.tensors, self.root, self._recomputed, self._number = tensors, root, recomputed, next(_NUMBERS)
        self.unread: Collection[MaskedTensor] = ()  # those of a shared node that got no gradient
        self.around = torch._C._current_graph_task_id()  # the backward pass inside which it was made; -1 for none
        for tensor in () if recomputed else tensors:
            tensor.waiting.add(self._number)

    def collect(self, device: torch.device, gradient: Callable[[MaskedTensor], Gradient | Tensor]) -> None:
        """Ends the use in backward: hands over the gradients that are wanted, which a function makes on a device."""
        if torch.is_grad_enabled():  # in a backward pass, under create_graph=True only
            raise SparsifyError(NOT_TWICE)
        if self._recomputed:
            raise SparsifyError(REENTRANT.format(name=self.tensors[0].name))
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # else it may run again
            self._end()
        self.tensors[0].collector.collect(self, device, gradient)

    def _end(self) -> None:
        for tensor in self.tensors:
            tensor.waiting.discard(self._number)

    __del__ = _end


@dataclass(eq=False, repr=False)
class MaskedTensor:
    """One parameter; it always holds the effective values: base + delta at its entries, else the pretrained ones."""

    number: int  # its position among the model's masked tensors, from 0
    owner: nn.Module  # has the parameter; the first of those that share it
    attribute: str  # the parameter's name in its owner
    name: str  # its first name in the model's ``named_parameters``
    offset: int  # global id of its first entry: the number of entries in the tensors before it
    frozen_row: int | None = None  # a row that is no candidate (an embedding's padding row)
    rows: tuple[int, ...] | None = None  # those that are trained whole from the start; no other is then trained
    collector: Any = None  # the TrainingStep (step.py) that takes the gradients

    is_quantized: ClassVar[bool] = False  # whether no trained value can be written into the parameter

    def __post_init__(self) -> None:
        self.parameter: Any = self.owner._parameters[self.attribute]  # ReadParameters (taps.py) keep it up to date
        self.shape = self.shape_now  # at sparsify()
        self.numel = self.shape.numel()
        self.waiting: set[int] = set()  # numbers of the uses that have not run backward; sets need no lock

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "waiting": set()}  # a copy of the model starts with no open graph

    @property
    def shape_now(self) -> torch.Size:
        return self.parameter.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def weight(self) -> Tensor:
        """The effective values, detached."""
        return self.parameter.detach()

    @property
    def matrix(self) -> Tensor:
        """(rows, cols): the last dimension is kept, a vector is one row."""
        return as_matrix(self.weight)

    @property
    def count(self) -> int:
        """Number of unmasked entries."""
        return self.collector.entries.counts[self.number]

    @property
    def slots(self) -> Tensor:
        """(k,) int64: positions of the unmasked entries in the flat delta, which are in order of unmasking."""
        return self.collector.entries.of(self.number)[0].to(self.parameter.device)

    @property
    def indices(self) -> Tensor:
        """(k,) int64: their flat, row-major positions in the parameter, ascending."""
        return (self.collector.entries.of(self.number)[1] - self.offset).to(self.parameter.device)

    @property
    def base(self) -> Tensor:
        """(k,) their pretrained values, in the weight's dtype."""
        entries = self.collector.entries
        return entries.base.index_select(0, entries.of(self.number)[0]).to(self.parameter.device, self.dtype)

    @property
    def delta(self) -> Tensor:
        """(k,) trained minus pretrained value, in the flat delta's dtype."""
        entries = self.collector.entries
        return entries.values.detach().index_select(0, entries.of(self.number)[0]).to(self.parameter.device)

    @property
    def never_candidates(self) -> Tensor:
        """Flat indices, ascending, of the frozen row's entries."""
        row, cols = (0, 0) if self.frozen_row is None else (self.frozen_row, self.shape[-1])
        return torch.arange(row * cols, (row + 1) * cols, device=self.parameter.device)

    @property
    def not_candidates(self) -> Tensor:
        """Flat indices, in no order, of the entries that are unmasked already or in the frozen row."""
        return self.indices if self.frozen_row is None else torch.cat([self.indices, self.never_candidates])

    def gradient(self, grad: Tensor) -> Gradient:
        """The gradient of a tap, in the form that the collector takes."""
        return tap_gradient(grad)

    def take(self, indices: Tensor) -> Tensor:
        """Returns the effective values (n,) at flat indices (n,)."""
        return self.weight.take(indices)

    def write(self, values: Tensor) -> None:
        """Writes values (k,) into the weight at the indices; autograd's version counter sees it."""
        put(self.parameter.detach(), self.indices, values.to(self.parameter.device, self.dtype))
