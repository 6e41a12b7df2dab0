"""Training steps of several methods side by side: memory, initialisation, update and step, and their ratios.

    python examples/benchmarks/step.py --rounds 3 --methods floor,full,lora,static,id3

Each method runs in a process of its own, in interleaved rounds. Options are checked before anything starts.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from common import check_names, run
from rich.console import Console
from safetensors.torch import save_file
from step_bench.methods import METHODS
from step_bench.models import SHAPES, find_texts, make_rows
from step_bench.report import headline, make_table, plot
from step_bench.run import OUT_OF_MEMORY, Measurement, measure, to_json
from step_bench.settings import MOST_STEPS, Settings

from sparsify import SparsifyError
from sparsify.cli.demo import default_model
from sparsify.common.extras import require

TABLE_WIDTH = 124  # columns of text: a narrower terminal wraps lines instead of cutting figures off


def main(
    shape: Annotated[
        str, typer.Option("--shape", "--shapes", help=f"Model shapes, comma-separated: {', '.join(SHAPES)}.")
    ] = "bert-base",
    methods: Annotated[
        str, typer.Option(help=f"Comma-separated: {', '.join(METHODS)}.")
    ] = "floor,full,lora,static,id3",
    budget: Annotated[
        str, typer.Option("--budget", "--budgets", help="Entries; several, comma-separated. By default "
                          f"{SHAPES['bert-base'].budget}, or {SHAPES['tiny'].budget} of tiny.")
    ] = "",
    layers: Annotated[
        str, typer.Option(help="Layers of a model with random weights; several, comma-separated. 0: as published.")
    ] = "0",
    fill: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the budget that ID3 has unmasked before measuring.")
    ] = 0.5,
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 8,
    seq: Annotated[int, typer.Option(min=1, help="Tokens a sequence.")] = 128,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the weights.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, or one GPU such as cuda:1.")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each method, each in a new process.")] = 5,
    steps: Annotated[int, typer.Option(min=1, max=MOST_STEPS, help="Training steps a turn.")] = 2,
    json: Annotated[Path | None, typer.Option(help="Also write the raw measurements here.")] = None,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="Also draw them: a PNG.")] = None,
) -> None:  # fmt: skip
    """Measure training steps side by side: memory, initialisation, update and step, and their ratios."""
    names, shapes = _listed(methods), _listed(shape)
    budgets = _numbers(budget, "--budget", 1) if budget else []
    depths = _numbers(layers, "--layers", 0)
    _check(names, shapes, device, depths)
    if plot_to is not None:
        require("matplotlib", extra="plot")
    console, results = Console(), list[Measurement]()
    console.width = max(console.width, TABLE_WIDTH)
    for one_shape in shapes:
        kind, texts = find_texts() if SHAPES[one_shape].real else ("", [])
        with console.status("starting") as status, tempfile.TemporaryDirectory(prefix="sparsify-bench-") as folder:
            points = [
                [Settings(name, one_shape, entries, fill, batch, seq, dtype, device, depth, kind, folder)
                 for name in names]
                for depth in depths
                for entries in budgets or [SHAPES[one_shape].budget]
            ]  # fmt: skip
            if texts:
                from transformers import AutoTokenizer

                rows = make_rows(texts, AutoTokenizer.from_pretrained(default_model()), seq)
                save_file(rows, points[0][0].tokens_file)
            found = measure([one for point in points for one in point], rounds, steps, status.update)
        for start in range(0, len(found), len(names)):
            point = found[start : start + len(names)]
            console.print(headline(point, rounds, steps))
            console.print(make_table(point))
        results += found
        if json is not None:
            json.write_text(to_json(results) + "\n")
    if plot_to is not None and any(one.updates for one in results):
        plot(results, plot_to)
    if failed := [f"{one.settings.method}: {one.failed}" for one in results if one.failed not in ("", OUT_OF_MEMORY)]:
        raise SparsifyError("; ".join(failed))


def _check(methods: list[str], shapes: list[str], device: str, depths: list[int]) -> None:
    kind = device.partition(":")[0]
    check_names(methods, METHODS, "method")
    check_names(shapes, SHAPES, "shape")
    check_names([kind], ["cpu", "cuda"], "device")
    if kind == "cuda" and not torch.cuda.is_available():
        raise SparsifyError(f"--device {device}: torch finds no GPU here; take --device cpu, or a torch with CUDA.")
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


if __name__ == "__main__":
    run(main)
