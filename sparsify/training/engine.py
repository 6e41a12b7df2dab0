"""The engine of a sparsified model: a training step on several devices, ranks and shards, with what a run needs.

All state is parameters and buffers of the model: the entries (``core/entries.py``) and ``sparse_settings`` (n,) uint8,
what a state dict is compared by when it is loaded. The engine holds settings and what lives for a single step.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from sparsify.common.interrupts import uninterrupted
from sparsify.common.names import ENGINE
from sparsify.common.ranks import END, Ranks, num_ranks
from sparsify.common.shards import is_fully_sharded, parallel_ranks
from sparsify.common.streams import Streams
from sparsify.core.entries import VALUES, count_by_tensor
from sparsify.core.gradients import Gradient
from sparsify.core.step import Pass, TrainingStep, read_weights
from sparsify.core.tensor import NOT_TRANSFORMED, MaskedTensor, Use
from sparsify.core.topk import Winners
from sparsify.errors import SparsifyError
from sparsify.masked.recompute import release_memory, saving
from sparsify.masked.tensor import ModelTensor
from sparsify.selection.joined import JoiningPass
from sparsify.selection.policies import AccumulatingPolicy, SelectorFactory, policy_of
from sparsify.strategies.strategy import check_steps
from sparsify.training import optimizer_steps
from sparsify.training.compiled import CompiledGraphs, check_not_exported
from sparsify.training.distributed import agree, check_ranks_alike, read_base
from sparsify.training.entries import ModelEntries, SparseValues
from sparsify.training.forward import Forward, Forwards
from sparsify.training.plan import Plan
from sparsify.training.weights import OFFLOADED, EffectiveWeights, check_trained

OVERLAPPING = (
    "two backward passes through one sparsified model ran at the same time, in several threads or one inside the "
    "other, and part of one's gradient is lost: they shared a GPU, or one unmasked entries that the other did not know "
    "of. Run them one after the other (in threads with a lock around backward()); forward passes may overlap."
)
COLLECT, COMMIT = "sparsify::collect", "sparsify::commit"  # ranges of torch's profiler


class Engine(TrainingStep):
    """Trains a model at ``budget`` of its entries, by a plan; reached by :func:`sparsify.get_engine`."""

    saving: Any = staticmethod(saving)
    pass_kind = JoiningPass

    def __init__(self, plan: Plan) -> None:
        self.root, self.strategy, self.seed = plan.model, plan.strategy, plan.seed
        self.ranks = Ranks()
        self.selectors = SelectorFactory(self.ranks, plan.seed)
        self.entries: ModelEntries
        entries = ModelEntries(plan.model, [tensor.numel for tensor in plan.tensors])
        self.tensors: Sequence[ModelTensor]
        parts = plan.strategy.importance, plan.schedule, plan.tensors, entries
        policy = policy_of(plan.strategy)(*parts, plan.budget, plan.steps, self.selectors)
        super().__init__(plan.tensors, entries, policy)
        self.policy.kept = sum(tensor.num_candidates for tensor in plan.tensors if tensor.rows)
        self.found_steps: int | None = None  # the steps of a Trainer, which the next one may replace
        self.dense_names = tuple(plan.targets.saved)
        trainable = (each.name for each in plan.targets.candidates if each.parameter.requires_grad)
        self.frozen_names = (*trainable, *plan.targets.frozen)  # that require grad when the model is plain again
        self.new_names, self.buffer_digests = plan.new_names, plan.buffer_digests
        self.folder = Path.cwd()  # which a relative path of the base begins at
        self.extended_at = 0  # number of entries that were unmasked when the run was last extended
        self.weights, self.streams = EffectiveWeights(self, plan.tensors, entries), Streams()
        self._selected_from = 0  # slot of the first entry that the step in progress has unmasked
        self._had_dropped = False  # whether the model that this is a copy of had dropped that step's gradient
        self.compiled = CompiledGraphs(self)
        self._begun: dict[int, tuple[int, int, int]] = {}  # of backward passes: thread, and entries and passes then
        self._compared: set[int] = set()  # the steps, up to two, in which the ranks were found to be alike
        self.groups: dict[MaskedTensor, list[MaskedTensor]] = {}  # tensors that share a node in the root's forward
        self._forwards = Forwards()
        self.shared_tap = self._forwards.tap
        self.was_sorted = False  # whether an optimizer's earlier state is of entries in another order
        self._counted_by_hook = False  # whether the last step was
        self._moves = 0  # of the flat delta after a backward pass, by anything but a step that was counted
        self.hooks: list[Any] = []  # on the root
        self.exporter: Any = None  # of the model, to code that needs nothing else of training
        self.parallel = parallel_ranks(plan.model)  # that each copy of a tensor-parallel model is on
        self.was_sharded = False  # whether the root has run forward under FSDP2
        # of a state dict that the root loads: whether it has entries, prefix, all names of a trained state
        self.loading: tuple[bool, str, set[str] | None] = (False, "", None)

    def __getstate__(self) -> dict[str, Any]:
        open_now: dict[str, Any] = {"_passes": {}, "_begun": {}, "passes": 0, "paused": False}
        open_now["_had_dropped"] = self._has_dropped()
        unset = dict.fromkeys(("_lock", "_forwards", "shared_tap", "current_root"))
        return {**self.__dict__, **open_now, **unset}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock(), _forwards=Forwards())
        self.shared_tap = self._forwards.tap
        optimizer_steps.watch(self)

    def start(self, selected: Tensor) -> None:
        """Unmasks the entries (n,), global ids, that were chosen before training."""
        self.append(selected, count_by_tensor(selected, self.entries.ends).tolist())
        self.restart()
        self.weights.write()

    @property
    def values(self) -> SparseValues:
        """(capacity,) the flat delta."""
        return self.entries.values

    @property
    def unmasked(self) -> int:
        """Number of entries unmasked so far; their slots are 0 to ``unmasked - 1``."""
        return self.entries.count

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.entries.step

    @property
    def budget(self) -> int:
        """Entries to unmask in all."""
        return self.policy.budget

    @property
    def steps(self) -> int | None:
        """Planned optimizer steps; may be set until the first backward pass, and later where they are not known."""
        return self.policy.steps

    @steps.setter
    def steps(self, steps: int | None) -> None:
        steps, has_begun = check_steps(steps), self.step or self.passes
        if steps and self.steps and steps != self.steps and has_begun and not self.policy.static:
            problem = f"steps={steps:,} for a run that has begun with steps={self.steps:,}"
            raise SparsifyError(f"{problem}; extend(model, steps={steps}, optimizer=optimizer) gives it more.")
        self.policy.steps = steps

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 has sharded the weights."""
        return is_fully_sharded(self.root)

    @property
    def in_forward(self) -> bool:  # type: ignore[override]
        """Whether the root runs forward, or a part of it is recomputed."""
        return bool(self._forwards.running) or torch._C._current_graph_task_id() != -1

    @property
    def around_forward(self) -> int:  # type: ignore[override]
        graph = torch._C._current_graph_task_id()
        # nothing is recomputed in a node that saves nothing: the hook of a leaf, as a cached loss is one, runs a model
        if graph != -1 and type(torch._C._current_autograd_node()).__name__ == "AccumulateGrad":
            return graph
        return self._forwards.running[-1].around if self._forwards.running else -1

    def enter(self) -> None:
        """The root's forward begins: refreshes the weights and makes a root anchor for compiled parts."""
        if torch.compiler.is_dynamo_compiling():
            self.compiled.enter()
        else:
            check_not_exported()
            if torch._C._functorch.is_functorch_wrapped_tensor(self.values):
                raise SparsifyError(NOT_TRANSFORMED.format(name=VALUES))
            with torch._C.DisableTorchFunctionSubclass():  # for reads of masked parameters
                self.refresh()
            super().root_anchor()
            self._forwards.running.append(Forward(self))

    def leave(self) -> None:
        """The root's forward has ended, or failed."""
        self.compiled.leave()
        if not torch.compiler.is_dynamo_compiling():
            del self._forwards.running[-1:]

    def root_anchor(self) -> Tensor:
        if self._forwards.running and self.current_root is not None:  # the root's forward has checked it
            return self.current_root.output
        check_not_exported()
        self.before_read()
        return super().root_anchor()

    def before_read(self) -> None:
        """Refreshes the weights where the flat delta has moved, and parts of the root run forward without it."""
        if not (self.in_forward or self.paused or self.weights.loaded) and self.weights.are_behind:
            with torch._C.DisableTorchFunctionSubclass():
                self.refresh()

    def start_pass(self, graph: int, around: int) -> Pass:
        if vars(self.root).get(ENGINE) is not self:
            raise SparsifyError("this graph was built before desparsify(): compute the loss again.")
        check_trained(self, "backward()")
        self.catch_up()
        optimizer_steps.note_values(self)
        if num_ranks() > 1 and len(self._compared) < 2 and self.step not in self._compared:
            check_ranks_alike(self)  # in the second step, too: then it shows whether gradients are averaged
            self._compared.add(self.step)
        if graph in self._begun:
            raise SparsifyError(OVERLAPPING)
        thread = threading.get_ident()
        for other in list(self._passes):
            if other != around and self._begun[other][0] == thread:
                del self._passes[other], self._begun[other]  # it failed: a thread runs one, and those inside of it
        if self.entries.values.grad is None and not self._passes:
            self.passes = 0  # the gradients of those before are gone, as where one was interrupted
        adds = self.selected and not self._passes and optimizer_steps.adds_to_gradient(super().root_anchor())
        if adds and isinstance(self.policy, AccumulatingPolicy):
            current = self.pass_kind(self.policy.selector_again(self._selected_from))
        else:
            current = super().start_pass(graph, around)
        self._begun[graph] = thread, self.entries.count, self.passes
        return current

    def collect(self, use: Use, device: torch.device, gradient: Callable[[MaskedTensor], Gradient | Tensor]) -> None:
        with self._section(COLLECT, device):
            super().collect(use, device, gradient)

    def commit(self) -> Tensor:
        with self._section(COMMIT, self.entries.values.device):
            grad = super().commit()
        if self.passes > 1:
            self.policy.summed = self.step + 1
        if self.selected and not torch._C._autograd._get_current_graph_task_keep_graph():  # else it may be used again
            _after_pass(lambda: optimizer_steps.note_gradient(self, self.weights.writes))
        self.compiled.pass_done()
        release_memory()
        self.streams.forget()
        return grad

    def _section(self, name: str, device: torch.device) -> AbstractContextManager[object]:
        """A context for work of a backward pass: without autocast and torch functions, in order with other streams."""
        profiled, autocast = torch._C._autograd._profiler_enabled(), torch.is_autocast_enabled(device.type)
        in_order = self.streams.are_one(device) if device.type == "cuda" else not self.streams.seen
        if in_order and not (profiled or autocast):
            return torch._C.DisableTorchFunctionSubclass()  # others take longer than a small gradient
        section = ExitStack()
        section.enter_context(torch._C.DisableTorchFunctionSubclass())
        section.enter_context(record_function(name) if profiled else nullcontext())
        section.enter_context(torch.autocast(device.type, enabled=False) if autocast else nullcontext())
        section.enter_context(self.streams.joined(device))
        return section

    def unmask(self, winners: Winners, counts: Sequence[int], grad: Tensor) -> None:
        if not winners.ids.numel():
            self.selectors.warn_of_none(self.policy)
        with uninterrupted():
            if self.selected and self.entries.count > (first := self._selected_from):  # by earlier passes
                grad[first:] = self.values.grad[first:] = 0  # type: ignore[index]  # the winners' gradients are the sums
                self.entries.truncate(first)
            self._selected_from, self._had_dropped = self.entries.count, False
            super().unmask(winners, counts, grad)

    def agree(self, winners: Winners, finite: Tensor) -> tuple[list[int], bool]:
        if num_ranks() == 1:
            return super().agree(winners, finite)
        return agree(self.entries, self.ranks, winners, finite)

    def finish(self, current: Pass) -> Tensor:
        _, count, passes = self._begun.pop(torch._C._current_graph_task_id())
        if count != self.entries.count:
            raise SparsifyError(OVERLAPPING)
        if self.selected and (self._passes or passes != self.passes):
            current.selector = None  # another thread's pass is not in its sums
        if num_ranks() > 1 and current.selector is not None:  # all have to have come to the end of their passes
            self.ranks.headers([END], (), [tensor.name for tensor in self.tensors])
        grad = super().finish(current)
        if self.policy.active is not None:
            grad.masked_fill_(~self.policy.active, 0)
        # DDP averages it by itself, over copies of tensor-parallel ranks
        return self.ranks.average_(grad) if self.sharded or self.parallel > 1 else grad

    def append(self, ids: Tensor, counts: Sequence[int], base: Tensor | None = None) -> None:
        self.weights.are_sums = False  # -0.0 stays what it is until they are written
        first = self.entries.count
        self.values.data[first : first + ids.numel()] = 0  # noise on the whole gradient moves them before
        if self.sharded:
            self.entries.append(ids, self.values.detach().new_zeros(ids.numel()), counts)
            _after_pass(lambda: read_base(self.tensors, self.entries, self.ranks, first))
        else:
            if base is None or base.dtype.itemsize < self.entries.base.dtype.itemsize:
                base = read_weights(self.tensors, ids, counts, self.entries.base)
            self.entries.append(ids, base, counts)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        if optimizer is not None and optimizer_steps.was_counted(self, optimizer):
            self.refresh()
            return
        if optimizer is not None and not self.passes and self.weights.are_in_step:
            return  # it has initialised the optimizer's state, as torch's distributed checkpoint does
        if self.weights.loaded:
            self.state_loaded(has_entries=self.loading[0])
        optimizer_steps.warn_of_unreached(self)
        with uninterrupted():
            optimizer_steps.note_counted(self)
            self._counted_by_hook = optimizer is not None
            self._moves = 0
            self._forwards.running.clear()  # forward passes that were interrupted have not left
            self.compiled.step_done()
            self.weights.keep_frozen()
            super().optimizer_stepped()
        if optimizer is not None and not torch.compiler.is_dynamo_compiling():
            optimizer_steps.warn_of_late(self, optimizer)

    def write(self) -> None:
        self.weights.write()

    def count_step(self) -> None:
        """Counts a step of an optimizer that is none of ``torch.optim``; raises where the hook has counted it."""
        if self._counted_by_hook and not self.passes:
            raise SparsifyError("this step was counted already, by torch.optim; leave optimizer_stepped(model) out.")
        check_trained(self, "optimizer_stepped()")
        self.optimizer_stepped()

    def catch_up(self, *, by_value: bool = False) -> bool:
        """Catches up with interrupted steps and with writes of others; returns whether there is no sign of any."""
        is_uncounted = optimizer_steps.has_uncounted_step(self)
        others = by_value or self.weights.loaded or self.entries.written or is_uncounted
        if not others and self.weights.are_as_left:
            self._mask_dropped()
            return True
        if self.entries.values.is_meta:
            raise SparsifyError(OFFLOADED.format(name=VALUES))
        if is_uncounted and self.weights.are_in_step:
            optimizer_steps.forget_uncounted_steps(self)  # it failed before it had moved them
        elif is_uncounted:
            self.optimizer_stepped()
        if self.weights.loaded and not self.paused:  # by a part of the model
            self.state_loaded(has_entries=self.loading[0])
        self.weights.adopt_touched()
        if not self.entries.catch_up(by_value=by_value):
            self._mask_dropped()
            return False
        check_trained(self, "a state was loaded")
        if self.entries.problem() is not None:
            average = "Do not average them (use_buffers=False; in an EMA of your own copy_() the buffers())."
            cast = "Nor cast: model.type() casts them, model.to() does not."
            raise SparsifyError(f"the entries were written to, and make no sense any more. {average} {cast}")
        self.state_loaded()
        return False

    def refresh(self) -> None:
        """Brings the weights in step with the flat delta."""
        if not (as_left := self.catch_up()):
            self.weights.freeze()
        writes = self.weights.writes
        self.weights.refresh(as_left)
        if self.weights.writes > writes:  # what has moved the flat delta may have written into the buffers, too
            self.catch_up(by_value=True)
            self._moves += bool(self.passes)
            optimizer_steps.warn_of_uncounted(self._moves)
        self.streams.use(self.entries.values.device)

    def _mask_dropped(self) -> None:
        """Masks again what the step in progress has unmasked, if the gradient was dropped."""
        if self.paused or self._passes or not self.selected:
            return
        with self._lock:  # of several threads that run forward, one masks them
            if self._has_dropped():
                warnings.warn(optimizer_steps.DROPPED, stacklevel=4)
                with uninterrupted():
                    self.entries.truncate(self._selected_from)
                    self.restart()

    def _has_dropped(self) -> bool:
        dropped = self._had_dropped or optimizer_steps.was_dropped(self, self.weights.writes)
        return dropped and self.selected and self.weights.are_in_step

    @torch.no_grad()
    def state_loaded(self, *, has_entries: bool = True) -> None:
        """Brings everything in step after a state dict was loaded."""
        plain, self.loading = self.weights.end_load(has_entries), (False, "", None)
        self.current_root = None  # the flat delta may be another one
        self.entries.read()
        self.restart()
        self.weights.adopt(plain)

    def restart(self) -> None:
        """The next backward pass begins a step, of an unmasked set that is another one now."""
        self.policy.active = None
        self.selectors.restart()
        self.selected, self.passes = False, 0
        for tensor in self.tensors if self.policy.static else ():
            tensor.dormant = not tensor.count


def _after_pass(callback: Any) -> None:
    """Has autograd call a function at the end of the running backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
