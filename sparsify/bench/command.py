"""``sparsify bench``: its options, checked before anything starts, and the tables it ends with."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console

from sparsify.bench.methods import METHODS, check_installed
from sparsify.bench.report import headline, make_table, plot
from sparsify.bench.run import Measurement, measure, steps_ahead, to_json
from sparsify.bench.settings import PLANNED_STEPS, Settings
from sparsify.bench.shapes import SHAPES
from sparsify.bench.tokens import DATA, find_texts, write_rows
from sparsify.common.extras import require
from sparsify.common.names import did_you_mean
from sparsify.errors import SparsifyError

TABLE_WIDTH = 124  # columns of text: a narrower terminal wraps lines instead of cutting figures off


def bench(
    shape: Annotated[
        str, typer.Option("--shape", "--shapes", help=f"Model shapes, comma-separated: {', '.join(SHAPES)}.")
    ] = "bert-base",
    methods: Annotated[
        str, typer.Option(help=f"Comma-separated: {', '.join(METHODS)}.")
    ] = "floor,full,lora,static,id3",
    budget: Annotated[
        str, typer.Option("--budget", "--budgets", help="Entries; several, comma-separated, give curves. By default "
                          f"{SHAPES['bert-base'].budget}, or {SHAPES['tiny'].budget} of tiny.")
    ] = "",
    layers: Annotated[
        str, typer.Option(help="Layers of a model with random weights; several, comma-separated, give curves. "
                          "0: as published.")
    ] = "0",
    fill: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the budget that ID3 has unmasked before measuring.")
    ] = 0.5,
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 8,
    seq: Annotated[int, typer.Option(min=1, help="Tokens a sequence.")] = 128,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the weights.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, or one GPU such as cuda:1.")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each method.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Training steps a turn.")] = 2,
    threads: Annotated[int, typer.Option(help="Of each process; 0 for torch's default.")] = 0,
    heap: Annotated[
        Literal["keep", "system"], typer.Option(help="Keep freed memory while times are taken, or let glibc decide.")
    ] = "keep",
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Recompute activations in backward.")] = False,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="One process at a time, started anew at each turn; the default "
                           "where memory does not hold all of them.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help=f"Folder with mrpc/, for minilm; by default ${DATA}'s, or docstrings.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the raw measurements here.")] = None,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="Also draw them: a PNG.")] = None,
) -> None:  # fmt: skip
    """Measure training steps side by side: memory, initialisation, update and step, and their ratios."""
    names, shapes = _listed(methods), _listed(shape)
    budgets = _numbers(budget, "--budget", 1) if budget else []
    depths = _numbers(layers, "--layers", 0)
    ahead = steps_ahead(names, rounds, steps)
    _check(names, shapes, device, depths, ahead)
    if plot_to is not None:
        require("matplotlib", extra="plot")
    console, results = Console(), list[Measurement]()
    console.width = max(console.width, TABLE_WIDTH)
    for one_shape in shapes:
        kind, texts = find_texts(data) if SHAPES[one_shape].real else ("", [])
        with console.status("starting") as status, tempfile.TemporaryDirectory(prefix="sparsify-bench-") as folder:
            common = Settings(
                names[0], one_shape, SHAPES[one_shape].budget, fill, batch, seq, dtype, threads, device, checkpointing,
                kind, ahead, heap=heap, folder=folder,
            )  # fmt: skip
            if texts:
                write_rows(common, texts)
            points = [
                [replace(common, method=name, budget=entries, layers=depth) for name in names]
                for depth in depths
                for entries in budgets or [common.budget]
            ]
            results += measure(points, rounds, steps, status.update, one_at_a_time=one_at_a_time)
        for point in range(len(results) - len(points) * len(names), len(results), len(names)):
            console.print(headline(results[point : point + len(names)], rounds, steps))
            console.print(make_table(results[point : point + len(names)]))
        if json is not None:
            json.write_text(to_json(results) + "\n")
    if plot_to is not None:
        plot(results, plot_to)


def check_names(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raises ``SparsifyError`` for the first unknown name, with those that are near."""
    known = list(known)
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise SparsifyError(f"unknown {what} {name!r}; expected one of {', '.join(known)}.{hint}")


def _check(methods: list[str], shapes: list[str], device: str, depths: list[int], ahead: int) -> None:
    kind = device.partition(":")[0]
    check_names(methods, METHODS, "method")
    check_names(shapes, SHAPES, "shape")
    check_names([kind], ["cpu", "cuda"], "device")
    if kind == "cuda" and not torch.cuda.is_available():
        raise SparsifyError(f"--device {device}: torch finds no GPU here; take --device cpu, or a torch with CUDA.")
    if ahead >= PLANNED_STEPS:
        raise SparsifyError(f"{ahead} steps to measure; a run has {PLANNED_STEPS}: take fewer rounds or steps a round.")
    for method in methods:
        check_installed(method)
    for shape in shapes:
        if any(depths) and SHAPES[shape].real:
            raise SparsifyError(
                f"--layers: {shape!r} has pretrained weights and their number of layers; leave one out."
            )


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def _numbers(text: str, option: str, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in _listed(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise SparsifyError(f"{option} {text!r}; expected whole numbers of at least {least}, comma-separated.")
    return numbers
