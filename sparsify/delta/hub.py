"""Where a delta is kept: a folder, a file, or a repository on the hub, with a model card that escapes what is in it."""

import json
import math
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sparsify.delta.entries import Config, NamedTensors, StrPath, TensorDeltas
from sparsify.delta.format import CONFIG_NAME, FILE_NAME, payload_hash, replace_file, to_bytes
from sparsify.errors import DeltaFormatError, SparsifyError, brief

_CARD_NAME = "README.md"
_TEMPLATE = Path(__file__).with_name("card.md")
_GENERATED = re.compile("<!-- sparsify: begin of the generated part.*?end of the generated part -->", re.DOTALL)
_PRESETS = {"d3-increment": "id3", "magnitude-static": "pafi", "fisher-static": "fish", "gsnr-static": "gsnr",
            "random-static": "random", "bias-static": "bitfit", "snip-prune": "sparseadapter"}  # fmt: skip
_MAX_ROWS, _MAX_TEXT = 120, 120  # of a card's table; characters of one name in it
_LAYER = re.compile(r"^(.*?\.\d+)\.")


def is_repo_id(text: object) -> bool:
    """Returns whether a text could be the id of a repository on the hub: ``"user/name"``, or a bare ``"name"``."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, not in __all__

    with suppress(HFValidationError):
        validate_repo_id(text if isinstance(text, str) else "")
        return True
    return False


def find_file(path: StrPath, *, revision: str | None = None, **options: Any) -> Path:
    """The path of a delta's file, fetched from the hub if need be; arguments as in ``SparseDelta.load``."""
    file = Path(path)
    may_be_id = isinstance(path, str) and path.count("/") == 1 and not path.endswith(".safetensors")
    if may_be_id and not file.exists() and is_repo_id(path):
        from huggingface_hub import hf_hub_download

        with _explained(str(path), revision):
            return Path(hf_hub_download(str(path), FILE_NAME, revision=revision, library_name="sparsify", **options))
    if revision is not None:
        remedy = "leave it out, or give the id of a repository on the hub and rename the path that hides it."
        raise SparsifyError(f"revision={revision!r} of `{path}`, which is taken for a path, and has none: {remedy}")
    file = file / FILE_NAME if file.is_dir() else file
    if not file.exists():
        if Path(path, "adapter_config.json").is_file():
            raise SparsifyError(f"`{path}` has an adapter of PEFT: SparseDelta.from_peft(path, base) makes it a delta.")
        text = f"`{file}` does not exist, so there is no delta to load: give the folder that `save` wrote, with its "
        text += f"`{FILE_NAME}`, that file, or the id of a repository on the hub, such as 'user/name'. Of the"
        raise SparsifyError(f"{text} weights of a merged or fully fine-tuned model take SparseDelta.diff(base, tuned).")
    return file


def cached_folder(repo_id: str, revision: str | None) -> Path | None:
    """Returns the folder of a repository's checkpoint in the local cache, if there; makes no network request."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(repo_id, "config.json", revision=revision) if is_repo_id(repo_id) else None
    return Path(file).parent if isinstance(file, str) else None


def save(path: Path, tensors: TensorDeltas, whole: NamedTensors, config: Config) -> None:
    """Writes a delta and its metadata for people into a folder, or the delta alone where the path is a file's."""
    is_file = path.suffix == ".safetensors" and not path.is_dir()
    if path.is_file() and not is_file:
        remedy = "a delta is saved into a folder: give one, or a path that ends in `.safetensors`."
        raise SparsifyError(f"`{path}` is a file, and {remedy}")
    file = path if is_file else path / FILE_NAME
    try:  # an empty file may make way for a delta, and a delta
        if file.exists() and file.stat().st_size:
            payload_hash(file)
    except (DeltaFormatError, OSError):
        problem = f"`{file}` is there already and is no delta, so it is left as it is"
        raise SparsifyError(f"{problem}: give another path.") from None
    data, document = to_bytes(tensors, whole, config)
    replace_file(file, data)
    if not is_file:
        replace_file(path / CONFIG_NAME, (json.dumps(document, indent=2) + "\n").encode())


def public_config(config: Config) -> dict[str, Any]:
    """A delta's config without the path of a base on the machine that trained, which is private."""
    base = config.get("base_model_name_or_path")
    hidden = {"base_model_name_or_path": None, "base_model_revision": None}
    return {**config, **({} if is_repo_id(base) and not Path(str(base)).exists() else hidden)}


def push(
    tensors: TensorDeltas, whole: NamedTensors, config: Config, repo_id: str,
    *, private: bool | None, token: str | bool | None, revision: str | None, create_pr: bool, message: str | None,
) -> Any:  # fmt: skip
    from huggingface_hub import CommitOperationAdd, HfApi

    if not is_repo_id(repo_id):
        raise SparsifyError(f"{repo_id!r:.100} is no repository's id: expected one such as 'user/name'.")
    public = public_config(config)
    if config.get("base_model_name_or_path") and not public["base_model_name_or_path"]:
        text = "the base is recorded as a path of this machine, which is left out of what is published: to name it, set"
        warnings.warn(f"{text} config['base_model_name_or_path'] to its hub id (`push --base-model`).", stacklevel=3)
    api = HfApi(token=token, library_name="sparsify")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save(folder, tensors, whole, public)
        with _explained(repo_id, revision):
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # a bare name is the owner's
            if revision and revision != "main" and not revision.startswith("refs/") and not create_pr:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            present = None
            if api.file_exists(repo_id, _CARD_NAME, revision=revision):
                file = api.hf_hub_download(repo_id, _CARD_NAME, revision=revision)
                present = Path(file).read_bytes().decode("utf-8", errors="replace")
            file_bytes = (folder / FILE_NAME).stat().st_size
            text = update_card(present, model_card(tensors, whole, public, repo_id=repo_id, file_bytes=file_bytes))
            if text != present:
                (folder / _CARD_NAME).write_bytes(text.encode())
            # not upload_folder, which may make several commits: a reader could see half of the files
            added = [CommitOperationAdd(file.name, file) for file in sorted(folder.iterdir())]
            message = message or "Upload a sparse delta"
            return api.create_commit(repo_id, added, commit_message=message, revision=revision, create_pr=create_pr)


@contextmanager
def _explained(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turns errors of huggingface_hub, and of its transport, into one sentence with the remedy."""
    from huggingface_hub import constants, errors

    login = "log in with `hf auth login` or pass `token=...`"
    online = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "get online"
    offline = f"it is not in the local cache, and the hub was not asked or is silent: {online} and try again, or give "
    offline += f"the path of a copy, which `{repo_id}` is not"
    texts: dict[type[Exception], str] = {  # subclasses before their classes
        errors.GatedRepoError: f"it is gated: ask for access on its page, then {login}",
        errors.RepositoryNotFoundError: "it is neither a path here nor a repository that you may see: check the "
        f"spelling and, if it is private, {login}",
        errors.RevisionNotFoundError: f"it has no revision {revision!r}: give one of its branches or tags, or a "
        "commit's full hash",
        errors.LocalEntryNotFoundError: offline,
        errors.OfflineModeIsEnabled: offline,
        errors.EntryNotFoundError: f"there is no `{FILE_NAME}` at revision {revision or 'main'!r}: give a repository "
        "that `push_to_hub` of a delta wrote, or the folder of PEFT's adapter: snapshot_download(id)",
    }
    try:
        yield
    except Exception as error:  # also the client's transport's, which differ from version to version
        other = f"{brief(error) or type(error).__name__}: check the network and, if it is a matter of rights, {login}"
        text = next((text for kind, text in texts.items() if isinstance(error, kind)), other)
        raise SparsifyError(f"`{repo_id}` of the hub at {constants.ENDPOINT}: {text}.") from error


def model_card(tensors: TensorDeltas, whole: NamedTensors, config: Config, *, repo_id: str, file_bytes: int) -> str:
    """Fills the card's template, Markdown with the hub's metadata in front, from a delta with a public config."""
    from huggingface_hub import ModelCardData

    base, strategy = config.get("base_model_name_or_path"), _strategy(config.get("strategy"))
    tags = ["sparsify", "sparse", "selective-fine-tuning", *([strategy] if strategy else [])]
    relation = "adapter" if base else None
    data = ModelCardData(base_model=base, base_model_relation=relation, library_name="sparsify", tags=tags)
    entries = sum(tensor.count for tensor in tensors.values())
    return _TEMPLATE.read_text(encoding="utf-8").format(
        metadata=data.to_yaml(),
        title=repo_id.rpartition("/")[2],
        base=f"[{_text(base)}](https://huggingface.co/{base})" if base else "a base model that is not on the hub",
        entries=entries,
        share=entries / max(sum(math.prod(tensor.shape) for tensor in tensors.values()), 1),
        tensors=len(tensors),
        whole=len(whole),
        strategy=_text(strategy),
        steps=_text(config.get("steps_done") or config.get("steps")),
        **{key: _text(config.get(key)) for key in ("base_model_revision", "architecture", "budget", "versions")},
        megabytes=f"{file_bytes / 1e6:,.2f}",
        source=base or "path/to/the/base",
        repo=repo_id,
        rows="\n".join(_rows(tensors, whole)),
    )


def update_card(present: str | None, generated: str) -> str:
    """The card to write: the present one with the new generated part and metadata; a hand-written one unchanged."""
    from huggingface_hub import ModelCard

    if present is None:
        return generated
    if not _GENERATED.search(present):
        return present
    new = ModelCard(generated)
    try:
        old = ModelCard(present)
    except Exception:  # its metadata is no YAML any more
        return present
    tags = [*(old.data.get("tags") or []), *new.data.get("tags")]
    for key, value in {**new.data.to_dict(), "tags": list(dict.fromkeys(tags))}.items():
        old.data[key] = value
    part = _GENERATED.findall(new.text)[0]
    old.text = _GENERATED.sub(lambda _: part, old.text, count=1)
    return str(old)


def _rows(tensors: TensorDeltas, whole: NamedTensors) -> Iterator[str]:
    """Table rows: changed entries by layer, 2 before 10; then the tensors stored whole."""
    counts: Counter[str] = Counter()
    for name, tensor in tensors.items():
        layer = _LAYER.match(name)
        counts[layer[1] if layer else name] += tensor.count
    total = max(counts.total(), 1)
    names = sorted(counts, key=lambda name: [(len(p) if p.isdigit() else 0, p) for p in name.split(".")])
    cells = [(name, counts[name], f"{counts[name] / total:.1%}") for name in names]
    cells += [(name, tensor.numel(), "stored whole") for name, tensor in whole.items()]
    yield from (f"| {_text(name)} | {count:,} | {share} |" for name, count, share in cells[:_MAX_ROWS])
    if len(cells) > _MAX_ROWS:
        yield f"| {len(cells) - _MAX_ROWS:,} more | | |"


def _strategy(recorded: Any) -> str | None:
    """The name of a recorded strategy's preset, or of its importance and selection: letters, digits, dashes."""
    parts = map(recorded.get, ("importance", "selection")) if isinstance(recorded, dict) else [{"name": recorded}]
    known = [part for part in parts if isinstance(part, dict) and isinstance(part.get("name"), str)]
    name = "-".join("largest" if part.get("largest") else part["name"] for part in known)  # PaFi's are the smallest
    return re.sub(r"[^A-Za-z0-9]+", "-", _PRESETS.get(name, name)).strip("-").lower()[:_MAX_TEXT] or None


def _text(value: Any) -> str:
    """A value as one line of bounded length, without a character that Markdown or HTML interprets."""
    if value is None:
        return "not recorded"
    value = ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else value
    line = " ".join((f"{value:,}" if isinstance(value, int) else str(value)).split())
    line = line if len(line) <= _MAX_TEXT else f"{line[: _MAX_TEXT - 1]}…"
    return "".join(c if (c.isalnum() or c in " .,-_/…") else f"&#{ord(c)};" for c in line)
