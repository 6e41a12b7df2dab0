"""The effective values: base + delta in the weights, before anything reads them.

after a step, or a load            :meth:`~EffectiveWeights.write`: O(budget)
before a forward, a state dict     :meth:`~EffectiveWeights.adopt_touched` takes what was written into weights for
                                   changes of the flat delta; :meth:`~EffectiveWeights.refresh` writes them, in case the
                                   flat delta was written to by anything but an optimizer step
after weights were loaded alone    :meth:`~EffectiveWeights.adopt`, for trained values or another base
``with base_weights(model)``       the pretrained values, for a while
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sparsify.common.interrupts import uninterrupted
from sparsify.common.names import listed
from sparsify.common.raw_bits import fingerprint
from sparsify.common.shards import is_fully_sharded, is_shard, read_own_entries, reshard
from sparsify.core.devices import runs_ahead
from sparsify.core.module import masked_tensors
from sparsify.core.step import TrainingStep
from sparsify.core.taps import CHANGED
from sparsify.core.tensor import MaskedTensor
from sparsify.errors import SparsifyError
from sparsify.kernels import has_triton
from sparsify.masked.tensor import ModelTensor, are_plain
from sparsify.training.distributed import check_root
from sparsify.training.entries import ModelEntries

Model = TypeVar("Model", bound=nn.Module)

OFFLOADED = (
    "`{name}` is on the meta device: it was offloaded after sparsify(), and its trained values would be lost. Take "
    "that back (accelerate.hooks.remove_hook_from_submodules(model)); offload before, and only what is not trained."
)
REPLACED = (
    "`{name}` was replaced after sparsify() by another tensor, which is in no delta: put new values into it in place "
    "(with torch.no_grad(): parameter.copy_(values)), or make the model anew and call sparsify() afterwards."
)


class BaseWeights(AbstractContextManager[Model]):
    """A model whose weights are the pretrained ones inside a ``with`` block, however the block ends."""

    _trained: list[Tensor] | None = None
    _entered = 0

    def __init__(self, weights: EffectiveWeights, model: Model) -> None:
        self._weights, self._model = weights, model

    def __enter__(self) -> Model:
        try:
            with uninterrupted():
                if not self._weights.step.paused:
                    self._trained = self._weights.make_base()
                self._entered += 1
        except BaseException:
            self._leave()
            raise
        return self._model

    def __exit__(self, *error: object) -> None:
        outer = self._entered - 1
        try:
            self._leave(outer)
        except KeyboardInterrupt:  # before it had begun, or after it had ended
            self._leave(outer)
            raise

    def __del__(self) -> None:
        if self._trained is not None:  # an interrupt came between the block and its exit
            self._leave()

    def _leave(self, entered: int = 0) -> None:
        with uninterrupted():
            self._entered = entered
            if self._trained is not None and not entered:
                self._weights.make_trained(self._trained)
                self._trained = None


class EffectiveWeights:
    """The weights of a training step's model at its unmasked entries."""

    def __init__(self, step: TrainingStep, tensors: Sequence[ModelTensor], entries: ModelEntries) -> None:
        self.step, self._tensors, self._entries = step, tensors, entries
        self.base_digests: dict[str, tuple[torch.dtype, str]] = {}  # of the pretrained values, by parameter name
        self.are_sums = False  # whether all of them are base + delta, rounded, to the bit
        self._written: Tensor | None = None  # the flat delta that they were written from
        self._written_dtype: torch.dtype | None = None
        self.writes = 0  # how often they were written
        self._by_address = False  # whether they were written by their addresses
        # tensors whose weights state dicts of the model, or of a part, have replaced, with the last place to load them
        self.loaded: dict[ModelTensor, tuple[nn.Module, str]] = {}
        self._marks: list[tuple[Any, ...]] = []  # by their last write; later changes show in them

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_written": None}  # a copy writes them before they are used

    @property
    def are_in_step(self) -> bool:
        """Whether they were written from this flat delta, by its values: no version sees a write through ``.data``."""
        written, values = self._written, self._entries.values.detach()
        if written is None or (written.device, written.dtype) != (values.device, values.dtype):
            return False
        with torch._C.DisableTorchFunctionSubclass():  # for reads of masked parameters
            were_cast = self._written_dtype != self._tensors[0].parameter.dtype
        return (not were_cast or is_fully_sharded(self._entries.root)) and torch.equal(written, values)

    @torch.no_grad()
    def write(self, *, but: Set[MaskedTensor] = frozenset()) -> None:
        """Writes base + delta into the weights, except into those of some tensors."""
        tensors, values = self._tensors, self._entries.values.detach()
        # an optimizer step that is compiled traces this, and an address means nothing to a graph
        traced = torch.compiler.is_dynamo_compiling()
        check_root(self._entries.root, tensors)
        for tensor in () if traced else tensors:
            if tensor.owner._parameters.get(tensor.attribute) is not tensor.parameter:
                raise SparsifyError(REPLACED.format(name=tensor.name))
        reshard(self._entries.root)
        self._written = None  # an interrupted write is repeated
        with torch._C.DisableTorchFunctionSubclass():  # which would take longer than to write
            self._by_address = not but and not traced and runs_ahead(values.device) and _can_scatter(tensors)
            if self._by_address:
                self._scatter(seen=True)
            else:
                for tensor, own in zip(tensors, self._entries.effective().split(self._entries.counts), strict=True):
                    if own.numel() and tensor not in but:
                        tensor.write(own)
            self._written_dtype = tensors[0].parameter.dtype
        self.are_sums = not but
        self._marks, self._written = self._marks_now(), values.clone()
        self.writes += 1

    def set_frozen(self, tensor: ModelTensor, is_frozen: bool) -> None:
        """Has the entries of a tensor train no longer, or again; who freezes all prepares the model to train others."""
        values = self._entries.values
        frozen = (self.step.frozen | {tensor}) if is_frozen else (self.step.frozen - {tensor})
        if not (values.requires_grad or is_frozen):  # all were frozen
            frozen = set(self._tensors) - {tensor}
            values.requires_grad_(True)
        self.step.frozen = frozen if len(frozen) < len(self._tensors) else frozenset()
        own: Any
        for own in {tensor, *frozen}:
            own.is_frozen = own in self.step.frozen

    @torch.no_grad()
    def keep_frozen(self) -> None:
        """Takes back what an optimizer's momentum or decay has done to entries of tensors that are frozen."""
        values = self._entries.values.detach()
        for tensor in self.step.frozen if self._written is not None else ():
            slots = tensor.slots.to(values.device)
            values[slots] = self._written[slots]  # type: ignore[index]

    def refresh(self, as_left: bool) -> None:
        """Writes the weights if they are not in step with the flat delta, or ``as_left`` where that beats comparing."""
        if self.step.paused:
            return
        if as_left and self._by_address and self._written is not None:
            self._scatter(seen=False)
        elif not self.are_in_step:
            self.write()

    @torch.no_grad()
    def _scatter(self, *, seen: bool) -> None:
        """Writes them into all weights in one launch; whether autograd's version counters see it."""
        from sparsify.kernels.triton import scatter

        entries, values = self._entries, self._entries.effective()
        if not (seen or self.are_sums):  # entries that were unmasked since, and may be masked again, keep their -0.0
            base = entries.base.index_select(0, entries.by_tensor[0]).to(values)
            values = base.where((base == 0) & (values == 0), values)
        weights = [tensor.parameter for tensor in self._tensors]
        scatter(weights, entries.offsets, entries.counts, entries.by_tensor[1], values, seen)

    @property
    def are_as_left(self) -> bool:
        """Whether nothing shows, without a wait for a GPU, that they or the flat delta were changed since the write."""
        return bool(self._marks) and self._marks == self._marks_now()

    @property
    def are_behind(self) -> bool:
        """Whether the flat delta shows a write in place since they were written from it."""
        values: Any = self._entries.values
        if self._written is None or not self._marks or self._marks[0][0] != id(values):
            return False
        with torch._C.DisableTorchFunctionSubclass():  # which would take longer
            return bool(self._marks[0][1] != values._version)

    def _marks_now(self) -> list[tuple[Any, ...]]:
        """Of the flat delta and of each weight: what every change to them changes, but for writes by ``.data``."""
        if is_fully_sharded(self._entries.root) or torch.compiler.is_dynamo_compiling():
            return []
        values: Any = self._entries.values
        with torch._C.DisableTorchFunctionSubclass():  # which would take longer
            marks: list[tuple[Any, ...]] = [(id(values), values._version, values.requires_grad, values.data_ptr())]
            for tensor in self._tensors:
                own, is_other = tensor.parameter, tensor.is_quantized or tensor.is_parallel
                place = own.device if is_other else (own._version, own.data_ptr())
                marks.append((own.requires_grad, own.numel(), place))  # its shape takes ten times as long
            return marks

    def mark_stale(self) -> None:
        """Has them written before they are used next, whether the flat delta changes or not."""
        self._written = None

    def freeze(self) -> None:
        """Sets ``requires_grad`` to False again, which PEFT sets to True; raises where parameters cannot be trained."""
        for tensor in self._tensors:
            parameter = tensor.parameter
            if parameter.is_meta:
                raise SparsifyError(OFFLOADED.format(name=tensor.name))
            if parameter.shape != tensor.shape and tensor.shape_now != tensor.shape:
                problem = f"had shape {tuple(tensor.shape)} at sparsify() and has {tuple(tensor.shape_now)} now"
                raise SparsifyError(CHANGED.format(name=tensor.name, problem=problem))
            if parameter.requires_grad:
                with torch._C.DisableTorchFunctionSubclass():  # else it would be its user's word
                    parameter.requires_grad_(False)

    def write_base(self) -> None:
        reshard(self._entries.root)
        for tensor in self._tensors:
            if tensor.count:
                tensor.write_without_version_bump(tensor.base)

    def end_load(self, has_entries: bool) -> Set[ModelTensor]:
        """Ties the ``loaded`` weights again, the last one wins; returns those that came without entries."""
        loaded, self.loaded = self.loaded, {}
        for module in self._entries.root.modules() if loaded else ():
            for attribute, tensor in masked_tensors(module).items():
                if tensor in loaded:
                    place, name = loaded[tensor]
                    module._parameters[attribute] = place._parameters.get(name)  # [] would be a use of it
        return set() if has_entries else loaded.keys()

    def has_other_base(self, tensor: ModelTensor) -> bool:
        """Whether a weight has other pretrained values than by the digests of the base, as far as that is known."""
        dtype, known = self.base_digests.get(tensor.name, (None, ""))
        is_known = dtype == tensor.dtype and (tensor.is_parallel or not is_shard(tensor.parameter))
        return is_known and fingerprint(tensor.base_weight) != known

    def adopt(self, plain: Set[ModelTensor]) -> None:
        """Takes weights that came without entries for the values that run, or for a base, if frozen ones are others."""
        base, values, others = self._entries.base, self._entries.values.detach(), []
        effective = self._entries.effective().split(self._entries.counts)
        for tensor in plain:
            own, slots = tensor.take(tensor.indices), tensor.slots.to(values.device)
            kept = (own == effective[tensor.number].to(own)).to(values.device)  # it would be rounded as the weight is
            if self.has_other_base(tensor):
                base[slots], kept = own.to(base), torch.zeros_like(kept)
                self.base_digests[tensor.name] = tensor.dtype, fingerprint(tensor.weight)
                others += [tensor.name] if tensor.count else []
            moved = (own.to(values.dtype) - tensor.base.to(values.dtype)).to(values)
            values[slots] = values[slots].where(kept, moved)
        if plain and not self._entries.count:
            loaded = "weights were loaded without entries into a sparsified model that has nothing unmasked"
            remedy = "To go on with a run, load its whole state_dict(), which SparsifyCallback has Trainers save."
            warnings.warn(f"{loaded}: they are its base now. {remedy}", stacklevel=5)
        if others:
            now = "they are the base there now, where the same entries start again"
            loaded = f"other pretrained weights were loaded into {listed(others)}"
            warnings.warn(f"{loaded}: {now}. Load pretrained weights before sparsify().", stacklevel=5)
        self.write(but=plain)
        self._entries.remember()

    def adopt_touched(self) -> None:
        """Takes what was written into weights in place, unless the flat delta was written to, too, as averages do."""
        marks = self._marks_now()
        if marks and self._marks and marks != self._marks and not self.step.paused and self.are_in_step:
            effective, changed = self._entries.effective().split(self._entries.counts), set()
            for tensor, before, now, own in zip(self._tensors, self._marks[1:], marks[1:], effective, strict=True):
                if before != now and tensor.shape_now == tensor.shape:
                    is_moved = not torch.equal(read := tensor.take(tensor.indices), own.to(read))
                    changed |= {tensor} if is_moved or self.has_other_base(tensor) else set()
            self._marks = marks
            self.adopt(changed) if changed else None

    def make_base(self) -> list[Tensor]:
        """Makes them the pretrained ones, without harm to earlier graphs; returns the trained ones, by tensor."""
        self.refresh(self.are_as_left)
        reshard(self._entries.root)
        tensors = self._tensors
        trained = [t.take(t.indices) if t.is_quantized else read_own_entries(t.parameter, t.indices) for t in tensors]
        self.step.paused = True
        self.write_base()
        return trained

    def make_trained(self, trained: list[Tensor]) -> None:
        self.step.paused = False
        if self._entries.catch_up():
            return  # something has replaced the entries; they are read, and the weights written, at the next use
        reshard(self._entries.root)
        for tensor, values in zip(self._tensors, trained, strict=True):
            tensor.write_without_version_bump(values)


def check_trained(step: TrainingStep, call: str) -> None:
    """Raises where the weights are the pretrained ones for now, and ``call`` needs the trained ones."""
    if step.paused:
        raise SparsifyError(f"{call} inside base_weights(): the weights are the pretrained ones; leave it first.")


def _can_scatter(tensors: Sequence[MaskedTensor]) -> bool:
    """Whether weights can be written to together, by their addresses."""
    parameters = [tensor.parameter for tensor in tensors]
    on_gpu = all(runs_ahead(device) and has_triton(device) for device in {each.device for each in parameters})
    return on_gpu and are_plain(tensors) and all(map(Tensor.is_contiguous, parameters))
