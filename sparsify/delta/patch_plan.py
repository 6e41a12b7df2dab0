"""What goes onto a base model and off again: writes that are planned and checked before the first is carried out.

Each :class:`PlannedWrite` keeps the values that it replaces, so that an undo restores every bit.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sparsify.common.interrupts import uninterrupted
from sparsify.common.names import base_name, check_names, check_plain, counted, named_tensors, near_names, plain_name
from sparsify.common.quantized import TRANSPOSED, is_quantized
from sparsify.common.raw_bits import as_bits, digest
from sparsify.common.shards import is_shard
from sparsify.core.devices import put, runs_ahead
from sparsify.delta.entries import DTYPES, NamedTensors, TensorDelta, TensorDeltas
from sparsify.delta.quantized_delta import QuantizedDelta, guard
from sparsify.delta.served import ServedModel, ServedTensor
from sparsify.errors import BaseMismatchError, SparsifyError

REMEDY = "revert deltas in the reverse order of their application, or load the base afresh"
_LOAD_BASE = "Load the base that the delta was trained on."
_NUMBERED = " Its modules are numbered, as a SentenceTransformer's: apply it to a model that has the same ones."
_BUILD_MODULE = "The delta stores it whole: build the model with that head or module first, as it was in training."
_RESIZE = " If tokens were added, `model.resize_token_embeddings({})` first"


class PlannedWrite(NamedTuple):
    """A planned write to one tensor; ``old`` and ``new``, (count,) or ``shape``, are on the CPU."""

    name: str
    shape: tuple[int, ...]
    indices: Tensor | None  # (count,) flat; None for all of the tensor
    old: Tensor
    new: Tensor
    checked: bool = True  # else it replaces any values

    def fits(self, target: Tensor) -> bool:
        """Whether the tensor has the write's shape and, where that is checked, holds ``old``, in its present dtype."""
        if tuple(target.shape) != self.shape or not self.checked:
            return tuple(target.shape) == self.shape
        if isinstance(target, ServedTensor):
            return target.holds(self.indices, self.old)
        held = own_copy(target) if self.indices is None else take(target, self.indices)
        return torch.equal(as_bits(held), as_bits(self.old.to(target.dtype)))

    def write(self, target: Tensor) -> None:
        """Writes ``new`` into the tensor's own storage, so that ties and autograd's version counter see it."""
        # not no_grad: a model loaded in inference mode can be written to in inference mode only
        with torch.inference_mode():
            ahead = runs_ahead(target.device)
            new = self.new.to(target.dtype).to(target.device, non_blocking=ahead)
            indices = None if self.indices is None else self.indices.to(target.device, non_blocking=ahead)
            if isinstance(target, (ServedTensor, QuantizedDelta)):
                target.put(indices, new)
            elif indices is None:
                target.copy_(new)
            else:
                put(target, indices, new)

    def inverse(self) -> "PlannedWrite":
        return self._replace(old=self.new, new=self.old)


PatchPlan: TypeAlias = list[PlannedWrite]


def find_targets(names: Iterable[str], model: nn.Module, dense: Iterable[str] = ()) -> dict[str, Tensor]:
    """A model's tensors by plain name, ``dense`` ones stored whole; raises unless each is there once, and with data."""
    if isinstance(model, ServedModel):
        return model.find_targets(names)
    check_plain(model)
    available = named_tensors(model)
    plain_names, dense = {name: plain_name(name) for name in names}, set(dense)
    if not available.keys() >= set(plain_names.values()):
        wrapper: Any = next((module for module in model.modules() if hasattr(module, "get_base_model")), None)  # PEFT's
        inner = available if wrapper is None else named_tensors(wrapper.get_base_model())
        available = {base_name(name): inner[name] for name in inner if ".modules_to_save." not in name} | available
    if missing := [name for name, plain in plain_names.items() if plain not in available]:
        owner, _, attribute = missing[0].rpartition(".")
        if f"{owner}.original_module.{attribute}" in available:
            copy = f"`{owner}` is in PEFT's modules_to_save, whose copy of it would go on without the delta"
            raise SparsifyError(f"{copy}: apply the delta to the base first, and wrap it by PEFT then.")
        problem = f"the model has no tensor `{missing[0]}`{near_names(missing[0], available)}"
        remedy = _BUILD_MODULE if missing[0] in dense else _LOAD_BASE
        remedy += _NUMBERED if missing[0][0].isdecimal() else ""
        raise BaseMismatchError(f"{problem}; {counted(len(missing), 'name')} missing in all. {remedy}")
    targets = {name: available[plain] for name, plain in plain_names.items()}
    tied = {id(tensor): name for name, tensor in reversed(available.items())}  # the first names, of which a delta is
    first_names: dict[tuple[torch.device, int], str] = {}
    for name, tensor in targets.items():
        check_has_values(name, tensor)
        # two parameters over one storage are one tensor, too; one without storage is only itself
        check_untied(name, first_names.setdefault((tensor.device, tensor.data_ptr() or id(tensor)), name))
        check_untied(name, tied[id(tensor)])
    quantized = {name: tensor for name, tensor in targets.items() if name not in dense and is_quantized(tensor)}
    owners = {id(module._parameters.get("weight")): module for module in model.modules()} if quantized else {}
    deltas: dict[str, Any] = {n: QuantizedDelta(n, owners[id(t)]) for n, t in quantized.items() if id(t) in owners}
    return targets | deltas


def check_untied(name: str, first: str, place: str = "this model") -> None:
    """Raises where one tensor of a delta is another one in a base, by whose name it would be called had it been."""
    if base_name(name) != base_name(first):
        problem = f"`{first}` and `{name}` are one tensor in {place}, and were two in training"
        raise BaseMismatchError(f"{problem}: load the base with these weights untied, as it was then.")


def plan_delta(
    tensors: TensorDeltas, whole: NamedTensors, model: nn.Module, *, warn: bool = True
) -> tuple[PatchPlan, NamedTensors]:
    """Plans the writes of a delta, and finds the tensors to write to; raises where the model is not its base."""
    check_names(tensors, whole)
    targets = find_targets([*tensors, *whole], model, whole)
    plan = [plan_entries(name, part, targets[name]) for name, part in tensors.items()]
    plan += [plan_dense(name, tensor, targets[name]) for name, tensor in whole.items()]
    if warn:
        parts: dict[str, TensorDelta | Tensor] = {**tensors, **whole}
        warn_of_casts([(write.name, parts[write.name].dtype, write.old.dtype) for write in plan], stacklevel=5)
    return plan, targets


def plan_entries(name: str, delta: TensorDelta, target: Tensor) -> PlannedWrite:
    """Plans the write of a tensor's entries; raises where the tensor is not the delta's base."""
    check_fits(name, delta, target.shape, target.dtype)
    old = take(target, delta.indices)
    new = new_values(name, delta, old, is_quantized=isinstance(target, QuantizedDelta))
    return PlannedWrite(name, delta.shape, delta.indices, old, new)


def plan_dense(name: str, tensor: Tensor, target: Tensor, old: Tensor | None = None) -> PlannedWrite:
    """Plans the replacement of all values, which are ``old``, or are read; raises where they cannot be replaced."""
    check_fits(name, tensor, target.shape, target.dtype)
    new = tensor.detach().cpu().to(target.dtype)
    return PlannedWrite(name, tuple(tensor.shape), None, own_copy(target) if old is None else old, new)


def new_values(
    name: str, delta: TensorDelta, old: Tensor, place: str = "the model", *, is_quantized: bool = False
) -> Tensor:
    """The trained values (count,) in the base's dtype, from the base's values (count,); raises for another base."""
    is_base = is_verified(delta, old)
    if (delta.quantization or "").endswith(TRANSPOSED) and not (is_base or is_quantized):
        text = f"tensor `{name}` was transposed when it was quantized (transformers' Conv1D), and {place} holds other"
        raise BaseMismatchError(f"{text} values: load the base quantized as then, or dequantize it, in {delta.dtype}.")
    # warnings have the same words for every tensor, so that Python shows them once
    if is_quantized and delta.quantization is None:
        text = f"the delta was trained on weights that were not quantized, and {place} holds quantized ones, which "
        text += "cannot be checked: the trained values are written. For an exact result load the base unquantized."
        warnings.warn(text, stacklevel=2)
    elif old.dtype == delta.dtype and not is_base:
        if delta.quantization is None or delta.kind != "add" or is_quantized:
            text = f"tensor `{name}` does not hold the values that the delta was trained on: load the exact base, and "
            text += "revert any other delta first. (A head drawn at random has no base: name it in modules_to_save. "
            text += "A second stage of training has the first's result as its base: both are `first.then(second)`, or "
            raise BaseMismatchError(f"{text}SparseDelta.diff(base, model).)")
        text = f"the delta was trained on weights quantized as {delta.quantization}, and {place} holds other values, "
        text += "if all is well the weights from before they were quantized, which cannot be checked: the changes are "
        text += "added. For an exact result load the base quantized as in training, or dequantize that."
        warnings.warn(text, stacklevel=2)
    return trained_values(name, delta.kind, delta.values, old, place)


def trained_values(name: str, kind: str, values: Tensor, old: Tensor, place: str = "the model") -> Tensor:
    """The trained values (count,) in the base's dtype, which has to hold them; the base's values are not checked."""
    if kind == "replace" and values.dtype == old.dtype:
        return values
    new = values.to(old.dtype)
    if kind == "add":
        wide = torch.promote_types(old.dtype, torch.float32)
        new = (old.to(wide) + values.to(wide)).to(old.dtype)
    if bad := int((~new.isfinite()).sum()):
        problem = f"{bad} of {new.numel()} trained values are not finite in {place}'s {new.dtype}"
        raise BaseMismatchError(f"tensor `{name}`: {problem}: load the base in the dtype that it was trained in.")
    return new


def is_verified(delta: TensorDelta, old: Tensor) -> bool:
    """Whether the base's values (count,), which :func:`new_values` accepted, are known to be those trained on."""
    return old.dtype == delta.dtype and digest(old) == delta.base_sha256


def check_has_values(name: str, tensor: Tensor) -> None:
    if is_shard(tensor):
        remedy = "apply the delta before that, or load what `delta.merge(base, out)` writes"
        raise SparsifyError(f"tensor `{name}` is sharded over ranks (tensor parallelism, fully_shard()): {remedy}.")
    if tensor.is_meta:
        problem = "on the meta device and has no values: it was offloaded (device_map, cpu_offload()) or never loaded"
        remedy = "Load the whole model into memory, or offload what `delta.merge(base, out)` writes."
        raise SparsifyError(f"tensor `{name}` is {problem}. {remedy}")


def check_fits(
    name: str, part: TensorDelta | Tensor, shape: Sequence[int], dtype: torch.dtype, place: str = "the model"
) -> None:
    """Raises where a base's tensor has another shape than a delta's, or cannot hold its values."""
    is_dense = isinstance(part, Tensor)
    remedy = _BUILD_MODULE if is_dense else _LOAD_BASE
    if tuple(shape) != tuple(part.shape):
        if tuple(shape[1:]) == tuple(part.shape[1:]):
            remedy += _RESIZE.format(part.shape[0]) + (" (`load_model` and `merge` do so)." if is_dense else ".")
        shapes = f"has shape {tuple(shape)} in {place}, {tuple(part.shape)} in the delta"
        raise BaseMismatchError(f"tensor `{name}` {shapes}. {remedy}")
    if not is_dense and dtype not in DTYPES.values():
        dtypes = f"is {dtype} in {place}, which cannot take trained values of {part.dtype}"
        raise BaseMismatchError(f"tensor `{name}` {dtypes}: load the base unquantized.")
    if is_dense and dtype != part.dtype and not (dtype.is_floating_point and part.dtype.is_floating_point):
        raise BaseMismatchError(f"tensor `{name}` is {dtype} in {place}, {part.dtype} in the delta. {remedy}")


def warn_of_casts(
    dtypes: Iterable[tuple[str, torch.dtype, torch.dtype]], place: str = "the model", stacklevel: int = 4
) -> None:
    """Warns once about tensors whose dtype in the delta, the first, is not that in the base; by default for a verb."""
    if casts := {name: (trained, held) for name, trained, held in dtypes if trained != held}:
        name, (trained, held) = next(iter(casts.items()))
        text = f"(`{name}`; {counted(len(casts), 'tensor')} in all): whether it is the right base cannot be checked, "
        text += "and the trained values are cast. Load the base in the delta's dtype for an exact result."
        warnings.warn(f"{place} holds {held} where the delta was trained on {trained} {text}", stacklevel=stacklevel)


def holds(model: nn.Module, plan: PatchPlan) -> bool:
    """Whether a model has the values that a plan replaces, so that it can be carried out."""
    targets = _targets(plan, model)
    return all(patch.fits(targets[patch.name]) for patch in plan)


def _targets(plan: PatchPlan, model: nn.Module) -> dict[str, Tensor]:
    return find_targets([patch.name for patch in plan], model, [p.name for p in plan if p.indices is None])


def write_plan(
    plan: PatchPlan, model: nn.Module, held: str = "the base's values", remedy: str = REMEDY,
    targets: NamedTensors | None = None,
) -> None:  # fmt: skip
    """Carries out all writes of a plan or, where one fails or does not fit, none; ``held`` says what it replaces."""
    targets = _targets(plan, model) if targets is None else targets
    done: PatchPlan = []
    try:
        for patch in plan:  # each is checked right before it is written, while its entries are in the cache
            if not patch.fits(targets[patch.name]):
                problem = f"no longer holds {held} (another delta, training, or two casts)"
                raise SparsifyError(f"tensor `{patch.name}` {problem}. Nothing was changed: {remedy}.")
            done.append(patch)  # before the write, which may fail halfway
            patch.write(targets[patch.name])
    except BaseException:
        for patch in done:
            patch.inverse().write(targets[patch.name])
        raise
    finally:
        if any(isinstance(target, QuantizedDelta) for target in targets.values()):
            guard(model)


@contextmanager
def undone(plan: PatchPlan, model: nn.Module, remedy: str = REMEDY) -> Iterator[None]:
    """Puts back what a plan replaced, and carries it out again where the ``with`` block fails."""
    write_plan([patch.inverse() for patch in plan], model, "the delta's values", remedy)
    try:
        yield
    except BaseException:
        write_plan(plan, model)
        raise


@torch.no_grad()
def take(tensor: Tensor, indices: Tensor) -> Tensor:
    """The values (count,) of a tensor at flat row-major positions (count,), on the CPU; its layout may be any."""
    indices = indices.to(tensor.device, non_blocking=runs_ahead(tensor.device))
    if isinstance(tensor, Tensor) and tensor.is_contiguous():
        return tensor.view(-1).index_select(0, indices).cpu()  # faster than take
    return tensor.take(indices).cpu()


def own_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


class Applicable(ABC):
    """A delta, or a sum of deltas: writes its values into models in place, and keeps and puts back what was there."""

    @cached_property
    def _applied(self) -> WeakKeyDictionary[nn.Module, PatchPlan]:
        return WeakKeyDictionary()  # it keeps no model alive

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_applied"}  # a copy is applied to nothing

    @abstractmethod
    def plan(self, model: nn.Module) -> tuple[PatchPlan, NamedTensors]:
        """Plans and checks the writes of :meth:`apply`, to these tensors; nothing is written."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Writes the delta's values into a base model, in place, after all checks; returns the model.

        A base in another dtype than in training, or not quantized as then, cannot be checked: one warning says so, and
        the values are cast or added. A quantized weight is not written to: what its trained entries add to the layer's
        output is added there, and no state dict holds them.

        Args:
            model: the base that the delta was trained on, wrapped or not, on any device.

        Raises:
            BaseMismatchError: when the model lacks a tensor, or has another shape or other values at the entries.
            SparsifyError: when the model is being trained sparsely, lies on the meta device, or has this delta already.
        """
        check_plain(model)
        # else the base's weights were loaded again since
        if model in self._applied and not holds(model, self._applied[model]):
            raise SparsifyError("this delta is already applied to this model: call `revert(model)` first.")
        plan, targets = self.plan(model)
        with uninterrupted():
            write_plan(plan, model, targets=targets)
            self._applied[model] = plan
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Puts back, bit for bit, what :meth:`apply` replaced; returns the model, which may have moved or been cast.

        Raises:
            SparsifyError: when the delta is not applied to the model, or the entries do not hold its values any more.
        """
        if model not in self._applied:
            raise SparsifyError("this delta is not applied to this model: pass the object that `apply` got, no copy.")
        with uninterrupted(), undone(self._applied[model], model):
            del self._applied[model]
        return model

    def swap(self, model: nn.Module, other: "Applicable") -> nn.Module:
        """Reverts this delta, applies another one of the same base, and returns the model.

        Raises:
            SparsifyError: as :meth:`revert` and :meth:`apply`; the model then holds this delta, as before.
        """
        with uninterrupted():
            self.revert(model)
            try:
                return other.apply(model)
            except BaseException:
                self.apply(model)
                raise

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[nn.Module]:
        """Applies the delta for the length of a ``with`` block, however that ends."""
        self.apply(model)
        try:
            yield model
        finally:
            self.revert(model)
