"""Where a delta is kept: a folder, a file or a repository on the hub.

In: a path or a repository's id. Out: the path of a delta file to read, or a delta that is written or pushed.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsify.delta import card, hub
from sparsify.delta.entries import NamedTensors, StrPath, TensorDeltas
from sparsify.delta.format import CONFIG_NAME, FILE_NAME, write
from sparsify.errors import SparsifyError

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo


def find_file(path: StrPath, *, revision: str | None = None, **of_hub: Any) -> Path:
    """The path of a delta's file, fetched from the hub if need be; arguments as in ``SparseDelta.load``."""
    file = Path(path)
    if isinstance(path, str) and not file.exists() and _may_be_on_hub(path):
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


def _may_be_on_hub(path: str) -> bool:
    """Whether a string that is no path here has the form of a repository's id."""
    return path.count("/") == 1 and not path.endswith(".safetensors") and hub.is_repo_id(path)


def save(path: Path, tensors: TensorDeltas, whole: NamedTensors, config: Mapping[str, Any]) -> None:
    """Writes a delta into a folder, or, where the path ends in ``.safetensors``, as that file alone."""
    if path.suffix == ".safetensors" and not path.is_dir():
        write(path, tensors, whole, config)
    elif path.is_file():
        remedy = "give a folder, or a path that ends in `.safetensors`."
        raise SparsifyError(f"`{path}` is a file, and a delta is saved into a folder: {remedy}")
    else:
        write(path / FILE_NAME, tensors, whole, config, sidecar=path / CONFIG_NAME)


def push(
    tensors: TensorDeltas,
    whole: NamedTensors,
    config: Mapping[str, Any],
    repo_id: str,
    *,
    revision: str | None,
    commit_message: str | None,
    **options: Any,
) -> CommitInfo:
    """Commits a delta and its card to a repository on the hub; arguments as in ``SparseDelta.push_to_hub``."""
    hub.check_destination(repo_id, revision)
    public = card.public_config(config)
    if config.get("base_model_name_or_path") and card.public_base(config) is None:
        warnings.warn(
            "the base is recorded as a path of this machine, which is left out of what is published: for others to "
            "find the base, set `delta.config['base_model_name_or_path']` to its id on the hub and push again.",
            stacklevel=3,
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save(folder, tensors, whole, public)
        file_bytes = (folder / FILE_NAME).stat().st_size

        def new_card(full_id: str, present: str | None) -> str:
            text = card.model_card(tensors, whole, public, repo_id=full_id, file_bytes=file_bytes)
            return card.update_card(present, text)

        message = commit_message or "Upload a sparse delta"
        return hub.upload(folder, repo_id, card=new_card, revision=revision, commit_message=message, **options)
