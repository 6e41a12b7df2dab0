"""Downloads a file from the Hugging Face Hub and uploads a folder to it, with errors that give the remedy.

In: the id of a repository. Out: a file in the hub's local cache, or a commit. Independent of the contents of a delta.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sparsify.errors import SparsifyError, brief

if TYPE_CHECKING:
    import os

    from huggingface_hub import CommitInfo, HfApi

CARD_NAME = "README.md"
_MAIN = "main"


def is_repo_id(text: object) -> bool:
    """Returns whether a text could be the id of a repository on the hub: ``"user/name"``, or a bare ``"name"``.

    Example:
        >>> is_repo_id("google-bert/bert-base-uncased"), is_repo_id("gpt2")
        (True, True)
        >>> is_repo_id("/models/bert"), is_repo_id("./bert"), is_repo_id("a/b/c")
        (False, False, False)
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, not in __all__

    if not isinstance(text, str):
        return False
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def check_destination(repo_id: object, revision: object = None) -> None:
    """Raises where a repository, or a branch of it, cannot have such a name."""
    if not is_repo_id(repo_id):
        raise SparsifyError(
            f"{repo_id!r:.100} is no repository's id: expected one such as 'user/name', of letters, digits, '-', '_' "
            "and '.'"
        )
    # the part of git's rules for branch names that a mistake is likely to break
    if revision is not None and not (
        isinstance(revision, str) and re.fullmatch(r"[\w.+@#-]+(/[\w.+@#-]+)*", revision) and ".." not in revision
    ):
        expected = f"expected the name of a branch to push to, or None for `{_MAIN}`."
        raise SparsifyError(f"revision={revision!r:.100}; {expected}")


def download(
    repo_id: str,
    filename: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Path:
    """Returns the path of one file of a repository in the local cache; downloads it if need be.

    Args:
        repo_id: such as ``"user/name"``.
        filename: the file's path in the repository.
        revision: branch, tag or commit; the main branch by default.
        token: as in huggingface_hub: a token, ``True`` for the stored one, ``False`` for none.
        cache_dir: folder for downloads; huggingface_hub's cache by default.
        local_files_only: make no network request.

    Raises:
        SparsifyError: when the file is not available, with the reason and the remedy.
    """
    from huggingface_hub import hf_hub_download

    with _explained(f"`{filename}` of `{repo_id}`", repo_id, revision):
        return Path(
            hf_hub_download(
                repo_id,
                filename,
                revision=revision,
                token=token,
                cache_dir=None if cache_dir is None else str(cache_dir),
                local_files_only=local_files_only,
                library_name="sparsify",
            )
        )


def cached_folder(repo_id: str, revision: str | None) -> Path | None:
    """Returns the folder of a repository's checkpoint in the local cache, if there; makes no network request."""
    from huggingface_hub import try_to_load_from_cache

    if not is_repo_id(repo_id):
        return None
    file = try_to_load_from_cache(repo_id, "config.json", revision=revision)
    return Path(file).parent if isinstance(file, str) else None


def upload(
    folder: Path,
    repo_id: str,
    *,
    card: Callable[[str, str | None], str],
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str,
) -> CommitInfo:
    """Uploads a folder's files and a card to a repository in one commit; makes the repository if need be.

    Args:
        folder: the files; its ``README.md`` is written here.
        repo_id: ``"user/name"``; a bare name goes to the token's owner.
        card: makes the card from the repository's full id and the text of its present card, ``None`` if it has none.
        private: whether a new repository is private; the owner's default where ``None``.
        token: as in huggingface_hub.
        revision: the branch; made if need be.
        create_pr: open a pull request instead of writing to the branch.
        commit_message: the commit's first line.

    Raises:
        SparsifyError: before any request, for names of repository or branch that cannot be; when the hub refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(token=token, library_name="sparsify")
    check_destination(repo_id, revision)
    with _explained(f"a delta in `{repo_id}`", repo_id, revision):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and revision != _MAIN and not revision.startswith("refs/"):
            try:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            except HfHubHTTPError as error:
                # a user who may only open pull requests may not make branches: the branch has to be there
                if not (create_pr and error.response.status_code == 403):
                    raise
        present = _present_card(api, repo_id, revision)
        text = card(repo_id, present)
        if text != present:
            (folder / CARD_NAME).write_bytes(text.encode())
        # not upload_folder, which may make several commits: a reader could see half of the files
        return api.create_commit(
            repo_id,
            [CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=file) for file in sorted(folder.iterdir())],
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )


def _present_card(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    """The text of a repository's card on the hub, or ``None``; never a cached one, which may be old."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        file = api.hf_hub_download(repo_id, CARD_NAME, revision=revision)
    except LocalEntryNotFoundError:
        raise  # the hub cannot be reached, so a card may be there
    except EntryNotFoundError:
        return None
    return Path(file).read_bytes().decode("utf-8", errors="replace")


@contextmanager
def _explained(what: str, repo_id: str, revision: str | None) -> Iterator[None]:
    """Turns errors of huggingface_hub into one sentence with the remedy."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    login = "`hf auth login` or pass `token=...`"
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} was not asked or is silent"
    offline = (
        f"{what} is not in the local cache, and {why}: get online and try again, or give the path of a copy, which "
        f"`{repo_id}` is not."
    )
    texts: dict[type[Exception], str] = {  # subclasses before their classes
        errors.GatedRepoError: f"`{repo_id}` is gated: ask for access on its page at {hub}/{repo_id}, then log in with "
        f"{login}.",
        errors.RepositoryNotFoundError: f"`{repo_id}` is neither a path here nor a repository at {hub} that you may "
        f"see: check the spelling and, if it is private, log in with {login}.",
        errors.RevisionNotFoundError: f"`{repo_id}` has no revision {revision!r}: give one of its branches or tags, or "
        "a commit's full hash.",
        errors.LocalEntryNotFoundError: offline,
        errors.OfflineModeIsEnabled: offline,
        errors.EntryNotFoundError: f"there is no {what} at revision {revision or _MAIN!r}: give a repository that "
        "`push_to_hub` wrote.",
    }
    try:
        yield
    except Exception as error:  # also the client's transport's, which differ from version to version
        reason = brief(error) or type(error).__name__
        other = (
            f"the hub at {hub} did not serve {what} ({reason}): check the network and, if it is a matter of rights, "
            "the token that `hf auth login` stored or `token=...` gives."
        )
        text = next((text for kind, text in texts.items() if isinstance(error, kind)), other)
        raise SparsifyError(text) from error
