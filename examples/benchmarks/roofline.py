"""A training step on a GPU, on paper: operations, bytes and launches of each method. Nothing is measured.

    python examples/benchmarks/roofline.py [--dtype float32]

An estimate. Counted are the linear layers and attention, where nearly all of the time goes, at batch x length tokens;
norms and losses cost every method the same and are left out. A phase takes the longer of its operations at 60 % of the
data sheet's rate and its bytes at 80 % of the memory's. The host takes 6 us a launch, with Python's time on top, and
runs ahead of the device, so a step takes the longer of the two. Launches are those that a simulated CUDA
device counts with narrow matrices, which are looked at as wide ones are: BERT's a layer at once, Llama's one by one
(the slow test in ``tests/behaviour/test_cuda.py``). Python's time is what ``overhead.py`` measures a layer, which
contains the arithmetic of a tiny model on a CPU.

PEFT's LoRA has float32 adapters on a bfloat16 base by default ("lora"): it casts each layer's input and output, and its
products run without bfloat16's units. "lora-short" has them in bfloat16 (``autocast_adapter_dtype=False``).
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
# seconds a layer, in the ratios of overhead.py --as-on-a-gpu
PYTHON = {"floor": 0.9e-3, "full": 0.9e-3, "lora": 2.0e-3, "static": 1.72e-3, "id3": 1.92e-3}
METHODS = ("floor", "full", "lora", "lora-short", "static", "id3")
Phase = tuple[float, float, float]  # operations, bytes, operations a second


class Model(NamedTuple):
    """A model's linear layers and its launches."""

    batch: int
    length: int
    blocks: int
    hidden: int
    causal: bool
    layers: list[tuple[int, int, int]]  # of weights: rows, columns, and how many have this shape
    launches: dict[str, int]  # of a step, by method


MODELS = {
    "BERT-base, 32 x 128": Model(
        32,
        128,
        12,
        768,
        False,
        [(768, 768, 48), (3072, 768, 12), (768, 3072, 12)],
        {"floor": 530, "full": 681, "lora": 1267, "static": 560, "id3": 919},
    ),
    "Llama-8B, 1 x 4096": Model(
        1,
        4096,
        32,
        4096,
        True,
        [(4096, 4096, 64), (1024, 4096, 64), (14336, 4096, 64), (4096, 14336, 32), (128256, 4096, 1)],
        {"floor": 3870, "full": 4225, "lora": 6095, "static": 4467, "id3": 5114},
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
    if method == "lora":
        step += lora(tokens, rows, cols, entry, 4)
    if method == "lora-short":
        step += lora(tokens, rows, cols, entry, entry)
    if method == "id3":  # the product, then one pass that scores it
        step += [product, (4.0 * weight, 2.0 * entry * weight, rate)]
    if method == "static" and dtype == "bfloat16":  # with matrix units the whole product takes less than its entries
        step += [product]
    elif method == "static":  # dot products over the tokens, of transposed factors
        step += [(0.0, 2.0 * entry * (left + right), rate)]
        step += [(2 * tokens * density * weight, 2 * entry * tokens * density * weight, rate)]
    return step


def lora(tokens: int, rows: int, cols: int, entry: int, own: int) -> list[Phase]:
    """What LoRA adds to a layer of ``entry`` bytes a number, with adapters of ``own``: two narrow products and back."""
    left, right, rate = tokens * rows, tokens * cols, RATES["bfloat16" if own == 2 else "float32"]
    cast = (entry + own) * float(own != entry)  # bytes of a number that is cast
    narrow = 2.0 * tokens * RANK * (rows + cols)
    forward = [
        (narrow, own * float(left + right), rate),
        (0.0, 2.0 * own * left, rate),  # the scaling
        (0.0, (entry + 2.0 * own) * left, rate),  # the sum
        (0.0, cast * float(left + right), rate),
    ]
    backward = [
        (2 * narrow, own * float(2 * left + 2 * right), rate),
        (0.0, 2.0 * own * left, rate),
        (0.0, 3.0 * entry * right, rate),  # the input's gradient
        (0.0, cast * float(left + right), rate),
    ]
    return forward + backward


def attention(model: Model, dtype: str) -> Phase:
    """All products of queries, keys and values, forward and, at two and a half times as much, backward; fused."""
    work = 3.5 * 4.0 * model.batch * model.length**2 * model.hidden * model.blocks / (2 if model.causal else 1)
    moved = 3 * 4 * (2 if dtype == "bfloat16" else 4) * model.batch * model.length * model.hidden * model.blocks
    return work, float(moved), RATES[dtype]


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
        rows, tokens = [], model.batch * model.length
        for method in METHODS:
            counted = method.removesuffix("-short")
            launches = model.launches[counted]
            layers = [(count, phases(method, tokens, *shape, density, dtype)) for *shape, count in model.layers]
            layers.append((1, [attention(model, dtype)]))
            work, moved = (sum(count * phase[n] for count, layer in layers for phase in layer) for n in (0, 1))
            host = launches * LAUNCH + model.blocks * PYTHON[counted]
            row = [method, f"{work / 1e12:,.2f}", f"{moved / 1e9:,.1f}", f"{launches:,}", f"{1e3 * host:.1f}"]
            rows.append(row + [f"{1e3 * max(seconds(layers, gpu), host):.1f}" for gpu in GPUS])
        header = ["method", "TFLOP", "GB", "launches", "host ms", *(f"{gpu} ms" for gpu in GPUS)]
        report(f"{name}, {dtype}: an estimate", header, rows)


if __name__ == "__main__":
    run(main)
