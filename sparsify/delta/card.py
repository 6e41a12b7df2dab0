"""The model card of a delta: ``card.md``, filled with what was trained and how to load it.

The generated part of a card lies between two comments. Names and values in it are escaped, since a file is not trusted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparsify.delta.entries import NamedTensors, TensorDeltas

_TEMPLATE = Path(__file__).with_name("card.md")
_GENERATED = re.compile("<!-- sparsify: begin of the generated part.*?end of the generated part -->", re.DOTALL)
_PRESETS = {"d3-increment": "id3", "magnitude-static": "pafi", "fisher-static": "fish", "random-static": "random",
            "bias-static": "bitfit", "snip-prune": "sparseadapter"}  # fmt: skip
_MAX_ROWS = 120
_MAX_TEXT = 120  # characters of one name
_LAYER = re.compile(r"^(.*?\.\d+)\.")


def model_card(
    tensors: TensorDeltas, whole: NamedTensors, config: Mapping[str, Any], *, repo_id: str, file_bytes: int
) -> str:
    """Fills the card's template, Markdown with the hub's metadata in front, from a delta with a public config."""
    from huggingface_hub import ModelCardData

    base, strategy = config.get("base_model_name_or_path"), _strategy(config.get("strategy"))
    tags = ["sparsify", "sparse", "selective-fine-tuning", *([strategy] if strategy else [])]
    relation = "adapter" if base else None
    data = ModelCardData(base_model=base, base_model_relation=relation, library_name="sparsify", tags=tags)
    entries = sum(tensor.count for tensor in tensors.values())
    numel = sum(math.prod(tensor.shape) for tensor in tensors.values())
    return _TEMPLATE.read_text(encoding="utf-8").format(
        metadata=data.to_yaml(),
        title=repo_id.rpartition("/")[2],
        base=f"[{_text(base)}](https://huggingface.co/{base})" if base else "a base model that is not on the hub",
        entries=entries,
        share=entries / max(numel, 1),
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
    names = [part.get("name") for part in parts if isinstance(part, dict)]
    name = "-".join(name for name in names if isinstance(name, str))
    return re.sub(r"[^A-Za-z0-9]+", "-", _PRESETS.get(name, name)).strip("-").lower()[:_MAX_TEXT] or None


def _text(value: Any) -> str:
    """A value as one line of bounded length, without a character that Markdown or HTML interprets."""
    if value is None:
        return "not recorded"
    if isinstance(value, dict):
        value = ", ".join(f"{key} {item}" for key, item in value.items())
    line = " ".join((f"{value:,}" if isinstance(value, int) else str(value)).split())
    line = line if len(line) <= _MAX_TEXT else f"{line[: _MAX_TEXT - 1]}…"
    return "".join(c if (c.isalnum() or c in " .,-_/…") else f"&#{ord(c)};" for c in line)
