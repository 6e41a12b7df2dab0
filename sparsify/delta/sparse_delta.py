"""What was learned, apart from any model: take it from a trained model, save, load, apply, revert.

    model in training --from_model--> SparseDelta <--save, load--> file, <--push_to_hub, load--> hub
    plain base model  <--apply, revert--> SparseDelta

A delta knows nothing of training: ``from_model`` asks the model's own engine. It is O(budget) throughout; what it
replaces in a model is kept and put back by ``revert``, never computed back.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from sparsify.common.interrupts import uninterrupted
from sparsify.common.names import check_plain, find_engine
from sparsify.common.raw_bits import digest, same_values
from sparsify.delta import format as delta_format
from sparsify.delta.algebra import Summable
from sparsify.delta.diff import diff
from sparsify.delta.entries import TensorDelta, same_entries
from sparsify.delta.exchange import Exchange, find_file
from sparsify.delta.format import CONFIG_NAME, FILE_NAME
from sparsify.delta.metadata import ENTRIES_IN_WHOLE_KEY
from sparsify.delta.patch_plan import (
    Edit,
    counted,
    find_targets,
    own_copy,
    plan_entries,
    plan_whole,
    undo_all,
    warn_of_casts,
    write_all,
)
from sparsify.errors import SparsifyError

__all__ = ["SparseDelta", "TensorDelta"]

_RECORDED_VERSIONS = ("sparsify", "torch", "safetensors", "transformers", "peft")


class SparseDelta(Summable, Exchange):
    """The entries that training changed, and what they changed to.

    Two deltas are equal (``==``) where they change the same entries of the same base to the same values, and store the
    same tensors whole, all to the bit; ``config`` and the order of tensors do not count. Since a delta may be changed
    in place, it has no hash: use its name, or the file's, as a key.

    Args:
        tensors: changed entries by the tensor's plain name.
        whole: tensors to replace as a whole, by plain name.
        config: how the delta came about; goes into the file, nothing depends on it.

    Example:
        >>> import torch
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
        super().__init__(tensors, whole, config)
        self._applied: WeakKeyDictionary[nn.Module, list[Edit]] = WeakKeyDictionary()

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

        Warns:
            UserWarning: when parameters train that no delta holds, since they became trainable, or were added or
                replaced, after ``sparsify``, or are outside of the module that it was given.
        """
        engine = find_engine(model)
        if engine is None:
            raise SparsifyError(
                f"this {type(model).__name__} is not sparsified, so there is nothing to take a delta from: pass the "
                "model that `sparsify(model, ...)` returned, before `desparsify`. What full fine-tuning changed is "
                "`SparseDelta.diff(base, model)`."
            )
        export = engine.export(budget, model)
        tensors: dict[str, TensorDelta] = {}
        for item in export.tensors:
            if item.name in tensors:
                raise SparsifyError(f"two trained tensors are called `{item.name}`: rename one of the modules.")
            if item.indices.numel() or item.drawn is not None:
                tensors[item.name] = _tensor_delta(item)
        whole = {name: own_copy(tensor) for name, tensor in export.whole.items()}
        return cls(tensors, whole, {**copy.deepcopy(dict(export.config)), "versions": _library_versions()})

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
    ) -> SparseDelta:
        """Reads a delta that :meth:`save` wrote, here or, by way of :meth:`push_to_hub`, on the hub.

        The values and indices are compared with the SHA-256 that the file has of them, for which it is read once more:
        about a second for each gigabyte. (A file from before format version 2 has none.)

        Args:
            path: the folder, or the file itself; a string that is no path here but could be the id of a repository on
                the hub, ``"user/name"``, is taken for one.
            revision: of the repository: branch, tag or commit.
            token: for the hub: a token, ``True`` for the stored one, ``False`` for none.
            cache_dir: where to keep what the hub sent; huggingface_hub's cache by default.
            local_files_only: take it from the cache, ask nobody.

        Raises:
            SparsifyError: when there is nothing at the path, or the hub does not hand it out; a ``revision`` of a path.
            DeltaFormatError: when the file is broken, even by one changed bit, or is no delta, or no regular file.
        """
        file = find_file(path, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only)
        return cls(*delta_format.read(file))

    @classmethod
    def diff(
        cls,
        base: nn.Module | str | os.PathLike[str],
        tuned: nn.Module | str | os.PathLike[str],
        budget: int | None = None,
        *,
        progress: bool = True,
    ) -> SparseDelta:
        """What a fine-tuned model has that its base has not.

        ``config["diff"]`` says how many entries changed, how many are kept, and their share of the squared change.

        Args:
            base: the pretrained model, plain, or the path of its checkpoint, which is read a tensor at a time.
            tuned: the fine-tuned model, likewise. Tensors that the base lacks are stored whole; what only the base has
                is left out.
            budget: keep the entries with the largest absolute change only, in the whole model; ``None``: all, exactly.
            progress: show a progress bar.

        Raises:
            BaseMismatchError: when a tensor has another shape or dtype in the two, or is tied in one of them only, or
                when they have no tensor in common.
            SparsifyError: when the models do not differ, the budget is no positive number, or a change is not finite.
        """
        return cls(*diff(base, tuned, budget, progress=progress))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the delta, whole or not at all; what was there before is replaced.

        Args:
            path: a folder, made if need be, that gets ``sparse_delta.safetensors``, and ``sparse_delta_config.json``
                for people to read. A path that ends in ``.safetensors`` is the file itself, and all that is written.

        Raises:
            SparsifyError: when ``config`` does not go into JSON, a name is both in ``tensors`` and in ``whole``, or the
                path is that of another file. Nothing is written then.
        """
        path = Path(path)
        if path.suffix == ".safetensors" and not path.is_dir():
            delta_format.write(path, self.tensors, self.whole, self.config)
            return
        if path.is_file():
            raise SparsifyError(
                f"`{path}` is a file, and a delta is saved into a folder: give a folder, or a path that ends in "
                "`.safetensors`."
            )
        delta_format.write(path / FILE_NAME, self.tensors, self.whole, self.config, sidecar=path / CONFIG_NAME)

    def apply(self, model: nn.Module) -> nn.Module:
        """Puts the delta's values into a base model, in place; all checks come before the first write.

        A base in another dtype than the delta was trained on cannot be checked: one warning says so, and the values
        are cast.

        Over a quantized weight the delta is laid: its layer's output gets what the trained entries add, and no state
        dict has it. A delta that was trained on one goes onto the weights from before they were quantized, too, which
        cannot be checked either.

        Args:
            model: the base that the delta was trained on, wrapped or not, on any device.

        Returns:
            The same model.

        Raises:
            BaseMismatchError: when the model lacks a tensor, or has another shape or other values at the entries.
            SparsifyError: when the model is being trained sparsely, lies on the meta device, or has this delta already.
        """
        if model in self._applied:
            raise SparsifyError(
                "this delta is already applied to this model, and applying it again would lose the original values: "
                "call `revert(model)` first."
            )
        edits = self.plan(model)
        with uninterrupted():
            write_all(edits, model)
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
        check_plain(model)
        with uninterrupted():
            undo_all(self._applied[model], model)
            del self._applied[model]
        return model

    def swap(self, model: nn.Module, other: SparseDelta) -> nn.Module:
        """Takes this delta off and puts another one on; only the entries of the two are read and written.

        Args:
            model: a model that this delta is applied to.
            other: a delta trained on the same base.

        Returns:
            The same model.

        Raises:
            SparsifyError: as :meth:`revert` and :meth:`apply`; the model then holds this delta, as before.
        """
        edits = self._applied.get(model, [])
        with uninterrupted():
            self.revert(model)
            try:
                return other.apply(model)
            except BaseException:
                write_all(edits, model)
                self._applied[model] = edits
                raise

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[nn.Module]:
        """Applies the delta for the length of a ``with`` block, and reverts it however the block ends."""
        self.apply(model)
        try:
            yield model
        finally:
            self.revert(model)

    def plan(self, model: nn.Module) -> list[Edit]:
        """The edits that :meth:`apply` would write into a model, all checked; nothing is written."""
        check_plain(model)
        delta_format.check_names(self.tensors, self.whole)
        targets = find_targets([*self.tensors, *self.whole], model, self.whole)
        edits = [plan_entries(name, delta, targets[name]) for name, delta in self.tensors.items()]
        edits += [plan_whole(name, tensor, targets[name]) for name, tensor in self.whole.items()]
        parts = {name: part.dtype for part_of in (self.tensors, self.whole) for name, part in part_of.items()}
        warn_of_casts({n: (dtype, targets[n].dtype) for n, dtype in parts.items() if targets[n].dtype != dtype})
        return edits

    def entries_only(self) -> SparseDelta:
        """The same delta without the tensors that it stores whole, such as a head: the changed entries alone.

        Deltas of tasks with a head each have a sum this way: ``a.entries_only() + 0.5 * b.entries_only()``, or, of the
        sum as a whole, ``(a + 0.5 * b).entries_only()``.

        Example:
            >>> import torch
            >>> base, tuned = nn.Linear(2, 1), nn.Linear(2, 1)
            >>> delta = SparseDelta.diff(base, tuned, progress=False)
            >>> delta.whole["head.weight"] = torch.ones(2, 1)
            >>> delta.entries_only()
            SparseDelta(3 entries in 2 tensors, 0 tensors stored whole)
        """
        return SparseDelta(self.tensors, config=self.config)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SparseDelta):
            return NotImplemented
        return (
            self.tensors.keys() == other.tensors.keys()
            and self.whole.keys() == other.whole.keys()
            and all(same_entries(part, other.tensors[name]) for name, part in self.tensors.items())
            and all(same_values(tensor, other.whole[name]) for name, tensor in self.whole.items())
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def support(self) -> dict[str, Tensor]:
        """The changed entries' flat indices (count,) by tensor name: a strategy for :func:`sparsify.sparsify`.

        A warm start trains the same entries on: ``delta.apply(base)``, then ``sparsify(base, None, delta.support)``.
        """
        return {name: tensor.indices for name, tensor in self.tensors.items()}

    @property
    def num_entries(self) -> int:
        """Number of changed entries, those of tensors stored whole not counted: see :attr:`entries_in_whole`."""
        return sum(tensor.count for tensor in self.tensors.values())

    @property
    def entries_in_whole(self) -> int:
        """Number of entries that were trained in tensors stored whole, such as a sparse LoRA's, by ``config``.

        Those of a dense head, and of a delta that was saved before this was recorded, are not counted.
        """
        recorded = self.config.get(ENTRIES_IN_WHOLE_KEY)
        most = sum(tensor.numel() for tensor in self.whole.values())
        return recorded if type(recorded) is int and 0 < recorded <= most else 0

    def __repr__(self) -> str:
        entries = f"{counted(self.num_entries, 'entry', 'entries')} in {counted(len(self.tensors), 'tensor')}, "
        whole = f"{counted(len(self.whole), 'tensor')} stored whole"
        if trained := self.entries_in_whole:
            entries = entries if self.tensors else ""
            whole += f", with {counted(trained, 'trained entry', 'trained entries')}"
        return f"SparseDelta({entries}{whole})"

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave behind which models the delta is applied to."""
        return {"tensors": self.tensors, "whole": self.whole, "config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _tensor_delta(item: Any) -> TensorDelta:
    """One tensor's entries as the engine exports them."""
    try:
        return TensorDelta(
            indices=own_copy(item.indices),
            values=own_copy(item.values),
            shape=tuple(item.shape),
            dtype=item.base_values.dtype,
            kind="replace" if item.quantization is None else "add",
            base_sha256=digest(item.base_values) if item.drawn is None else item.drawn[1],
            drawn=None if item.drawn is None else item.drawn[0],
            quantization=item.quantization,
        )
    except SparsifyError as error:
        raise SparsifyError(f"tensor `{item.name}` cannot go into a delta: {error}") from error


def _library_versions() -> dict[str, str]:
    """Versions of the libraries in use; none is imported for it."""
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in _RECORDED_VERSIONS}
    return {name: str(version) for name, version in versions.items() if version is not None}
