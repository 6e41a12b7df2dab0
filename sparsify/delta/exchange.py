"""What a delta has to do with other people's files: bases and checkpoints on disk, PEFT's adapters, the hub.

In: a delta, as the class that inherits from this one. Out: files, and what reads them.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sparsify.delta import card, hub
from sparsify.delta.check import CheckReport, check_base
from sparsify.delta.entries import TensorDelta
from sparsify.delta.format import CONFIG_NAME, FILE_NAME, write
from sparsify.delta.merge import merge
from sparsify.delta.metadata import ADAPTERS_KEY, PEFT_KEY
from sparsify.delta.patches import WeightPatch, make_patches
from sparsify.delta.peft import PeftAdapter, read_adapter, write_adapter
from sparsify.errors import SparsifyError

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo
    from typing_extensions import Self


class Exchange:
    """A delta's methods for checkpoints, PEFT and the hub; :class:`sparsify.SparseDelta` has them."""

    def __init__(
        self,
        tensors: Mapping[str, TensorDelta],
        whole: Mapping[str, Tensor] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.tensors: dict[str, TensorDelta] = dict(tensors)
        self.whole: dict[str, Tensor] = dict(whole or {})
        self.config: dict[str, Any] = dict(config or {})

    def to_peft(
        self,
        folder: str | os.PathLike[str],
        method: str = "supertuning",
        base: nn.Module | str | os.PathLike[str] | None = None,
    ) -> PeftAdapter:
        """Writes the delta as an adapter that PEFT loads by itself: ``PeftModel.from_pretrained(base, folder)``.

        PEFT gives every layer a number of places that follows from its size. It is chosen to fit the fullest layer; in
        the others, differences of zero fill the rest. All of PEFT's sparse adapters' entries are in weights of
        ``nn.Linear``; modules that the delta stores whole become ``modules_to_save``.

        Args:
            folder: made if need be; gets ``adapter_config.json`` and ``adapter_model.safetensors``.
            method: ``"supertuning"``, or ``"shira"``, which is larger, and which transformers' ``load_adapter`` loses.
            base: the model that the delta was trained on, or the path of its checkpoint; it is only read. It has to
                be given, since PEFT stores differences.

        Returns:
            What was written and what padding it took; it prints well.

        Raises:
            BaseMismatchError: when it is not the delta's base.
            SparsifyError: when PEFT's format cannot hold the delta; nothing is written then.

        Example:
            >>> import tempfile, torch
            >>> from sparsify import SparseDelta
            >>> from sparsify.delta.entries import digest
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
        _check_not_extended(self.config, "to_peft")
        return write_adapter(folder, method, self.tensors, self.whole, self.config, base)

    @classmethod
    def from_peft(cls, folder: str | os.PathLike[str], base: nn.Module | str | os.PathLike[str]) -> Self:
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
            SparsifyError: when ``repo_id`` is none, the delta cannot be saved, or the hub does not take it.
        """
        hub.check_destination(repo_id, revision)
        config = card.public_config(self.config)
        if self.config.get("base_model_name_or_path") and card.public_base(self.config) is None:
            warnings.warn(
                "the base is recorded as a path of this machine, which is left out of what is published: for others to "
                "find the base, set `delta.config['base_model_name_or_path']` to its id on the hub and push again.",
                stacklevel=2,
            )
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            file = folder / FILE_NAME
            write(file, self.tensors, self.whole, config, sidecar=folder / CONFIG_NAME)

            def new_card(full_id: str, present: str | None) -> str:
                text = card.model_card(
                    self.tensors, self.whole, config, repo_id=full_id, file_bytes=file.stat().st_size
                )
                return card.update_card(present, text)

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
            >>> from sparsify import SparseDelta
            >>> base, tuned = nn.Linear(2, 1), nn.Linear(2, 1)
            >>> delta = SparseDelta.diff(base, tuned, progress=False)
            >>> print(delta.check(base))
            3 entries in 2 tensors: the base holds the values that the delta was trained on.
        """
        _check_not_extended(self.config, "check")
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
            >>> from sparsify import SparseDelta
            >>> from safetensors.torch import load_file, save_file
            >>> folder = Path(tempfile.mkdtemp())
            >>> base, tuned = nn.Linear(2, 1), nn.Linear(2, 1)
            >>> save_file(base.state_dict(), folder / "model.safetensors")
            >>> merged = SparseDelta.diff(base, tuned, progress=False).merge(folder, folder / "merged")
            >>> import torch
            >>> torch.equal(load_file(merged / "model.safetensors")["weight"], tuned.weight)
            True
        """
        _check_not_extended(self.config, "merge")
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
            >>> from sparsify import SparseDelta
            >>> base, tuned = nn.Linear(2, 1), nn.Linear(2, 1)
            >>> for patch in SparseDelta.diff(base, tuned, progress=False).patches():
            ...     print(patch.name, patch.shape, patch.indices.tolist())
            weight (1, 2) [0, 1]
            bias (1,) [0]
        """
        _check_not_extended(self.config, "patches")
        return make_patches(self.tensors, self.whole, checkpoint)


def _check_not_extended(config: Mapping[str, Any], what: str) -> None:
    """Raises where a delta is of a model with PEFT's or our adapters, and something is done to a base's own tensors."""
    if extended := [key for key in (PEFT_KEY, ADAPTERS_KEY) if config.get(key)]:
        plain = "merge_and_unload() of it is a plain model" if PEFT_KEY in extended else "save_adapters(model, folder)"
        raise SparsifyError(
            f"{what} goes by the base's own tensors, and this delta is of modules that "
            f"{'PEFT' if PEFT_KEY in extended else 'add_adapters'} put into the base: take "
            f"load_model(base, delta), and {plain}."
        )


def find_file(path: str | os.PathLike[str], *, revision: str | None = None, **of_hub: Any) -> Path:
    """The file of a delta, fetched from the hub if need be: what ``SparseDelta.load`` reads; arguments as there."""
    file = Path(path)
    if isinstance(path, str) and not file.exists() and _is_on_hub(path):
        file = hub.download(path, FILE_NAME, revision=revision, **of_hub)
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
    return file


def _is_on_hub(path: str) -> bool:
    """Whether a string that is no path here means a repository on the hub."""
    return path.count("/") == 1 and not path.endswith(".safetensors") and hub.is_repo_id(path)
