"""``sparsify bench``: its options, checked before anything starts, and the tables it ends with."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from sparsify.bench.methods import METHODS, check_installed
from sparsify.bench.plots import plot as draw
from sparsify.bench.room import fit_together, share_rounds
from sparsify.bench.run import Measurement, measure, steps_ahead, to_json
from sparsify.bench.settings import DTYPES, HEAPS, Settings
from sparsify.bench.shapes import SHAPES
from sparsify.bench.table import headline, make_table
from sparsify.bench.tokens import has_mrpc, prepare_tokens
from sparsify.common.extras import require
from sparsify.errors import SparsifyError

DATA = "SPARSIFY_DATA"
DEFAULT_METHODS = "floor,full,lora,static,id3"
TABLE_WIDTH = 124  # columns of text; figures that a narrow terminal would cut off are wrapped instead


def bench(
    shape: Annotated[
        str, typer.Option("--shape", "--shapes", help=f"Model shapes, comma-separated: {', '.join(SHAPES)}.")
    ] = "bert-base",
    methods: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(METHODS)}.")] = DEFAULT_METHODS,
    budget: Annotated[
        str, typer.Option("--budget", "--budgets", help="Entries; several, comma-separated, give curves. By default "
                          f"{SHAPES['bert-base'].budget}, or {SHAPES['tiny'].budget} of tiny.")
    ] = "",
    layers: Annotated[
        str, typer.Option(help="Layers of a model with random weights; several, comma-separated, give curves. "
                          "0: as published.")
    ] = "0",
    fill: Annotated[float, typer.Option(help="Share of the budget that ID3 has unmasked before measuring.")] = 0.5,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens a sequence.")] = 128,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, or one GPU such as cuda:1.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Turns of each method.")] = 5,
    steps: Annotated[int, typer.Option(help="Training steps a turn.")] = 2,
    threads: Annotated[int, typer.Option(help="Of each process; 0 for torch's default.")] = 0,
    heap: Annotated[
        str, typer.Option(help="What becomes of freed memory while times are taken: keep, or system (as glibc likes).")
    ] = "keep",
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Recompute activations in backward.")] = False,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="One process at a time, started anew at each turn; so they are "
                           "anyway where memory would not hold all of them.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help=f"Folder with mrpc/, for minilm; by default ${DATA}'s, or docstrings.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the raw measurements here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw them: a PNG.")] = None,
) -> None:  # fmt: skip
    """Measure training steps side by side: memory, initialisation, update and step, and their ratios."""
    names, shapes = _listed(methods), _listed(shape)
    given = _numbers(budget, "--budget", "10_000,100_000") if budget else []
    depths = _numbers(layers, "--layers", "3,6,12")
    _check(names, shapes, dtype, heap, device, rounds, steps)
    _check_depths(shapes, depths)
    if plot is not None:
        require("matplotlib", extra="plot")
    ahead = steps_ahead(names, rounds, steps)
    console, all_results = Console(), list[Measurement]()
    console.width = max(console.width, TABLE_WIDTH)
    for one_shape in shapes:
        budgets = given or [SHAPES[one_shape].budget]
        tokens, text = prepare_tokens(one_shape, seq, _find_data(data))
        common = Settings(
            names[0], one_shape, budgets[0], fill, batch, seq, dtype, threads, device, checkpointing, tokens, ahead,
            heap=heap,
        )  # fmt: skip
        points = [
            [replace(common, method=name, budget=entries, layers=depth) for name in names]
            for depth, entries in product(depths, budgets)
        ]
        for settings in share_rounds(points):
            together = not one_at_a_time and fit_together(settings)
            with console.status("starting") as status:
                results = measure(settings, rounds, steps, progress=status.update, together=together)
            for start in range(0, len(results), len(names)):
                _print(console, results[start : start + len(names)], rounds, steps, text)
            all_results += results
            if json is not None:
                json.write_text(to_json(all_results) + "\n")
    if plot is not None:
        draw(all_results, plot)


def _print(console: Console, results: list[Measurement], rounds: int, steps: int, text: str) -> None:
    console.print(headline(results, rounds, steps, text))
    console.print(make_table(results))
    for one in results:
        if one.work:
            console.print(f"{one.settings.method}, to choose in its last step: {one.work}")


def check_names(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raises ``SparsifyError`` for the first name that is not known, with those that are near."""
    known = list(known)
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=2, cutoff=0.5)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise SparsifyError(f"unknown {what} {name!r}; expected one of {', '.join(known)}.{hint}")


def _check(methods: list[str], shapes: list[str], dtype: str, heap: str, device: str, rounds: int, steps: int) -> None:
    check_names(methods, METHODS, "method")
    check_names(shapes, SHAPES, "shape")
    check_names([dtype], DTYPES, "dtype")
    check_names([heap], HEAPS, "heap")
    for name, number in (("--rounds", rounds), ("--steps", steps)):
        if number < 1:
            raise SparsifyError(f"{name} {number}; expected at least 1.")
    kind = device.partition(":")[0]
    check_names([kind], ["cpu", "cuda"], "device")
    if kind == "cuda" and not torch.cuda.is_available():
        raise SparsifyError(f"--device {device}: torch finds no GPU here; take --device cpu, or a torch with CUDA.")
    for method in methods:
        check_installed(method)


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def _numbers(text: str, option: str, example: str) -> list[int]:
    try:
        return [int(part) for part in _listed(text)]
    except ValueError:
        raise SparsifyError(f"{option} {text!r}; expected whole numbers, such as {example}.") from None


def _check_depths(shapes: list[str], depths: list[int]) -> None:
    pretrained = [shape for shape in shapes if SHAPES[shape].real]
    if any(depths) and pretrained:
        raise SparsifyError(
            f"--layers: {pretrained[0]!r} has pretrained weights and as many layers as these; leave out one of the two."
        )


def _find_data(data: Path | None) -> Path | None:
    if data is None and DATA in os.environ and has_mrpc(Path(os.environ[DATA])):
        return Path(os.environ[DATA])
    return data
