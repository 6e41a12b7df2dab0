"""A training step on a GPU, on paper: operations, bytes and launches of each method. Nothing is measured.

    python examples/benchmarks/roofline.py [--dtype float32]

Counted are the linear layers, where nearly all of the time goes, at batch x length tokens; attention, norms and losses
cost every method the same and are left out. A phase takes the longer of its operations at 60 % of the data sheet's rate
and its bytes at 80 % of the memory's. The host takes 6 us a launch and runs ahead of the device, so a step takes the
longer of the two. Launches are those of forward and backward that a simulated CUDA device counts with small matrices,
and those that selection adds for matrices of the real size.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer
from common import report, run

RATES = {"bfloat16": 989e12, "float32": 67e12}  # operations a second, by an H100's data sheet, which is an H200's too
GPUS = {"H100": 3.35e12, "H200": 4.8e12}  # bytes a second
REACHED = 0.6, 0.8  # of these
LAUNCH = 6e-6  # seconds of the host
RANK = 8
Phase = tuple[float, float, float]  # operations, bytes, operations a second


class Model(NamedTuple):
    """A model's linear layers and its launches."""

    tokens: int  # in a batch
    layers: list[tuple[int, int, int]]  # of weights: rows, columns, and how many have this shape
    launches: dict[str, int]  # of a step, by method


MODELS = {
    "BERT-base, 32 x 128": Model(
        32 * 128,
        [(768, 768, 48), (3072, 768, 12), (768, 3072, 12)],
        {"floor": 530, "full": 681, "lora": 1267, "static": 558, "id3": 1151},
    ),
    "Llama-8B, 1 x 4096": Model(
        4096,
        [(4096, 4096, 64), (1024, 4096, 64), (14336, 4096, 64), (4096, 14336, 32), (128256, 4096, 1)],
        {"floor": 3870, "full": 4225, "lora": 6095, "static": 4422, "id3": 5216},
    ),
}


def phases(method: str, tokens: int, rows: int, cols: int, density: float, dtype: str) -> list[Phase]:
    """What one linear layer does in a step."""
    entry, rate = (2 if dtype == "bfloat16" else 4), RATES[dtype]
    weight, left, right = rows * cols, tokens * rows, tokens * cols
    product = (2.0 * tokens * weight, entry * float(weight + left + right), rate)
    step = [product, product]  # the output, and the input's gradient
    if method == "full":
        step += [product, (10.0 * weight, 7.0 * entry * weight, rate)]  # AdamW reads four numbers and writes three
    if method == "lora":  # two narrow products, a scaling and a sum; three times as much in backward, and PEFT's casts
        step += [
            (2.0 * tokens * RANK * (rows + cols), entry * float(right + left), rate),
            (left, 5.0 * entry * left, rate),
        ]
        step += [(4.0 * tokens * RANK * (rows + cols), entry * float(3 * left + 2 * right), rate)]
        step += [(right, 5.0 * entry * right, rate)]
    if method == "id3":  # the product, then one pass that scores it
        step += [product, (4.0 * weight, 2.0 * entry * weight, rate)]
    if method == "static":  # dot products over the tokens, of transposed factors
        step += [(0.0, 2.0 * entry * (left + right), rate)]
        step += [(2 * tokens * density * weight, 2 * entry * tokens * density * weight, rate)]
    return step


def seconds(layers: list[tuple[int, list[Phase]]], gpu: str) -> float:
    """What the device takes for the phases of layers that there are ``count`` of."""
    of_rate, of_bytes = REACHED
    return sum(
        count * max(work / (of_rate * rate), moved / (of_bytes * GPUS[gpu]))
        for count, layer in layers
        for work, moved, rate in layer
    )


def main(
    density: Annotated[float, typer.Option(help="Share of the entries that is unmasked.")] = 0.001,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32, without TF32.")] = "bfloat16",
) -> None:
    """Print a table for each model."""
    for name, model in MODELS.items():
        rows = []
        for method, launches in model.launches.items():
            layers = [(count, phases(method, model.tokens, *shape, density, dtype)) for *shape, count in model.layers]
            work, moved = (sum(count * phase[n] for count, layer in layers for phase in layer) for n in (0, 1))
            row = [
                method,
                f"{work / 1e12:,.2f}",
                f"{moved / 1e9:,.1f}",
                f"{launches:,}",
                f"{launches * LAUNCH * 1e3:.1f}",
            ]
            rows.append(row + [f"{1e3 * max(seconds(layers, gpu), launches * LAUNCH):.1f}" for gpu in GPUS])
        header = ["method", "TFLOP", "GB", "launches", "host ms", *(f"{gpu} ms" for gpu in GPUS)]
        report(f"{name}, {dtype}", header, rows)


if __name__ == "__main__":
    run(main)
