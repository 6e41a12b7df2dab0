"""The model card of a delta: what it is, what it changes where, and how to load it.

In: a delta's parts. Out: the text of a ``README.md`` for the hub. The generated part of the body lies between two
comments, so that a later push replaces it and nothing that a person has written. Every name and value comes from a
file that may be a stranger's, and is written so that Markdown and HTML take it for text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sparsify.delta.entries import TensorDelta
from sparsify.delta.hub import is_repo_id

BEGIN = "<!-- sparsify: begin of the generated part, which the next push writes anew -->"
END = "<!-- sparsify: end of the generated part -->"
_METHODS = {  # importance and selection -> the preset's name
    ("d3", "increment"): "id3",
    ("d3", "repeat"): "d3-repeat",
    ("magnitude", "static"): "pafi",
    ("fisher", "static"): "fish",
    ("random", "static"): "random",
    ("bias", "static"): "bitfit",
    ("snip", "prune"): "sparseadapter",
}
_MAX_ROWS = 120
_MAX_TEXT = 120  # characters of one name
_BAR = 20  # characters of the longest bar
_LAYER = re.compile(r"^(.*?\.\d+)\.(.+)$")


def model_card(
    tensors: Mapping[str, TensorDelta],
    whole: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    repo_id: str = "user/name",
    file_bytes: int | None = None,
) -> str:
    """The card's text.

    Args:
        tensors: changed entries by tensor name.
        whole: tensors stored whole, by name.
        config: how the delta came about.
        repo_id: the repository that the card is for.
        file_bytes: size of the delta's file.

    Returns:
        Markdown, with the hub's metadata in front.

    Example:
        >>> "library_name: sparsify" in model_card({}, {}, {"strategy": None})
        True
    """
    from huggingface_hub import ModelCardData

    base = public_base(config)
    method = _method(config)
    data = ModelCardData(
        base_model=base,
        base_model_relation="adapter" if base else None,
        library_name="sparsify",
        tags=["sparsify", "sparse", "selective-fine-tuning", *([method] if method else [])],
    )
    parts = [
        BEGIN,
        f"# {_text(repo_id.rpartition('/')[2])}",
        _opening(tensors, whole, base),
        _facts(tensors, whole, config, base, file_bytes),
        _loading(base, repo_id),
        _table("Changed entries by layer", "layer", _entries_by(tensors, _layer)),
        _table("Changed entries by kind of tensor", "kind", _entries_by(tensors, _kind)),
        _stored_whole(whole),
        _CHECKS,
        END,
    ]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def update_card(present: str | None, generated: str) -> str:
    """The card to write where there may be one already.

    Args:
        present: the text that is there, or ``None``.
        generated: what :func:`model_card` made.

    Returns:
        ``generated`` where there is nothing. A card with a generated part gets the new one, and the new metadata
        beside what a person added; a card without one is a person's, and is returned as it is.
    """
    from huggingface_hub import ModelCard

    if present is None:
        return generated
    new = ModelCard(generated)
    start, end = present.find(BEGIN), present.find(END)
    if not 0 <= start < end:
        return present
    try:
        old = ModelCard(present)
    except Exception:  # whatever yaml says about metadata that a person has edited: it is theirs to repair
        return present
    tags = [*(old.data.get("tags") or []), *new.data.get("tags")]
    for key, value in {**new.data.to_dict(), "tags": list(dict.fromkeys(tags))}.items():
        old.data[key] = value
    start, end = old.text.find(BEGIN), old.text.find(END)
    fresh = new.text[new.text.find(BEGIN) : new.text.find(END)]
    old.text = old.text[:start] + fresh + old.text[end:]
    return str(old)


def public_base(config: Mapping[str, Any]) -> str | None:
    """The base's id on the hub; ``None`` where it is unknown, or a folder of the machine that trained.

    Example:
        >>> public_base({"base_model_name_or_path": "openai-community/gpt2"})
        'openai-community/gpt2'
        >>> public_base({"base_model_name_or_path": "/home/me/models/gpt2"}) is None
        True
    """
    name = config.get("base_model_name_or_path")
    return name if isinstance(name, str) and is_repo_id(name) and not Path(name).exists() else None


def public_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the path of a base on the machine that trained: it is of no use elsewhere, and private."""
    if public_base(config) is None:
        return {**config, "base_model_name_or_path": None, "base_model_revision": None}
    return dict(config)


def _opening(tensors: Mapping[str, TensorDelta], whole: Mapping[str, Tensor], base: str | None) -> str:
    entries = sum(tensor.count for tensor in tensors.values())
    of = f"[{_text(base)}](https://huggingface.co/{base})" if base else "a base model that is not on the hub"
    beside = f", and {len(whole):,} stored whole" if whole else ""
    return (
        f"A sparse fine-tuning of {of}: {entries:,} changed entries in {len(tensors):,} tensors{beside}. This "
        "repository holds the changes only; they go onto the base with "
        "[sparsify](https://pypi.org/project/sparsify-ft/)."
    )


def _facts(
    tensors: Mapping[str, TensorDelta],
    whole: Mapping[str, Tensor],
    config: Mapping[str, Any],
    base: str | None,
    file_bytes: int | None,
) -> str:
    entries = sum(tensor.count for tensor in tensors.values())
    numel = sum(_numel(tensor) for tensor in tensors.values())
    steps = _number(config.get("steps_done")) or _number(config.get("steps"))
    facts = {
        "base model": _text(base) if base else None,
        "base revision": _text(config.get("base_model_revision")) if base else None,
        "architecture": _text(config.get("architecture")),
        "strategy": _strategy(config),
        "budget": _number(config.get("budget")),
        "optimizer steps": steps,
        "changed entries": f"{entries:,}" + (f" ({entries / numel:.3%} of their tensors)" if numel else ""),
        "numbers stored whole": f"{sum(tensor.numel() for tensor in whole.values()):,}" if whole else None,
        "file": None if file_bytes is None else f"{file_bytes / 1e6:,.2f} MB",
        "made with": _versions(config),
    }
    return "| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in facts.items() if value)


def _loading(base: str | None, repo_id: str) -> str:
    source = f'"{base}"' if base else '"path/to/the/base"'
    repo = repo_id if is_repo_id(repo_id) else "user/name"
    return f"""## How to load it

```bash
pip install sparsify-ft
```

```python
from sparsify import load_model

model = load_model({source}, "{repo}")
```

or onto a base that is loaded already, and off it again, bit for bit:

```python
from sparsify import SparseDelta

delta = SparseDelta.load("{repo}")
delta.apply(model)
delta.revert(model)
```"""


_CHECKS = """## What is checked

The file is a safetensors file: loading it runs no code. For every tensor it holds a SHA-256 of the base's values at the
changed entries, so that a wrong base is an error that names the tensor, as long as the base is loaded in the dtype it
was trained in. All checks come before the first write."""


def _table(title: str, what: str, counts: Mapping[str, int]) -> str:
    """A row for each name, with a bar in proportion to the largest; nothing where there are no entries."""
    if not any(counts.values()):  # a drawn tensor may have none
        return ""
    total, largest = sum(counts.values()), max(counts.values())
    rows = [
        f"| {_text(name)} | {count:,} | {count / total:.1%} | {'█' * round(_BAR * count / largest)} |"
        for name, count in list(counts.items())[:_MAX_ROWS]
    ]
    if len(counts) > _MAX_ROWS:
        rows.append(f"| {len(counts) - _MAX_ROWS:,} more | {sum(list(counts.values())[_MAX_ROWS:]):,} | | |")
    return "\n".join([f"## {title}", "", f"| {what} | entries | share | |", "|---|---:|---:|---|", *rows])


def _stored_whole(whole: Mapping[str, Tensor]) -> str:
    if not whole:
        return ""
    rows = [f"| {_text(name)} | {_text(list(tensor.shape))} |" for name, tensor in list(whole.items())[:_MAX_ROWS]]
    if len(whole) > _MAX_ROWS:
        rows.append(f"| {len(whole) - _MAX_ROWS:,} more | |")
    return "\n".join(["## Tensors stored whole", "", "| tensor | shape |", "|---|---|", *rows])


def _entries_by(tensors: Mapping[str, TensorDelta], group: Callable[[str], str]) -> dict[str, int]:
    """Changed entries by group of tensors, layers in their order: layer.2 before layer.10."""
    counts: Counter[str] = Counter()
    for name, tensor in tensors.items():
        counts[group(name)] += tensor.count
    return dict(
        sorted(counts.items(), key=lambda item: [(len(p), p) if p.isdigit() else (0, p) for p in item[0].split(".")])
    )


def _layer(name: str) -> str:
    """``encoder.layer.3`` of a tensor within it; the module's name for a tensor outside all layers."""
    match = _LAYER.match(name)
    return match[1] if match else name.rpartition(".")[0] or name


def _kind(name: str) -> str:
    """The name within its layer, ``attention.self.query.weight``; the whole name outside all layers."""
    match = _LAYER.match(name)
    return re.sub(r"\.\d+\.", ".*.", match[2]) if match else name


def _numel(tensor: TensorDelta) -> int:
    size = 1
    for length in tensor.shape:
        size *= length
    return size


def _parts(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Importance and selection as recorded, each a dict with a name."""
    strategy = config.get("strategy")
    if not isinstance(strategy, dict):
        return None
    parts = tuple(part if isinstance(part, dict) else {} for part in map(strategy.get, ("importance", "selection")))
    return (parts[0], parts[1]) if isinstance(parts[1].get("name"), str) else None


def _method(config: Mapping[str, Any]) -> str | None:
    """A word for the strategy: the preset's name where it has one; a tag, so letters, digits and dashes only."""
    parts = _parts(config)
    if parts is None:
        name = config.get("strategy")
        words = [name] if isinstance(name, str) else []
    else:
        names = (str(parts[0].get("name") or ""), str(parts[1]["name"]))
        words = [_METHODS[names]] if names in _METHODS else list(filter(None, names))
    return re.sub(r"[^A-Za-z0-9]+", "-", "-".join(words)).strip("-").lower()[:_MAX_TEXT] or None


def _strategy(config: Mapping[str, Any]) -> str | None:
    """Name and settings: ``id3: d3 (exp 2, eps 1), increment``."""
    method, parts = _method(config), _parts(config)
    if parts is None:
        return method
    described = []
    for part in parts:
        settings = ", ".join(f"{key} {value}" for key, value in part.items() if key != "name")
        described.append(f"{part.get('name', '')}{f' ({settings})' if settings else ''}")
    return f"{method}: {_text(', '.join(filter(None, described)))}"


def _versions(config: Mapping[str, Any]) -> str | None:
    versions = config.get("versions")
    return (
        _text(", ".join(f"{name} {version}" for name, version in versions.items()))
        if isinstance(versions, dict)
        else None
    )


def _number(value: Any) -> str | None:
    return _text(f"{value:,}") if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _text(value: Any) -> str:
    """A value as text that neither Markdown nor HTML takes for anything else, on one line, of bounded length."""
    if value is None:
        return ""
    line = " ".join(str(value).split())
    line = line if len(line) <= _MAX_TEXT else f"{line[: _MAX_TEXT - 1]}…"
    return "".join(c if (c.isalnum() or c in " .,-_/…") else f"&#{ord(c)};" for c in line)
