"""What was learned, apart from any model: take it from a trained model, save, load, apply, revert.

    model in training --from_model--> SparseDelta <--save, load--> file
    plain base model  <--apply, revert--> SparseDelta

A delta knows nothing of training: ``from_model`` asks the model's own engine. It is O(budget) throughout; what it
replaces in a model is kept and put back by ``revert``, never computed back.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sparsify import format as delta_format
from sparsify.errors import BaseMismatchError, SparsifyError
from sparsify.format import CONFIG_NAME, DTYPES, FILE_NAME, TensorDelta, digest
from sparsify.names import named_tensors

__all__ = ["SparseDelta", "TensorDelta"]

_ENGINE = "_sparsify_engine"  # where a model in training keeps its engine
_WRAPPERS = ("module", "_orig_mod")  # the attribute that holds the model in DDP and in torch.compile
_RECORDED_VERSIONS = ("sparsify", "torch", "safetensors", "transformers", "peft")


class SparseDelta:
    """The entries that training changed, and what they changed to.

    Args:
        tensors: changed entries by the tensor's plain name.
        whole: tensors to replace as a whole, by plain name.
        config: how the delta came about; goes into the file, nothing depends on it.

    Example:
        >>> base = nn.Linear(3, 1)
        >>> before = base.weight.detach().clone()
        >>> entry = TensorDelta(
        ...     indices=torch.tensor([1]),
        ...     values=torch.tensor([5.0]),
        ...     shape=(1, 3),
        ...     dtype=torch.float32,
        ...     kind="replace",
        ...     base_sha256=digest(before[0, 1]),
        ... )
        >>> delta = SparseDelta({"weight": entry})
        >>> delta
        SparseDelta(1 entry in 1 tensor, 0 tensors stored whole)
        >>> with delta.applied(base):
        ...     base.weight[0, 1].item()
        5.0
        >>> torch.equal(base.weight, before)
        True
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorDelta],
        whole: Mapping[str, Tensor] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.tensors: dict[str, TensorDelta] = dict(tensors)
        self.whole: dict[str, Tensor] = dict(whole or {})
        self.config: dict[str, Any] = dict(config or {})
        self._applied: WeakKeyDictionary[nn.Module, list[_Edit]] = WeakKeyDictionary()

    @classmethod
    def from_model(cls, model: nn.Module, budget: int | None = None) -> SparseDelta:
        """What a sparsified model has learned so far.

        Args:
            model: a model that ``sparsify`` prepared, also within DDP or ``torch.compile``; it is only read.
            budget: keep only the first ``budget`` entries in order of unmasking; all by default.

        Returns:
            A delta with memory of its own: training on does not change it.

        Raises:
            SparsifyError: when the model is not sparsified, or holds values that cannot be a delta.
        """
        export = _find_engine(model).export(budget)
        tensors: dict[str, TensorDelta] = {}
        for item in export.tensors:
            if item.name in tensors:
                raise SparsifyError(f"two trained tensors are called `{item.name}`: rename one of the modules.")
            if item.indices.numel():
                tensors[item.name] = _tensor_delta(item)
        whole = {name: _own_copy(tensor) for name, tensor in export.whole.items()}
        return cls(tensors, whole, {**copy.deepcopy(dict(export.config)), "versions": _library_versions()})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SparseDelta:
        """Reads a delta that :meth:`save` wrote.

        Args:
            path: the folder, or the file itself.

        Raises:
            SparsifyError: when there is nothing at the path.
            DeltaFormatError: when the file is broken, or no delta.
        """
        file = Path(path)
        if file.is_dir():
            file = file / FILE_NAME
        if not file.exists():
            raise SparsifyError(
                f"`{file}` does not exist, so there is no delta to load: give the folder that `save` wrote, with its "
                f"`{FILE_NAME}`, or the path of such a file."
            )
        return cls(*delta_format.read(file))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the delta, whole or not at all; what was there before is replaced.

        Args:
            path: a folder, made if need be, that gets ``sparse_delta.safetensors``, and ``sparse_delta_config.json``
                for people to read. A path that ends in ``.safetensors`` is the file itself, and all that is written.

        Raises:
            SparsifyError: when ``config`` does not go into JSON, or a name is both in ``tensors`` and in ``whole``.
        """
        path = Path(path)
        if path.suffix == ".safetensors" and not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            delta_format.write(path, self.tensors, self.whole, self.config)
            return
        path.mkdir(parents=True, exist_ok=True)
        delta_format.write(path / FILE_NAME, self.tensors, self.whole, self.config, sidecar=path / CONFIG_NAME)

    def apply(self, model: nn.Module) -> nn.Module:
        """Puts the delta's values into a base model, in place; all checks come before the first write.

        A base in another dtype than the delta was trained on cannot be checked: one warning says so, and the values
        are cast.

        Args:
            model: the base that the delta was trained on, wrapped or not, on any device.

        Returns:
            The same model.

        Raises:
            BaseMismatchError: when the model lacks a tensor, or has another shape or other values at the entries.
            SparsifyError: when the model is being trained sparsely, lies on the meta device, or has this delta already.
        """
        _check_plain(model)
        if model in self._applied:
            raise SparsifyError(
                "this delta is already applied to this model, and applying it again would lose the original values: "
                "call `revert(model)` first."
            )
        delta_format.check_names(self.tensors, self.whole)
        targets = _find_targets([*self.tensors, *self.whole], model, self.whole)
        edits = [_plan_entries(name, delta, targets[name]) for name, delta in self.tensors.items()]
        edits += [_plan_whole(name, tensor, targets[name]) for name, tensor in self.whole.items()]
        self._warn_of_casts(targets)
        _write_all(edits, targets)
        self._applied[model] = edits
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Puts back, bit for bit, what :meth:`apply` replaced; the model may have moved or been cast since.

        Args:
            model: a model that this delta is applied to.

        Returns:
            The same model.

        Raises:
            SparsifyError: when the delta is not applied to the model, or the entries do not hold its values any more.
        """
        if model not in self._applied:
            raise SparsifyError(
                "this delta is not applied to this model, so there is nothing to revert: pass the object that `apply` "
                "got, not a copy or a wrapper of it."
            )
        _check_plain(model)
        edits = self._applied[model]
        targets = _find_targets([edit.name for edit in edits], model, self.whole)
        for edit in edits:
            edit.check_written(targets[edit.name])
        _write_all([edit.inverse() for edit in edits], targets)
        del self._applied[model]
        return model

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[nn.Module]:
        """Applies the delta for the length of a ``with`` block, and reverts it however the block ends."""
        self.apply(model)
        try:
            yield model
        finally:
            self.revert(model)

    @property
    def num_entries(self) -> int:
        """Number of changed entries, those of tensors stored whole not counted."""
        return sum(tensor.count for tensor in self.tensors.values())

    def __repr__(self) -> str:
        entries = f"{_count(self.num_entries, 'entry', 'entries')} in {_count(len(self.tensors), 'tensor')}"
        return f"SparseDelta({entries}, {_count(len(self.whole), 'tensor')} stored whole)"

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave behind which models the delta is applied to."""
        return {"tensors": self.tensors, "whole": self.whole, "config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _warn_of_casts(self, targets: Mapping[str, Tensor]) -> None:
        """One warning for all tensors that have another dtype than their part of the delta."""
        dtypes = {name: part.dtype for part_of in (self.tensors, self.whole) for name, part in part_of.items()}
        cast = [name for name, dtype in dtypes.items() if targets[name].dtype != dtype]
        if cast:
            warnings.warn(
                f"the model holds {targets[cast[0]].dtype} where the delta was trained on {dtypes[cast[0]]} "
                f"(`{cast[0]}`; {_count(len(cast), 'tensor')} in all): whether it is the right base cannot be checked, "
                "and the trained values are cast. Load the base in the delta's dtype for an exact result.",
                stacklevel=3,
            )


@dataclass(frozen=True, eq=False)
class _Edit:
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
            else:
                target.put_(self.indices.to(target.device), new)

    def check_written(self, target: Tensor) -> None:
        """Raises unless the tensor still holds ``new``, in its present dtype."""
        held = tuple(target.shape) == self.shape and _same_bits(
            _own_copy(target) if self.indices is None else _take(target, self.indices), self.new.to(target.dtype)
        )
        if not held:
            raise SparsifyError(
                f"tensor `{self.name}` no longer holds the delta's values, so reverting would undo what came after "
                "(another delta, training, or two casts); nothing was changed: revert deltas in the reverse order of "
                "their application, or load the base afresh."
            )

    def inverse(self) -> _Edit:
        """The edit that undoes this one."""
        return replace(self, old=self.new, new=self.old)


def _find_engine(model: nn.Module) -> Any:
    """The training engine of a model or of what it wraps; a model that has none is an error."""
    inner: nn.Module | None = model
    while inner is not None:
        if _ENGINE in vars(inner):
            return vars(inner)[_ENGINE]
        inner = next((inner._modules[name] for name in _WRAPPERS if name in inner._modules), None)
    raise SparsifyError(
        f"this {type(model).__name__} is not sparsified, so there is nothing to take a delta from: pass the model "
        "that `sparsify(model, ...)` returned, before `desparsify`."
    )


def _tensor_delta(item: Any) -> TensorDelta:
    """One tensor's entries as the engine exports them."""
    try:
        return TensorDelta(
            indices=_own_copy(item.indices),
            values=_own_copy(item.values),
            shape=tuple(item.shape),
            dtype=item.base_values.dtype,
            kind="replace",
            base_sha256=digest(item.base_values),
        )
    except SparsifyError as error:
        raise SparsifyError(f"tensor `{item.name}` cannot go into a delta: {error}") from error


def _library_versions() -> dict[str, str]:
    """Versions of the libraries in use; none is imported for it."""
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in _RECORDED_VERSIONS}
    return {name: str(version) for name, version in versions.items() if version is not None}


def _check_plain(model: nn.Module) -> None:
    """Raises where a model, or a part of it, is in sparse training."""
    if any(_ENGINE in vars(module) for module in model.modules()):
        raise SparsifyError(
            "this model is sparsified: its weights belong to the training that goes on, which would overwrite or "
            "learn on top of what a delta writes. Call `desparsify(model)` first, or use another copy of the base."
        )


def _find_targets(names: Iterable[str], model: nn.Module, whole: Iterable[str]) -> dict[str, Tensor]:
    """The model's tensors by the delta's names, each there, with data, and under one of these names only.

    Args:
        names: plain names.
        model: the model.
        whole: those of the names whose tensors a delta may bring along with its own modules.
    """
    available = named_tensors(model)
    names = list(names)
    if missing := [name for name in names if name not in available]:
        raise BaseMismatchError(_missing_text(missing, available, missing[0] in set(whole)))
    targets = {name: available[name] for name in names}
    first_names: dict[tuple[torch.device, int], str] = {}
    for name, tensor in targets.items():
        if tensor.is_meta:
            raise SparsifyError(
                f"tensor `{name}` is on the meta device and has no values to change: load the model's weights first."
            )
        # Two parameters over one storage count as one tensor, too; a tensor without storage is only itself.
        first = first_names.setdefault((tensor.device, tensor.data_ptr() or id(tensor)), name)
        if first != name:
            raise BaseMismatchError(
                f"`{first}` and `{name}` are one tensor in this model and two in the delta, so one would overwrite "
                "the other: load the base with these weights untied, as it was in training."
            )
    return targets


def _missing_text(missing: list[str], available: Iterable[str], is_whole: bool) -> str:
    """Says that the first of the missing names is not in the model, what is near, and what to do."""
    near = get_close_matches(missing[0], list(available), n=3, cutoff=0.7)
    hint = f" (near: {', '.join(f'`{name}`' for name in near)})" if near else ""
    remedy = (
        "The delta stores it whole: build the model with that head or module first, as it was in training."
        if is_whole
        else "Load the base that the delta was trained on."
    )
    return f"the model has no tensor `{missing[0]}`{hint}; {_count(len(missing), 'name')} missing in all. {remedy}"


def _plan_entries(name: str, delta: TensorDelta, target: Tensor) -> _Edit:
    """The edit of a tensor at a delta's entries; raises where the tensor is not the delta's base."""
    _check_shape(name, delta.shape, target, "Load the base that the delta was trained on.")
    if target.dtype not in DTYPES.values():
        raise BaseMismatchError(
            f"tensor `{name}` is {target.dtype} in the model, which cannot take trained values of {delta.dtype}: "
            "load the base unquantized."
        )
    old = _take(target, delta.indices)
    if target.dtype == delta.dtype and digest(old) != delta.base_sha256:
        raise BaseMismatchError(
            f"tensor `{name}` does not hold the values that the delta was trained on, so the two together would be a "
            "model that nobody trained: load the exact base, and revert any other delta first."
        )
    new = _added(old, delta.values) if delta.kind == "add" else delta.values.to(target.dtype)
    if bad := int((~new.isfinite()).sum()):
        raise BaseMismatchError(
            f"tensor `{name}`: {bad} of {delta.count} trained values are not finite in the model's {target.dtype}: "
            f"load the base in {delta.dtype}."
        )
    return _Edit(name, delta.shape, delta.indices, old, new)


def _plan_whole(name: str, tensor: Tensor, target: Tensor) -> _Edit:
    """The edit that replaces a tensor as a whole; raises where the model's has another shape or sort of dtype."""
    remedy = "The delta stores it whole: build the model with that head or module as it was in training."
    _check_shape(name, tuple(tensor.shape), target, remedy)
    if target.dtype != tensor.dtype and not (target.is_floating_point() and tensor.is_floating_point()):
        raise BaseMismatchError(
            f"tensor `{name}` is {target.dtype} in the model, {tensor.dtype} in the delta. {remedy}"
        )
    return _Edit(name, tuple(tensor.shape), None, _own_copy(target), tensor.detach().cpu().to(target.dtype))


def _check_shape(name: str, shape: tuple[int, ...], target: Tensor, remedy: str) -> None:
    if tuple(target.shape) != shape:
        raise BaseMismatchError(
            f"tensor `{name}` has shape {tuple(target.shape)} in the model, {shape} in the delta. {remedy}"
        )


def _added(base: Tensor, difference: Tensor) -> Tensor:
    """base (count,) + difference (count,), computed in at least float32, in the base's dtype."""
    wide = torch.promote_types(base.dtype, torch.float32)
    return (base.to(wide) + difference.to(wide)).to(base.dtype)


def _write_all(edits: list[_Edit], targets: Mapping[str, Tensor]) -> None:
    """Writes all edits or, where one fails, none."""
    done: list[_Edit] = []
    try:
        for edit in edits:
            done.append(edit)  # before the write, which may fail halfway
            edit.write(targets[edit.name])
    except BaseException:
        for edit in done:
            edit.inverse().write(targets[edit.name])
        raise


def _take(tensor: Tensor, indices: Tensor) -> Tensor:
    """The values (count,) of a tensor at flat row-major positions (count,), on the CPU; its layout may be any."""
    return tensor.detach().take(indices.to(tensor.device)).cpu()


def _own_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal in every bit: -0.0 is not 0.0, and NaN is itself."""
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
