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
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from sparsify import card, hub
from sparsify import format as delta_format
from sparsify.algebra import Summable
from sparsify.checking import CheckReport, check_base
from sparsify.diffing import diff
from sparsify.edits import Edit, counted, find_targets, own_copy, plan_entries, plan_whole, undo_all, write_all
from sparsify.entries import TensorDelta, digest
from sparsify.errors import SparsifyError
from sparsify.format import CONFIG_NAME, FILE_NAME
from sparsify.merging import merge
from sparsify.names import ENGINE, find_engine
from sparsify.patches import WeightPatch, make_patches
from sparsify.peft_files import PeftAdapter, read_adapter, write_adapter

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

__all__ = ["SparseDelta", "TensorDelta"]

_RECORDED_VERSIONS = ("sparsify", "torch", "safetensors", "transformers", "peft")


class SparseDelta(Summable):
    """The entries that training changed, and what they changed to.

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
        self.tensors: dict[str, TensorDelta] = dict(tensors)
        self.whole: dict[str, Tensor] = dict(whole or {})
        self.config: dict[str, Any] = dict(config or {})
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
        """
        engine = find_engine(model)
        if engine is None:
            raise SparsifyError(
                f"this {type(model).__name__} is not sparsified, so there is nothing to take a delta from: pass the "
                "model that `sparsify(model, ...)` returned, before `desparsify`."
            )
        export = engine.export(budget)
        tensors: dict[str, TensorDelta] = {}
        for item in export.tensors:
            if item.name in tensors:
                raise SparsifyError(f"two trained tensors are called `{item.name}`: rename one of the modules.")
            if item.indices.numel():
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

        Args:
            path: the folder, or the file itself; a string that is no path here but could be the id of a repository on
                the hub, ``"user/name"``, is taken for one.
            revision: of the repository: branch, tag or commit.
            token: for the hub: a token, ``True`` for the stored one, ``False`` for none.
            cache_dir: where to keep what the hub sent; huggingface_hub's cache by default.
            local_files_only: take it from the cache, ask nobody.

        Raises:
            SparsifyError: when there is nothing at the path, or the hub does not hand it out; a ``revision`` of a path.
            DeltaFormatError: when the file is broken, or no delta.
        """
        file = Path(path)
        if isinstance(path, str) and not file.exists() and _is_on_hub(path):
            file = hub.download(
                path,
                FILE_NAME,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
            )
        elif revision is not None:
            raise SparsifyError(
                f"revision={revision!r} of `{path}`, which is taken for a path, and paths have no revisions: leave it "
                "out, or give the id of a repository on the hub and rename the path that hides it."
            )
        if file.is_dir():
            file = file / FILE_NAME
        if not file.exists():
            raise SparsifyError(
                f"`{file}` does not exist, so there is no delta to load: give the folder that `save` wrote, with its "
                f"`{FILE_NAME}`, the path of such a file, or the id of a repository on the hub, such as 'user/name'."
            )
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
            BaseMismatchError: when a tensor has another shape or dtype in the two.
            SparsifyError: when the models do not differ, the budget is no positive number, or a change is not finite.
        """
        for model in (base, tuned):
            if isinstance(model, nn.Module):
                _check_plain(model)
        return cls(*diff(base, tuned, budget, progress=progress))

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
        edits = self.plan(model)
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
        _check_plain(model)
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
        _check_plain(model)
        delta_format.check_names(self.tensors, self.whole)
        targets = find_targets([*self.tensors, *self.whole], model, self.whole)
        edits = [plan_entries(name, delta, targets[name]) for name, delta in self.tensors.items()]
        edits += [plan_whole(name, tensor, targets[name]) for name, tensor in self.whole.items()]
        self._warn_of_casts(targets)
        return edits

    def to_peft(
        self,
        folder: str | os.PathLike[str],
        method: str = "shira",
        base: nn.Module | str | os.PathLike[str] | None = None,
    ) -> PeftAdapter:
        """Writes the delta as an adapter that PEFT loads by itself: ``PeftModel.from_pretrained(base, folder)``.

        PEFT gives every layer a number of places that follows from its size. It is chosen to fit the fullest layer; in
        the others, differences of zero fill the rest. All of PEFT's sparse adapters' entries are in weights of
        ``nn.Linear``; modules that the delta stores whole become ``modules_to_save``.

        Args:
            folder: made if need be; gets ``adapter_config.json`` and ``adapter_model.safetensors``.
            method: ``"shira"``, or ``"supertuning"``: smaller, and transformers' ``load_adapter`` takes it, too.
            base: the model that the delta was trained on, or the path of its checkpoint; it is only read. It has to
                be given, since PEFT stores differences.

        Returns:
            What was written and what padding it took; it prints well.

        Raises:
            BaseMismatchError: when it is not the delta's base.
            SparsifyError: when PEFT's format cannot hold the delta; nothing is written then.

        Example:
            >>> import tempfile, torch
            >>> base = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
            >>> weight = base[0].weight.detach().flatten()
            >>> entry = TensorDelta(
            ...     torch.tensor([5]), weight[5:6] + 1, (4, 3), torch.float32, "replace", digest(weight[5:6])
            ... )
            >>> delta = SparseDelta({"0.weight": entry})
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     adapter = delta.to_peft(folder, "supertuning", base)
            ...     adapter.settings, adapter.padding, SparseDelta.from_peft(folder, base)
            ({'sparsity': 0.9166666666666666}, 0, SparseDelta(1 entry in 1 tensor, 0 tensors stored whole))
        """
        return write_adapter(folder, method, self.tensors, self.whole, self.config, base)

    @classmethod
    def from_peft(cls, folder: str | os.PathLike[str], base: nn.Module | str | os.PathLike[str]) -> SparseDelta:
        """Reads a SHiRA or Supertuning adapter that PEFT, or :meth:`to_peft`, wrote.

        Args:
            folder: with ``adapter_config.json`` and ``adapter_model.safetensors``; pickles are not read.
            base: the model that the adapter was trained on, in the dtype it is used in, or the path of its checkpoint.

        Returns:
            The entries that differ from the base, with the values that PEFT computes with.

        Raises:
            DeltaFormatError: when the adapter is broken, or of another type.
            BaseMismatchError: when it does not fit the base.
        """
        return cls(*read_adapter(folder, base))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        commit_message: str | None = None,
    ) -> CommitInfo:
        """Puts the delta on the hub, with a model card, in one commit; the repository is made if need be.

        A card that is there already keeps what a person wrote: only the part between our two comments is renewed, and
        a card without them is left alone. A base that is a folder of this machine is not published; to name it, set
        ``config["base_model_name_or_path"]`` to its id on the hub first.

        Args:
            repo_id: ``"user/name"``; a bare name goes to the token's owner.
            private: whether a new repository is private; the owner's default where ``None``.
            token: a token that may write, ``None`` or ``True`` for the one that ``hf auth login`` stored.
            revision: the branch to write to, made if need be.
            create_pr: open a pull request instead of writing to the branch.
            commit_message: the commit's first line.

        Returns:
            huggingface_hub's ``CommitInfo``: its ``oid`` is a revision for :meth:`load`.

        Raises:
            SparsifyError: when the delta cannot be saved, or the hub does not take it.
        """
        public = SparseDelta(self.tensors, self.whole, card.public_config(self.config))
        if self.config.get("base_model_name_or_path") and card.public_base(self.config) is None:
            warnings.warn(
                "the base is recorded as a path of this machine, which is left out of what is published: for others to "
                "find the base, set `delta.config['base_model_name_or_path']` to its id on the hub and push again.",
                stacklevel=2,
            )
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            public.save(folder)
            file_bytes = (folder / FILE_NAME).stat().st_size

            def new_card(full_id: str, present: str | None) -> str:
                parts = (public.tensors, public.whole, public.config)
                return card.update_card(present, card.model_card(*parts, repo_id=full_id, file_bytes=file_bytes))

            return hub.upload(
                folder,
                repo_id,
                card=new_card,
                private=private,
                token=token,
                revision=revision,
                create_pr=create_pr,
                commit_message=commit_message or "Upload a sparse delta",
            )

    def check(self, base: nn.Module | str | os.PathLike[str]) -> CheckReport:
        """Whether a base is the one that the delta was trained on; nothing is changed.

        Args:
            base: a model, or the path of a checkpoint, of which only the pages with changed entries are read.

        Returns:
            What was checked; ``print`` it.

        Raises:
            BaseMismatchError: when the base lacks a tensor, or has another shape or other values at the entries.
            SparsifyError: when there is no checkpoint at the path, or the model is being trained sparsely.

        Example:
            >>> base, tuned = nn.Linear(2, 1), nn.Linear(2, 1)
            >>> delta = SparseDelta.diff(base, tuned, progress=False)
            >>> print(delta.check(base))
            3 entries in 2 tensors: the base holds the values that the delta was trained on.
        """
        if isinstance(base, nn.Module):
            _check_plain(base)
        return check_base(self.tensors, self.whole, base)

    def merge(self, base: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
        """Writes the trained model as an ordinary checkpoint, shard by shard, in the memory of one tensor.

        All checks come before the first write, and the new folder appears complete or not at all. The base's config,
        tokenizer and the like come along; tensors stored whole that the base lacks go into a shard of their own.

        Args:
            base: the folder of the checkpoint that the delta was trained on, in safetensors files.
            out: the folder to write; it must not exist, or be empty.

        Returns:
            The path of ``out``.

        Raises:
            BaseMismatchError: when the checkpoint is not that of the delta's base.
            SparsifyError: when there is no checkpoint, ``out`` is not free, or transformers converts a tensor at load
                in a way that entries cannot be followed through.

        Example:
            >>> import tempfile
            >>> from safetensors.torch import load_file, save_file
            >>> folder = Path(tempfile.mkdtemp())
            >>> base, tuned = nn.Linear(2, 1), nn.Linear(2, 1)
            >>> save_file(base.state_dict(), folder / "model.safetensors")
            >>> merged = SparseDelta.diff(base, tuned, progress=False).merge(folder, folder / "merged")
            >>> import torch
            >>> torch.equal(load_file(merged / "model.safetensors")["weight"], tuned.weight)
            True
        """
        return merge(self.tensors, self.whole, self.config, base, out)

    def patches(self, checkpoint: str | os.PathLike[str] | None = None) -> Iterator[WeightPatch]:
        """The delta as patches of a checkpoint's tensors, the form in which inference engines take weights.

        Args:
            checkpoint: the path of the checkpoint that the engine has loaded. Names, shapes and dtypes of the patches
                are then the checkpoint's, also where transformers renames or fuses tensors at load, and everything is
                checked before the first patch. Without it they are the model's at run time.

        Returns:
            Patches of changed entries, then those of tensors stored whole, whose ``indices`` are None.

        Raises:
            BaseMismatchError: when the checkpoint is not that of the delta's base.
            SparsifyError: without a checkpoint, when the delta stores differences.

        Example:
            >>> base, tuned = nn.Linear(2, 1), nn.Linear(2, 1)
            >>> for patch in SparseDelta.diff(base, tuned, progress=False).patches():
            ...     print(patch.name, patch.shape, patch.indices.tolist())
            weight (1, 2) [0, 1]
            bias (1,) [0]
        """
        return make_patches(self.tensors, self.whole, checkpoint)

    @property
    def support(self) -> dict[str, Tensor]:
        """The changed entries' flat indices (count,) by tensor name: a strategy for :func:`sparsify.sparsify`.

        A warm start trains the same entries on: ``delta.apply(base)``, then ``sparsify(base, None, delta.support)``.
        """
        return {name: tensor.indices for name, tensor in self.tensors.items()}

    @property
    def num_entries(self) -> int:
        """Number of changed entries, those of tensors stored whole not counted."""
        return sum(tensor.count for tensor in self.tensors.values())

    def __repr__(self) -> str:
        entries = f"{counted(self.num_entries, 'entry', 'entries')} in {counted(len(self.tensors), 'tensor')}"
        return f"SparseDelta({entries}, {counted(len(self.whole), 'tensor')} stored whole)"

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
                f"(`{cast[0]}`; {counted(len(cast), 'tensor')} in all): whether it is the right base cannot be "
                "checked, and the trained values are cast. Load the base in the delta's dtype for an exact result.",
                stacklevel=4,  # the caller of what called `plan`
            )


def _is_on_hub(path: str) -> bool:
    """Whether a string that is no path here means a repository on the hub."""
    return path.count("/") == 1 and not path.endswith(".safetensors") and hub.is_repo_id(path)


def _tensor_delta(item: Any) -> TensorDelta:
    """One tensor's entries as the engine exports them."""
    try:
        return TensorDelta(
            indices=own_copy(item.indices),
            values=own_copy(item.values),
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
    if any(ENGINE in vars(module) for module in model.modules()):
        raise SparsifyError(
            "this model is sparsified: its weights belong to the training that goes on, which would overwrite or "
            "learn on top of what a delta writes. Call `desparsify(model)` first, or use another copy of the base."
        )
