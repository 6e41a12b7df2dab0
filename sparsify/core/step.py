"""The training step: from the gradients of all nodes to one flat gradient, and the entries that they unmask.

    forward          each use of a masked tensor is counted; its node hangs on the root anchor
    collect          a node hands over a weight's gradient. Once no use of the tensor waits, the unmasked entries' part
                     goes into the flat gradient, the masked ones are offered to the selector, and the rest is freed
    commit           the root anchor's node, which autograd runs after all uses: the winners join the entries, and the
                     flat gradient, theirs included, becomes that of ``sparse_values``
    optimizer step   any optimizer moves ``sparse_values``; a hook counts the step and writes base + delta

All graphs over a flat delta share one root anchor, so that those that meet in one backward pass end together.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from sparsify.core.entries import Entries, count_by_tensor
from sparsify.core.gradients import Gradient
from sparsify.core.module import NOTHING
from sparsify.core.policy import Policy, Selector
from sparsify.core.tensor import NOT_TRANSFORMED, NOT_TWICE, MaskedTensor, Use
from sparsify.core.topk import Winners
from sparsify.errors import SparsifyError


class Pass:
    """One backward pass: what it takes of the gradients, and the selector of the entries to unmask, if any."""

    def __init__(self, selector: Selector | None) -> None:
        self.selector = selector
        self.taken: list[tuple[Tensor, Tensor]] = []  # slots (k,), and their gradients
        self.held: dict[MaskedTensor, Gradient] = {}  # sums of tensors that are used again
        self.settled: set[MaskedTensor] = set()

    def hold(self, gradients: Mapping[MaskedTensor, Gradient | Tensor]) -> None:
        """Takes the gradients of a use; those of taps are plain tensors, of the parameter's shape."""
        for tensor, found in gradients.items():
            self.add(tensor, tensor.gradient(found) if isinstance(found, Tensor) else found)

    def add(self, tensor: MaskedTensor, gradient: Gradient) -> None:
        """Adds a gradient to those of other uses, and settles the sum that no other is to come to."""
        if tensor in self.held:
            gradient = self.held.pop(tensor).add(gradient)
        if tensor.waiting:
            self.held[tensor] = gradient.held()
        else:
            self.settle(tensor, gradient)

    def settle(self, tensor: MaskedTensor, gradient: Gradient) -> None:
        """Takes the unmasked entries' part of a tensor's whole gradient and offers the rest to the selector."""
        again = tensor in self.settled  # a graph without saved tensors runs again, though it was not kept
        self.settled.add(tensor)
        if self.selector is None or again:
            taken = gradient.take(tensor.indices)
        else:
            taken = self.selector.offer(tensor, gradient)
        self.taken.append((tensor.collector.entries.of(tensor.number)[0], taken))

    def settle_rest(self) -> None:
        """Settles the sums that are still held."""
        while self.held:
            self.settle(*self.held.popitem())

    def flat_gradient(self, like: Tensor) -> Tensor:
        """Adds up what was taken, in one operation: (capacity,), as the flat delta is."""
        grad = torch.zeros_like(like)
        if self.taken:
            slots, values = [torch.cat([own.to(grad.device) for own in part]) for part in zip(*self.taken, strict=True)]
            grad.index_add_(0, slots, values.to(grad.dtype))
        return grad


class Root:
    """The root anchor over a flat delta: ``output`` (1,) is an input of every use."""

    def __init__(self, values: Tensor, step: TrainingStep) -> None:
        self._made_of = values, values.device, values.dtype, values.requires_grad
        with torch.inference_mode(False), torch.enable_grad():
            self.output: Tensor = _RootNode.apply(values, weakref.ref(step))

    def serves(self, values: Tensor) -> bool:
        """Whether this is the root anchor of a flat delta as it is now."""
        made_of, *kind = self._made_of
        return made_of is values and kind == [values.device, values.dtype, values.requires_grad]


class _RootNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, step: weakref.ref[TrainingStep]) -> Tensor:
        ctx.step = step  # weakly: the step itself holds the root anchor
        ctx.set_materialize_grads(False)
        return values.new_zeros(1)  # torch.compile takes a float64 scalar for a Python number, and compiles again

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # a compiled use does not see it
            raise SparsifyError(NOT_TWICE)
        return ctx.step().commit(), None


class TrainingStep:
    """What happens from one optimizer step to the next: tensors hand over gradients, a policy says what to unmask."""

    pass_kind: type[Pass] = Pass
    compiled: Any = None  # computes the layers while torch.compile traces them
    in_forward = True  # whether the model runs forward, as far as is known, so that module.weight is a tap
    shared_tap: Any = staticmethod(lambda tensor: None)  # a tensor's tap where one node has those of several
    saving: Any = staticmethod(lambda *of, always: NOTHING)  # a context for a layer, in which its input is saved
    frozen: Set[MaskedTensor] = frozenset()  # tensors that do not train for now
    around_forward = -1  # the backward pass inside which the model runs forward, by autograd's id; -1 for none

    def __init__(self, tensors: Sequence[MaskedTensor], entries: Entries, policy: Policy) -> None:
        self.tensors, self.entries, self.policy = tensors, entries, policy
        self.selected = False  # whether the entries of the optimizer step in progress have been selected
        self.passes = 0  # since the last optimizer step
        self.reached: set[MaskedTensor] | None = set()  # until the first step: tensors that got a gradient
        self.paused = False  # whether the weights are the pretrained ones for now
        self.current_root: Root | None = None  # the root anchor that was last asked for
        self._passes: dict[int, Pass] = {}  # those that are running, by autograd's id; threads run several
        self._lock = threading.RLock()  # autograd runs the nodes of each device in a thread of its own
        for tensor in tensors:
            tensor.collector = self

    def use(self, tensors: Sequence[MaskedTensor]) -> Use | None:
        """Counts a use, in a forward pass, of those tensors whose gradients will be collected; ``None`` if none is."""
        root = self.root_anchor()
        if self.paused or not torch.is_grad_enabled() or not root.requires_grad:
            return None
        # after the budget is spent a checkpoint may be recomputed, and what is selected be masked again
        checkpointed = not self.policy.static and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        every, counts = self.policy.growing() or self.selected or checkpointed, self.entries.counts
        used: Sequence[MaskedTensor] = tensors
        if self.frozen or not every:
            used = [own for own in tensors if (every or counts[own.number]) and own not in self.frozen]
        # a part that runs forward by itself inside a backward pass is checkpointing's: its nodes refill the first ones
        graph = torch._C._current_graph_task_id()
        recomputed = graph != -1 and graph != self.around_forward
        for own in used if torch._C._are_functorch_transforms_active() else ():
            if own.owner._parameters.get(own.attribute) is own.parameter:  # it is no argument of functional_call()
                raise SparsifyError(NOT_TRANSFORMED.format(name=own.name))
        return Use(used, root, recomputed) if used else None

    def root_anchor(self) -> Tensor:
        """(1,) that of the flat delta as it is now."""
        values = self.entries.values
        with self._lock:  # one root for the forward passes of all threads
            if self.current_root is None or not self.current_root.serves(values):
                self.current_root = None  # releases autograd's accumulator of a flat delta that was cast since
                self.current_root = Root(values, self)
            return self.current_root.output

    def collect(self, use: Use, device: torch.device, gradient: Callable[[MaskedTensor], Gradient | Tensor]) -> None:
        """Takes a use's gradients, which a function makes, where they are wanted; the first use begins a pass."""
        graph = torch._C._current_graph_task_id()
        tensors = [own for own in use.tensors if own not in use.unread]
        with self._lock:
            current = self._passes.get(graph)
            if current is None:
                root: Any = use.root.grad_fn
                if root is None or not torch._C._will_engine_execute_node(root):
                    return  # as a backward pass for the gradient of an input alone
                current = self._passes[graph] = self.start_pass(graph, use.around)
            if self.reached is not None:
                self.reached.update(tensors)
            counts, seen = self.entries.counts, () if current.selector is None else current.selector.sees
            current.hold({own: gradient(own) for own in tensors if seen is None or counts[own.number] or own in seen})

    def commit(self) -> Tensor:
        """Ends the backward pass: unmasks the winners and returns the flat gradient (capacity,)."""
        with self._lock:
            current = self._passes.pop(torch._C._current_graph_task_id())
            current.settle_rest()
            grad = self.finish(current)
            self.passes += 1
        return grad

    def start_pass(self, graph: int, around: int) -> Pass:
        """Begins a backward pass, by autograd's id of it, and of the one inside which its uses were made, or -1."""
        return self.pass_kind(None if self.selected else self.policy.selector())

    def finish(self, current: Pass) -> Tensor:
        """Unmasks what a pass has found, and returns its flat gradient."""
        grad, selector = current.flat_gradient(self.entries.values.detach()), current.selector
        if selector is not None:
            winners = selector.winners()
            counts, is_finite = self.agree(winners, selector.finite() & grad.isfinite().all())
            if not is_finite:
                return grad.fill_(torch.nan)  # the optimizer, or GradScaler, sees that this pass overflowed
            self.unmask(winners.first(sum(counts)), counts, grad)
        return grad

    def unmask(self, winners: Winners, counts: Sequence[int], grad: Tensor) -> None:
        """Gives the winners that have no slot the next free ones and writes their gradients into ``grad``."""
        first, new = self.entries.count, self.policy.unmask(winners)
        grad[first : first + new.ids.numel()] = new.grads
        if new is not winners:
            counts = count_by_tensor(new.ids, self.entries.ends).tolist()
        self.append(new.ids, counts, new.weights)
        self.selected = True

    # -------------------------------------------------------------------------------- what a larger run replaces

    def before_read(self) -> None:
        """Called before a layer is computed, or ``module.weight`` read, outside of the model's forward."""

    def agree(self, winners: Winners, finite: Tensor) -> tuple[list[int], bool]:
        """How many of the winners each tensor has, and whether all gradients were finite: the one wait for a GPU."""
        counts = count_by_tensor(winners.ids, self.entries.ends)
        *sizes, is_finite = torch.cat([counts, finite.view(1).to(counts)]).tolist()
        return sizes, bool(is_finite)

    def append(self, ids: Tensor, counts: Sequence[int], base: Tensor | None = None) -> None:
        """Adds entries (n,), with the values that the weights hold there as their base."""
        base = read_weights(self.tensors, ids, counts, self.entries.base) if base is None else base
        self.entries.append(ids, base, counts)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Counts an optimizer step and writes the new deltas into the weights."""
        self.entries.stepped(self.entries.count if self.policy.active is None else int(self.policy.active.sum()))
        self.selected, self.passes, self.reached = False, 0, None
        self.write()

    def write(self) -> None:
        """Writes base + delta into the weights."""
        for tensor, values in zip(self.tensors, self.entries.effective().split(self.entries.counts), strict=True):
            if tensor.count:
                tensor.write(values)


def read_weights(tensors: Sequence[MaskedTensor], ids: Tensor, counts: Sequence[int], like: Tensor) -> Tensor:
    """Reads the weights (n,) at global ids (n,), ``counts`` of each tensor, with another tensor's dtype and device."""
    ids, order = ids.sort()
    values = torch.empty(ids.numel(), dtype=like.dtype, device=like.device)
    parts = zip(tensors, ids.split([*counts]), order.to(like.device).split([*counts]), strict=True)
    for tensor, own, places in parts:
        if own.numel():
            values[places] = tensor.take((own - tensor.offset).to(tensor.parameter.device)).to(values)
    return values
