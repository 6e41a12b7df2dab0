"""Changing a model's tensors so that it can be undone: every change is planned and checked before the first write.

In: a model and what a delta wants to put into it. Out: edits, each with what was there before.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sparsify.common.names import named_tensors, near_names
from sparsify.common.quantized import TRANSPOSED
from sparsify.common.raw_bits import as_bits, digest, put
from sparsify.delta.entries import DTYPES, TensorDelta
from sparsify.delta.quantized_delta import OverlaidWeight, overlaid
from sparsify.errors import BaseMismatchError, SparsifyError


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of one tensor that can be undone: at ``indices`` (count,), or everywhere where that is None.

    ``old`` and ``new`` are what was there and what comes there, on the CPU, in the tensor's dtype at planning: of
    shape (count,), or ``shape``.
    """

    name: str
    shape: tuple[int, ...]
    indices: Tensor | None
    old: Tensor
    new: Tensor

    def write(self, target: Tensor) -> None:
        """Writes into the tensor's own storage, so that ties and autograd's version counter see it."""
        # Not no_grad: a model that was loaded in inference mode can be written to in inference mode only.
        with torch.inference_mode():
            new = self.new.to(target.device, target.dtype)
            if self.indices is None:
                target.copy_(new)
            elif isinstance(target, OverlaidWeight):
                target.put(self.indices.to(target.device), new)
            else:
                put(target, self.indices.to(target.device), new)

    def is_written(self, target: Tensor) -> bool:
        """Whether the tensor holds ``new``, in its present dtype."""
        if tuple(target.shape) != self.shape:
            return False
        held = own_copy(target) if self.indices is None else _take(target, self.indices)
        return torch.equal(as_bits(held), as_bits(self.new.to(target.dtype)))

    def inverse(self) -> Edit:
        """The edit that undoes this one."""
        return replace(self, old=self.new, new=self.old)


def find_targets(names: Iterable[str], model: nn.Module, whole: Iterable[str]) -> dict[str, Tensor]:
    """The model's tensors by the delta's names, each there, with data, and under one of these names only.

    Args:
        names: plain names.
        model: the model.
        whole: those of the names whose tensors a delta may bring along with its own modules.
    """
    available = named_tensors(model)
    names, whole = list(names), set(whole)
    if missing := [name for name in names if name not in available]:
        raise BaseMismatchError(_missing_text(missing, available, missing[0] in whole))
    targets = {name: available[name] for name in names}
    first_names: dict[tuple[torch.device, int], str] = {}
    for name, tensor in targets.items():
        check_has_values(name, tensor)
        # Two parameters over one storage count as one tensor, too; a tensor without storage is only itself.
        first = first_names.setdefault((tensor.device, tensor.data_ptr() or id(tensor)), name)
        if first != name:
            raise BaseMismatchError(
                f"`{first}` and `{name}` are one tensor in this model and two in the delta, so one would overwrite "
                "the other: load the base with these weights untied, as it was in training."
            )
    entries = {name: tensor for name, tensor in targets.items() if name not in whole}
    return targets | overlaid(entries, model)


def _missing_text(missing: list[str], available: Iterable[str], is_whole: bool) -> str:
    """Says that the first of the missing names is not in the model, what is near, and what to do."""
    hint = near_names(missing[0], available)
    remedy = (
        "The delta stores it whole: build the model with that head or module first, as it was in training."
        if is_whole
        else "Load the base that the delta was trained on."
    )
    return f"the model has no tensor `{missing[0]}`{hint}; {counted(len(missing), 'name')} missing in all. {remedy}"


def plan_entries(name: str, delta: TensorDelta, target: Tensor) -> Edit:
    """The edit of a tensor at a delta's entries; raises where the tensor is not the delta's base."""
    check_has_values(name, target)
    check_shape(name, delta.shape, target.shape, "Load the base that the delta was trained on.")
    check_dtype(name, delta, target.dtype)
    if delta.drawn is not None:
        return plan_whole(name, drawn_values(name, delta), target)
    old = _take(target, delta.indices)
    new = new_values(name, delta, old, is_quantized=isinstance(target, OverlaidWeight))
    return Edit(name, delta.shape, delta.indices, old, new)


def drawn_values(name: str, delta: TensorDelta) -> Tensor:
    """A drawn tensor as it was trained: its initial values, drawn again, with the trained ones at the indices."""
    assert delta.drawn is not None
    values = delta.drawn.values(name, delta.shape, delta.dtype)
    if digest(values) != delta.base_sha256:
        raise BaseMismatchError(
            f"tensor `{name}` is drawn from a seed, and what is drawn here is not what training started from: the "
            "delta is damaged, or this version of sparsify or numpy draws other numbers, which it should not; please "
            "report it. A delta that was saved with fresh='store' holds the values themselves."
        )
    if not values.isfinite().all():
        raise BaseMismatchError(
            f"tensor `{name}` is drawn with a scale of {delta.drawn.scale}, beyond its {delta.dtype}."
        )
    return put(values, delta.indices, delta.values)


def check_not_drawn(tensors: Mapping[str, TensorDelta], what: str) -> None:
    """Raises where a delta draws a tensor that its base does not have; ``what`` needs a change of the base."""
    if drawn := [name for name, tensor in tensors.items() if tensor.drawn is not None]:
        raise SparsifyError(
            f"{what} is about changes of a base, and tensor `{drawn[0]}` ({len(drawn)} in all) is one that the base "
            "does not have, drawn from a seed: apply the delta to a model that has such a module instead."
        )


def check_has_values(name: str, tensor: Tensor) -> None:
    """Raises where a tensor is a mere shape."""
    if tensor.is_meta:
        raise SparsifyError(f"tensor `{name}` is on the meta device and has no values: load the model's weights first.")


def check_dtype(name: str, delta: TensorDelta, dtype: torch.dtype, place: str = "the model") -> None:
    """Raises where a base's tensor has a dtype that a delta's values do not go into."""
    if dtype not in DTYPES.values():
        raise BaseMismatchError(
            f"tensor `{name}` is {dtype} in {place}, which cannot take trained values of {delta.dtype}: "
            "load the base unquantized."
        )


def new_values(
    name: str, delta: TensorDelta, old: Tensor, place: str = "the model", *, is_quantized: bool = False
) -> Tensor:
    """What a delta makes of a base's values (count,) at its indices, in their dtype.

    Args:
        name: the tensor's name, for messages.
        delta: the tensor's part of the delta.
        old: the base's values at the delta's indices.
        place: where the base is, for messages.
        is_quantized: whether the base's values are dequantized ones.

    Raises:
        BaseMismatchError: when the values are not those that the delta was trained on, or what it makes of them is not
            finite.
    """
    if (delta.quantization or "").endswith(TRANSPOSED) and not (is_proven(delta, old) or is_quantized):
        raise BaseMismatchError(
            f"tensor `{name}` was transposed when it was quantized (transformers' Conv1D), and {place} holds other "
            f"values than it had then, so there is no telling which way round: load the base quantized as in training, "
            f"or dequantize that, in {delta.dtype}."
        )
    if old.dtype == delta.dtype and digest(old) != delta.base_sha256:
        if delta.quantization is not None and delta.kind == "add" and not is_quantized:
            _warn_of_another_base(delta.quantization, place)
            return _finite(name, delta, _added(old, delta.values), place)
        raise BaseMismatchError(
            f"tensor `{name}` does not hold the values that the delta was trained on, so the two together would be a "
            "model that nobody trained: load the exact base, and revert any other delta first. (A head that is drawn "
            "at random has no exact base: train it with modules_to_save=[...].)"
        )
    if delta.kind == "replace" and old.dtype == delta.dtype:
        return delta.values  # finite, as all of a delta's values are
    return _finite(name, delta, _added(old, delta.values) if delta.kind == "add" else delta.values.to(old.dtype), place)


def is_proven(delta: TensorDelta, old: Tensor) -> bool:
    """Whether a base's values (count,), which :func:`new_values` took, are known to be those trained on."""
    return old.dtype == delta.dtype and (delta.quantization is None or digest(old) == delta.base_sha256)


def _warn_of_another_base(quantization: str, place: str) -> None:
    # the same words for every tensor, so that Python shows them once
    warnings.warn(
        f"the delta was trained on weights quantized as {quantization}, and {place} holds other values: if all is well "
        "the weights from before they were quantized, but that cannot be checked. The changes are added to them. For "
        "an exact result load the base quantized as in training, or dequantize that.",
        stacklevel=2,
    )


def _finite(name: str, delta: TensorDelta, new: Tensor, place: str) -> Tensor:
    """The values, all finite; raises where they are not."""
    if bad := int((~new.isfinite()).sum()):
        raise BaseMismatchError(
            f"tensor `{name}`: {bad} of {delta.count} trained values are not finite in {place}'s {new.dtype}: "
            f"load the base in {delta.dtype}."
        )
    return new


def plan_whole(name: str, tensor: Tensor, target: Tensor) -> Edit:
    """The edit that replaces a tensor as a whole; raises where the model's has another shape or sort of dtype."""
    check_whole(name, tensor, target.shape, target.dtype)
    return Edit(name, tuple(tensor.shape), None, own_copy(target), tensor.detach().cpu().to(target.dtype))


def check_whole(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, place: str = "the model") -> None:
    """Raises where a tensor stored whole cannot take the place of a base's one of some shape and dtype."""
    remedy = "The delta stores it whole: build the model with that head or module as it was in training."
    check_shape(name, tuple(tensor.shape), shape, remedy, place)
    if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.is_floating_point()):
        raise BaseMismatchError(f"tensor `{name}` is {dtype} in {place}, {tensor.dtype} in the delta. {remedy}")


def check_shape(
    name: str, shape: tuple[int, ...], base_shape: Sequence[int], remedy: str, place: str = "the model"
) -> None:
    """Raises where a base's tensor has another shape than in the delta."""
    if tuple(base_shape) != shape:
        raise BaseMismatchError(
            f"tensor `{name}` has shape {tuple(base_shape)} in {place}, {shape} in the delta. {remedy}"
        )


def _added(base: Tensor, difference: Tensor) -> Tensor:
    """base (count,) + difference (count,), computed in at least float32, in the base's dtype."""
    wide = torch.promote_types(base.dtype, torch.float32)
    return (base.to(wide) + difference.to(wide)).to(base.dtype)


def warn_of_casts(
    casts: Mapping[str, tuple[torch.dtype, torch.dtype]], place: str = "the model", stacklevel: int = 4
) -> None:
    """One warning for all tensors, if there are any, that a base has in another dtype than the delta.

    Args:
        casts: by name, the dtype in the delta and the one in the base.
        place: where the base is, for the message.
        stacklevel: as in ``warnings.warn``; by default the caller of the caller's caller: of a delta's method.
    """
    if not casts:
        return
    name, (trained, held) = next(iter(casts.items()))
    warnings.warn(
        f"{place} holds {held} where the delta was trained on {trained} (`{name}`; {counted(len(casts), 'tensor')} in "
        "all): whether it is the right base cannot be checked, and the trained values are cast. Load the base in the "
        "delta's dtype for an exact result.",
        stacklevel=stacklevel,
    )


def write_all(edits: Sequence[Edit], model: nn.Module) -> None:
    """Writes all edits or, where one fails, none."""
    _write(edits, _targets_of(edits, model))


def undo_all(edits: Sequence[Edit], model: nn.Module) -> None:
    """Puts back what the edits replaced, if the model still holds what they wrote."""
    targets = _targets_of(edits, model)
    for edit in edits:
        if not edit.is_written(targets[edit.name]):
            raise SparsifyError(
                f"tensor `{edit.name}` no longer holds the delta's values, so reverting would undo what came after "
                "(another delta, training, or two casts); nothing was changed: revert deltas in the reverse order of "
                "their application, or load the base afresh."
            )
    _write([edit.inverse() for edit in edits], targets)


def redo_all(edits: Sequence[Edit], model: nn.Module) -> None:
    """Writes edits again that were undone, if the model still holds what they replaced."""
    targets = _targets_of(edits, model)
    for edit in edits:
        if not edit.inverse().is_written(targets[edit.name]):
            raise SparsifyError(
                f"tensor `{edit.name}` no longer holds the base's values, which something else has changed since the "
                "delta was checked against them (another delta, training, or two casts): undo that, or load the base "
                "afresh."
            )
    _write(edits, targets)


def _write(edits: Sequence[Edit], targets: Mapping[str, Tensor]) -> None:
    done: list[Edit] = []
    try:
        for edit in edits:
            done.append(edit)  # before the write, which may fail halfway
            edit.write(targets[edit.name])
    except BaseException:
        for edit in done:
            edit.inverse().write(targets[edit.name])
        raise


def _targets_of(edits: Sequence[Edit], model: nn.Module) -> dict[str, Tensor]:
    return find_targets([edit.name for edit in edits], model, [edit.name for edit in edits if edit.indices is None])


def _take(tensor: Tensor, indices: Tensor) -> Tensor:
    """The values (count,) of a tensor at flat row-major positions (count,), on the CPU; its layout may be any."""
    return tensor.detach().take(indices.to(tensor.device)).cpu()


def own_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
