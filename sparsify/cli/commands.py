"""The command line's verbs for deltas, each around one method of :class:`sparsify.SparseDelta`."""

import json as json_module
from collections.abc import Iterator
from itertools import combinations, groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

from sparsify.analysis import TensorShare, shares
from sparsify.delta.algebra import DeltaSum, finite
from sparsify.delta.checkpoint.trained_state import is_training_checkpoint
from sparsify.delta.entries import StrPath, TensorDelta
from sparsify.delta.format import FILE_NAME, payload_hash, to_bytes
from sparsify.delta.hub import find_file
from sparsify.delta.overlap import overlap
from sparsify.delta.peft_files import read_adapter
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import BaseMismatchError, SparsifyError, printable

_SHOWN_OF_CONFIG = (
    "base_model_revision", "strategy", "budget", "schedule", "steps", "steps_done", "diff", "sum", "stages", "peft",
    "adapters", "versions",
)  # fmt: skip
Delta = Annotated[str, typer.Argument(help="A delta: its folder, file, or user/repo on the hub.")]
Base = Annotated[Path, typer.Option(help="Checkpoint of the base: a folder or, but for merge, a safetensors file.")]
Out = Annotated[Path, typer.Option(help="Folder to write to.")]


def info(delta: Delta, json: Annotated[bool, typer.Option("--json", help="For programs to read.")] = False) -> None:
    """Show the content of a delta: where its entries are, how it was trained, its size on disk.

    Example: sparsify info my-delta
    """
    loaded = SparseDelta.load(delta)
    file = _find_file(delta)
    size = file.stat().st_size if file else len(to_bytes(loaded.tensors, loaded.whole, loaded.config)[0])
    if json:
        payload = {"bytes": size, "payload_sha256": file and payload_hash(file)}
        print(json_module.dumps(_description(loaded) | payload, indent=2))
        return
    console = Console(highlight=False)
    for label, value in [*_facts(loaded, size), ("payload", _payload_text(file))]:
        console.print(Text.assemble((f"{label:<18}", "bold"), printable(value)))
    if rows := shares(loaded):
        console.print(_layer_table(rows))


def verify(delta: Delta, base: Base) -> None:
    """Check that a delta is intact, and that a checkpoint is the base it was trained on.

    Example: sparsify verify my-delta --base path/to/base
    """
    report = SparseDelta.load(delta).check(base)
    print(printable(report))
    print(f"payload: {_payload_text(_find_file(delta))}")
    if not report.verified:
        raise SparsifyError("not verified: the values of the base were not all compared with those of the training.")


def merge(delta: Delta, base: Base, out: Out) -> None:
    """Write an ordinary checkpoint, base and delta in one, shard by shard.

    Example: sparsify merge my-delta --base path/to/base --out merged
    """
    SparseDelta.load(delta).merge(base, out)
    print(f"wrote {out}")


def diff(
    base: Annotated[Path, typer.Argument(help="Checkpoint of the base.")],
    tuned: Annotated[Path, typer.Argument(help="Checkpoint of the fine-tuned model.")],
    out: Out,
    budget: Annotated[float | None, typer.Option(help="Keep so many entries, the most changed, or a share.")] = None,
) -> None:
    """Take a delta from two checkpoints: the entries in which the tuned one differs from the base.

    Example: sparsify diff base tuned --budget 100000 --out my-delta
    """
    check_out(out, base, tuned)
    delta = SparseDelta.diff(base, tuned, int(budget) if budget is not None and budget.is_integer() else budget)
    delta.save(out)
    kept, changed, share = (delta.config["diff"][key] for key in ("kept", "changed", "squared_share"))
    print(f"{kept:,} of {changed:,} changed entries kept, {share:.1%} of the squared change; wrote {out}")


def add(
    deltas: Annotated[list[str], typer.Argument(help="Two or more deltas of one base.")],
    base: Base,
    out: Out,
    weights: Annotated[str, typer.Option(help="A coefficient for each, comma-separated; 1 by default.")] = "",
    kind: Annotated[Literal["replace", "add"], typer.Option(help="Store new values, or differences.")] = "replace",
    entries_only: Annotated[bool, typer.Option("--entries-only", help="Without tensors stored whole (heads).")] = False,
) -> None:
    """Add deltas up, each times a weight, and say where they meet.

    Example: sparsify add mrpc cola --weights 1,0.5 --base base --out both
    """
    check_out(out, base, *deltas)
    loaded = [delta.entries_only() if entries_only else delta for delta in map(SparseDelta.load, deltas)]
    try:
        factors = [finite(float(part), "multiplied") for part in weights.split(",")] if weights else [1.0] * len(loaded)
    except ValueError:
        factors = []
    if len(factors) != len(loaded):
        expected = f"{len(loaded)} finite numbers, comma-separated: one for each delta."
        raise SparsifyError(f"--weights {weights!r}; expected {expected}")
    DeltaSum(tuple(zip(factors, loaded, strict=True))).save(out, base=base, kind=kind)
    for (name, first), (other, second) in combinations(zip(deltas, loaded, strict=True), 2):
        try:
            shared = overlap(first, second, base)
        except BaseMismatchError:  # the second is a later stage, on the base with the first one in it
            shared = overlap(first, second)
        print(*map(printable, f"{name} and {other}: {shared}".split("\n")), sep="\n")
    print(f"wrote {out}")


def push(
    delta: Delta,
    repo: Annotated[str, typer.Argument(help="user/repo; made if need be.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repo private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    base_model: Annotated[str | None, typer.Option(help="The base's id on the hub, to be named in the card.")] = None,
) -> None:
    """Publish a delta on the Hugging Face hub, with a model card.

    Example: sparsify push my-delta me/my-delta --private
    """
    loaded = SparseDelta.load(delta)
    if base_model is not None:
        loaded.config |= {"base_model_name_or_path": base_model, "base_model_revision": None}
    options: Any = {"private": private or None, "revision": revision, "create_pr": create_pr}
    commit = loaded.push_to_hub(repo, commit_message=message, **options)
    print(commit.pr_url or commit.commit_url)


def from_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder of the Trainer, or a file of weights.")],
    out: Out,
) -> None:
    """Take the delta out of a checkpoint of a run that was killed, or that still goes on.

    Example: sparsify from-checkpoint out/checkpoint-500 --out my-delta
    """
    check_out(out, checkpoint)
    delta = SparseDelta.from_checkpoint(checkpoint)
    delta.save(out)
    print(f"{delta.num_entries:,} entries after {delta.config['steps_done']:,} steps; wrote {out}")


def check_out(out: Path, *inputs: StrPath) -> None:
    to = {out.resolve(), (out if out.suffix == ".safetensors" else out / FILE_NAME).resolve()}
    for given in map(Path, inputs):
        if to & {given.resolve(), (given / FILE_NAME).resolve()}:
            raise SparsifyError(f"--out {out} is also an input, which is left as it is: give another path to write to.")


def _find_file(delta: str) -> Path | None:
    """A delta's own file; ``None`` for what has it inside: a checkpoint in training, or an adapter of PEFT."""
    is_inside = is_training_checkpoint(delta) or read_adapter(delta) is not None
    return None if is_inside and not Path(delta, FILE_NAME).exists() else find_file(delta)


def _payload_text(file: Path | None) -> str:
    """Whether the values and indices of a file that was loaded are those that were written."""
    if file is None:
        return "of a checkpoint or an adapter, which has no hash of it; SparseDelta.save() makes a delta's file of it"
    return f"as it was written (SHA-256 {payload_hash(file)})"


def _description(delta: SparseDelta) -> dict[str, Any]:
    def typed(one: Tensor | TensorDelta) -> dict[str, Any]:
        return {"shape": list(one.shape), "dtype": str(one.dtype).removeprefix("torch.")}

    def described(part: TensorDelta) -> dict[str, Any]:
        return typed(part) | {"kind": part.kind, "quantization": part.quantization, "entries": part.count}

    return {
        "entries": delta.num_entries,
        "entries_in_whole": delta.entries_in_whole,
        "tensors": {name: described(part) for name, part in delta.tensors.items()},
        "whole": {name: typed(tensor) for name, tensor in delta.whole.items()},
        "config": delta.config,
    }


def _facts(delta: SparseDelta, size: int) -> Iterator[tuple[str, str]]:
    in_whole, known = delta.entries_in_whole, sum(row.size for row in shares(delta))
    share = f" ({delta.num_entries / known:.3%} of these)" if known else ""
    counts = [f"{delta.num_entries:,} in {len(delta.tensors)} tensors{share}"] if delta.tensors or not in_whole else []
    yield "entries", ", ".join(counts + [f"{in_whole:,} trained in tensors stored whole"] * (in_whole > 0))
    if delta.whole:
        yield "stored whole", ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in delta.whole.items())
    num_entries = delta.num_entries + in_whole
    yield "bytes", f"{size:,}" + (f", {size / num_entries:.2f} an entry, all included" if num_entries else "")
    kinds = {(part.kind, str(part.dtype), part.quantization or "") for part in delta.tensors.values()}
    yield "kinds", ", ".join(f"{kind} ({', '.join(filter(None, of))})" for kind, *of in sorted(kinds)) or "none"
    yield "base", str(delta.config.get("base_model_name_or_path") or "not recorded")
    for key in _SHOWN_OF_CONFIG:
        if (value := delta.config.get(key)) is not None:
            yield key.replace("_", " "), json_module.dumps(value)


def _layer_table(rows: list[TensorShare]) -> Table:
    """A row per layer with a bar: its entries, and their share of the tensors that have any."""
    ordered = sorted(rows, key=lambda row: -1 if row.layer is None else row.layer)
    by_layer = {layer: list(own) for layer, own in groupby(ordered, key=lambda row: row.layer)}
    most = max(sum(row.unmasked for row in own) for own in by_layer.values())
    table = Table(*(Column(name, justify="right") for name in ("layer", "entries", "share")), "most in", "")
    for layer, own in by_layer.items():
        entries, fullest = sum(row.unmasked for row in own), max(own, key=lambda row: row.unmasked)
        share, bar = entries / sum(row.size for row in own), "█" * max(1, round(20 * entries / most))
        most_in = Text(f"{printable(fullest.kind)} ({fullest.unmasked:,})")
        table.add_row("-" if layer is None else str(layer), f"{entries:,}", f"{share:.3%}", most_in, bar)
    return table
