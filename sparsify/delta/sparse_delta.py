"""The entries that training changed, apart from any model: taken from one, saved, loaded, applied and reverted.

    model in training --from_model--> SparseDelta <--save, load--> file, <--push_to_hub, load--> hub
    plain base model  <--apply, revert--> SparseDelta

A delta needs no training code: ``from_model`` asks the model's own engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sparsify.common.names import counted, find_engine
from sparsify.common.raw_bits import same_values
from sparsify.delta import format as delta_format
from sparsify.delta import hub, peft_files
from sparsify.delta.algebra import Summable
from sparsify.delta.checkpoint.trained_state import is_training_checkpoint, read_training_checkpoint
from sparsify.delta.diff import diff
from sparsify.delta.entries import Base, Config, NamedTensors, StrPath, TensorDelta, TensorDeltas
from sparsify.delta.merge import CheckReport, WeightPatch, check_base, make_patches, merge
from sparsify.delta.patch_plan import PatchPlan, plan_delta
from sparsify.errors import SparsifyError

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo


class SparseDelta(Summable):
    """The entries that training changed, and their trained values.

    Two deltas are equal (``==``) where they change the same entries of the same base to the same values, and store the
    same tensors whole, all to the bit; ``config`` and the order of tensors do not count.

    Args:
        tensors: changed entries by the tensor's plain name.
        whole: tensors stored whole, that is dense, by plain name; they replace the base's.
        config: how the delta came about; it is saved in the file, and nothing depends on it.

    Example:
        >>> import copy
        >>> base = nn.Linear(3, 1)
        >>> tuned = copy.deepcopy(base)
        >>> tuned.weight.data[0, 1] = 5.0
        >>> delta = SparseDelta.diff(base, tuned, progress=False)
        >>> delta
        SparseDelta(1 entry in 1 tensor, 0 tensors stored whole)
        >>> with delta.applied(base):
        ...     base.weight[0, 1].item()
        5.0
    """

    def __init__(self, tensors: TensorDeltas, whole: NamedTensors | None = None, config: Config | None = None) -> None:
        self.tensors: dict[str, TensorDelta] = dict(tensors)
        self.whole: dict[str, Tensor] = dict(whole or {})
        self.config: dict[str, Any] = dict(config or {})

    @classmethod
    def from_model(cls, model: nn.Module, budget: int | None = None) -> SparseDelta:
        """Takes the entries that a sparsified model has trained so far.

        Args:
            model: a model that ``sparsify`` prepared, also within DDP or ``torch.compile``; it is only read.
            budget: keep only the first ``budget`` entries in order of unmasking, or, of a static strategy, in the order
                of the weights; all by default.

        Raises:
            SparsifyError: when the model is not sparsified, or holds values that cannot be a delta.

        Warns:
            UserWarning: when parameters train that ``sparsify`` was not given, and so no delta holds.
        """
        return cls(*find_engine(model).exporter(model).delta(budget))

    @classmethod
    def load(
        cls, path: StrPath, *, revision: str | None = None, token: str | bool | None = None,
        cache_dir: StrPath | None = None, local_files_only: bool = False,
    ) -> SparseDelta:  # fmt: skip
        """Reads a delta from a folder or file that :meth:`save` wrote, or from the hub; all of it is checked.

        Args:
            path: the folder or the file; a Trainer's checkpoint, as in :meth:`from_checkpoint`, or the folder of a
                ``SparseConfig``'s adapter; or, unless a path is called so, a repository on the hub, ``"user/name"``.
            revision: of the repository: branch, tag or commit.
            token: for the hub: a token, ``True`` for the stored one, ``False`` for none.
            cache_dir: where to keep what the hub sent; huggingface_hub's cache by default.
            local_files_only: make no network request.

        Raises:
            SparsifyError: when there is nothing at the path, or two different ones, or the hub does not hand it out.
            DeltaFormatError: when the file is broken, even by one changed bit, or is no delta.
        """
        inside = read_training_checkpoint(path) if revision is None and is_training_checkpoint(path) else None
        if revision is None and inside is None:
            inside = peft_files.read_adapter(path)
        if inside is not None and not Path(path, delta_format.FILE_NAME).exists():
            return cls(*inside)
        options = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        delta = cls(*delta_format.read(hub.find_file(path, revision=revision, **options)))
        if inside is not None and delta != cls(*inside):
            problem = f"`{path}` has two deltas: that of `{delta_format.FILE_NAME}`, and another in its checkpoint, or"
            raise SparsifyError(f"{problem} adapter, as where a later run wrote into the folder: delete the older one.")
        return delta

    @classmethod
    def from_checkpoint(cls, checkpoint: StrPath | Mapping[str, Any]) -> SparseDelta:
        """Takes the delta out of a checkpoint of a sparsified model, as of a run that was killed.

        Args:
            checkpoint: the folder that the Trainer or accelerate wrote, its file, in safetensors or by ``torch.save``
                (read without running its code), or a state dict, also as an item of a larger dict.

        Returns:
            What :meth:`from_model` gave at that step.

        Raises:
            SparsifyError: when the checkpoint has no entries, as one of a merged or another model.
            DeltaFormatError: when it is broken.
        """
        return cls(*read_training_checkpoint(checkpoint))

    @classmethod
    def diff(cls, base: Base, tuned: Base, budget: int | float | None = None, *, progress: bool = True) -> SparseDelta:
        """Compares a fine-tuned model with its base and takes the entries that differ.

        ``config["diff"]`` says how many entries changed, how many are kept, and their share of the squared change.

        Args:
            base: the pretrained model, plain, or the path of its checkpoint, which is read a tensor at a time.
            tuned: the fine-tuned model, likewise. Tensors that only it has, or to which it has added tokens, are stored
                whole; those that only the base has are left out.
            budget: keep the entries with the largest absolute change only, so many in the whole model, or a share, a
                float, of all that are compared; all by default.
            progress: show a progress bar.

        Raises:
            BaseMismatchError: when a tensor has another shape or dtype in the two, or is tied in one of them only.
            SparsifyError: when the models do not differ, or a change is not finite.
        """
        return cls(*diff(base, tuned, budget, progress=progress))

    @classmethod
    def from_peft(cls, folder: StrPath, base: nn.Module) -> SparseDelta:
        """Makes a delta of an adapter that PEFT wrote: what changes in the base where PEFT merges it.

        SHiRA and Supertuning change few entries; any other adapter that can be merged changes its layers whole.

        Args:
            folder: with ``adapter_config.json`` and ``adapter_model.safetensors``; pickles are not read.
            base: the model that the adapter was trained on, in the dtype it is used in; PEFT merges into a copy.

        Raises:
            DeltaFormatError: when PEFT cannot load the adapter and merge it into this base.
            SparsifyError: when it changes nothing.
        """
        return cls(*peft_files.convert_adapter(folder, base))

    def save(self, path: StrPath) -> None:
        """Writes the delta, completely or not at all; a delta that was there before is replaced.

        Args:
            path: a folder, made if need be, that gets ``sparse_delta.safetensors``, and ``sparse_delta_config.json``
                for people to read; or a path that ends in ``.safetensors``, of the only file that is written.

        Raises:
            SparsifyError: when ``config`` does not go into JSON, or a file that is no delta is in the way.
        """
        hub.save(Path(path), self.tensors, self.whole, self.config)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | bool | None = None,
        revision: str | None = None, create_pr: bool = False, commit_message: str | None = None,
    ) -> CommitInfo:  # fmt: skip
        """Puts the delta on the hub, with a model card, in one commit; the repository is made if need be.

        Of a card that is there already only the generated part is renewed. A base that is a folder of this machine is
        not published; to name it, set ``config["base_model_name_or_path"]`` to its id on the hub first.

        Args:
            repo_id: ``"user/name"``; a bare name goes to the token's owner.
            private: whether a new repository is private; the owner's default where ``None``.
            token: a token that may write; by default the stored one.
            revision: the branch to write to, made if need be; with ``create_pr`` it has to be there.
            create_pr: open a pull request instead of writing to the branch.
            commit_message: the commit's first line.

        Returns:
            huggingface_hub's ``CommitInfo``: its ``oid`` is a revision for :meth:`load`.

        Raises:
            SparsifyError: when the hub does not take it.
        """
        return hub.push(
            self.tensors, self.whole, self.config, repo_id,
            private=private, token=token, revision=revision, create_pr=create_pr, message=commit_message,
        )  # fmt: skip

    def plan(self, model: nn.Module) -> tuple[PatchPlan, NamedTensors]:
        return plan_delta(self.tensors, self.whole, model)

    def check(self, base: Base) -> CheckReport:
        """Checks whether a base is the one that the delta was trained on; nothing is changed. Returns a report.

        Args:
            base: a model, or the path of a checkpoint, of which only the pages with changed entries are read.

        Raises:
            BaseMismatchError: when the base lacks a tensor, or has another shape or other values at the entries.
        """
        delta_format.check_not_extended(self.config, "check")
        return check_base(self.tensors, self.whole, base)

    def merge(self, base: StrPath, out: StrPath) -> Path:
        """Writes the trained model as an ordinary checkpoint, in the memory of one tensor; returns the path of ``out``.

        The new folder appears complete or not at all. The base's config, tokenizer and the like are copied; dense
        tensors that the base lacks go into a shard of their own, and a table of more tokens takes the place of its own.

        Args:
            base: the folder of the checkpoint that the delta was trained on, in safetensors files.
            out: the folder to write; it must not exist, or be empty.

        Raises:
            BaseMismatchError: when the checkpoint is not that of the delta's base.
            SparsifyError: when ``out`` is not free, or entries cannot be followed into the files.
        """
        delta_format.check_not_extended(self.config, "merge")
        return merge(self.tensors, self.whole, self.config, base, out)

    def patches(self, checkpoint: StrPath | None = None) -> Iterator[WeightPatch]:
        """Yields the delta as patches of a checkpoint's tensors, the form in which inference engines take weights.

        Patches of changed entries come first. Those of tensors stored whole have no ``indices`` where they replace all
        of a stored tensor.

        Args:
            checkpoint: the path of the checkpoint that the engine has loaded, against which everything is checked
                first: patches have its names, shapes and dtypes; by default those of the model at run time.

        Raises:
            BaseMismatchError: when the checkpoint is not that of the delta's base.
            SparsifyError: without a checkpoint, when the delta stores differences.
        """
        delta_format.check_not_extended(self.config, "patches")
        return make_patches(self.tensors, self.whole, checkpoint)

    def entries_only(self) -> SparseDelta:
        """The same delta without the tensors that it stores whole, such as a head."""
        return SparseDelta(self.tensors, config=self.config)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SparseDelta):
            return NotImplemented
        same = self.tensors.keys() == other.tensors.keys() and self.whole.keys() == other.whole.keys()
        same = same and all(part.equals(other.tensors[name]) for name, part in self.tensors.items())
        return same and all(same_values(tensor, other.whole[name]) for name, tensor in self.whole.items())

    __hash__ = None  # type: ignore[assignment]

    @property
    def support(self) -> dict[str, Tensor]:
        """The changed entries' flat indices (count,) by tensor name: a strategy for :func:`sparsify.sparsify`.

        For a warm start: ``delta.apply(base)``, then ``sparsify(base, None, delta.support)``.
        """
        return {name: tensor.indices for name, tensor in self.tensors.items()}

    @property
    def num_entries(self) -> int:
        """Number of changed entries; those of tensors stored whole are counted in :attr:`entries_in_whole`."""
        return sum(tensor.count for tensor in self.tensors.values())

    @property
    def entries_in_whole(self) -> int:
        """Number of entries that were trained in tensors stored whole, such as a sparse LoRA's, by ``config``."""
        recorded = self.config.get(delta_format.ENTRIES_IN_WHOLE_KEY)
        most = sum(tensor.numel() for tensor in self.whole.values())
        return recorded if type(recorded) is int and 0 < recorded <= most else 0

    def __repr__(self) -> str:
        entries = f"{counted(self.num_entries, 'entry', 'entries')} in {counted(len(self.tensors), 'tensor')}, "
        whole = f"{counted(len(self.whole), 'tensor')} stored whole"
        if trained := self.entries_in_whole:
            entries = entries if self.tensors else ""
            whole += f", with {counted(trained, 'trained entry', 'trained entries')}"
        return f"SparseDelta({entries}{whole})"
