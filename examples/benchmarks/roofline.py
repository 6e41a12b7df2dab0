"""A training step on a GPU, on paper: operations, bytes and launches of each method. Nothing is measured.

    python examples/benchmarks/roofline.py

Counted are the linear layers, where nearly all of the time goes, in bfloat16 at batch x length tokens; attention, norms
and losses cost every method the same and are left out. A phase takes the longer of its operations at 60 % of the data
sheet's rate and its bytes at 80 % of the memory's. The host takes 6 us a launch and runs ahead of the device, so a step
takes the longer of the two. Launches are those of forward and backward that a simulated CUDA device counts with small
matrices, and those that selection adds for matrices of the real size.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer
from common import report, run

GPUS = {"H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12)}  # operations and bytes a second, by the data sheets
REACHED = 0.6, 0.8  # of these
LAUNCH = 6e-6  # seconds of the host
ENTRY = 2  # bytes of a bfloat16 number
RANK = 8


class Model(NamedTuple):
    """A model's linear layers and its launches."""

    tokens: int  # in a batch
    layers: list[tuple[int, int, int]]  # of weights: rows, columns, and how many have this shape
    launches: dict[str, int]  # of a step, by method


MODELS = {
    "BERT-base, 32 x 128": Model(
        32 * 128,
        [(768, 768, 48), (3072, 768, 12), (768, 3072, 12)],
        {"floor": 530, "full": 681, "lora": 1267, "static": 558, "id3": 1172},
    ),
    "Llama-8B, 1 x 4096": Model(
        4096,
        [(4096, 4096, 64), (1024, 4096, 64), (14336, 4096, 64), (4096, 14336, 32), (128256, 4096, 1)],
        {"floor": 3870, "full": 4225, "lora": 6095, "static": 4422, "id3": 5216},
    ),
}


def phases(method: str, tokens: int, rows: int, cols: int, density: float) -> list[tuple[float, float]]:
    """Operations and bytes of what one linear layer does in a step, phase by phase."""
    weight, left, right = rows * cols, tokens * rows, tokens * cols
    product = (2.0 * tokens * weight, ENTRY * (weight + left + right))
    step = [product, product]  # the output, and the input's gradient
    if method == "full":
        step += [product, (10.0 * weight, 7 * ENTRY * weight)]  # AdamW reads four numbers an entry and writes three
    if method == "lora":  # two narrow products, a scaling and a sum; three times as much in backward, and PEFT's casts
        step += [(2.0 * tokens * RANK * (rows + cols), ENTRY * (right + left)), (left, ENTRY * 5 * left)]
        step += [(4.0 * tokens * RANK * (rows + cols), ENTRY * (3 * left + 2 * right)), (right, ENTRY * 5 * right)]
    if method == "id3":  # the product, then one pass that scores it
        step += [product, (4.0 * weight, 2 * ENTRY * weight)]
    if method == "static":  # a dot product over the tokens for each entry, of transposed factors
        chosen = density * weight
        step += [(0.0, 2 * ENTRY * (left + right)), (2 * tokens * chosen, 2 * ENTRY * tokens * chosen)]
    return step


def seconds(layers: list[tuple[int, list[tuple[float, float]]]], gpu: str) -> float:
    """What the device takes for the phases of layers that there are ``count`` of."""
    rate, bandwidth = (share * limit for share, limit in zip(REACHED, GPUS[gpu], strict=True))
    return sum(count * max(work / rate, moved / bandwidth) for count, layer in layers for work, moved in layer)


def main(density: Annotated[float, typer.Option(help="Share of the entries that is unmasked.")] = 0.001) -> None:
    """Print a table for each model."""
    for name, model in MODELS.items():
        rows = []
        for method, launches in model.launches.items():
            layers = [(count, phases(method, model.tokens, *shape, density)) for *shape, count in model.layers]
            work, moved = (sum(count * phase[n] for count, layer in layers for phase in layer) for n in (0, 1))
            row = [
                method,
                f"{work / 1e12:,.2f}",
                f"{moved / 1e9:,.1f}",
                f"{launches:,}",
                f"{launches * LAUNCH * 1e3:.1f}",
            ]
            rows.append(row + [f"{1e3 * max(seconds(layers, gpu), launches * LAUNCH):.1f}" for gpu in GPUS])
        report(name, ["method", "TFLOP", "GB", "launches", "host ms", *(f"{gpu} ms" for gpu in GPUS)], rows)


if __name__ == "__main__":
    run(main)
