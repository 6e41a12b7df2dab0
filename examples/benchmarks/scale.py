"""A training step on many GPUs, on paper: what each method sends, and how long that takes. Nothing is measured.

    python examples/benchmarks/scale.py [--nics 1] [--every 8]

An estimate. What selection exchanges is counted by the library's own selector, on tensors without values and in a
process group that sends nothing. All else follows from sizes: on a ring of n GPUs each sends (n - 1) / n of what is
gathered or reduced to shares, twice that of what all get the sum of. Weights and full gradients have 2 bytes a number,
gradients of LoRA and of the flat delta 4. FSDP2 gathers the weights in forward and again in backward.

Rings send at 80 % of 450 GB/s within a machine of 8, or of 50 GB/s for each network card of a machine if that is less.
A message from host to host takes 25 us. The device takes what ``roofline.py`` says, on an H100. All that GPUs send is
taken to be hidden behind the computation, and no message of the hosts, which wait for these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from common import report, run
from roofline import MODELS, Model, attention, phases, seconds
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from sparsify.common.ranks import END, Ranks
from sparsify.core.entries import Entries
from sparsify.core.gradients import linear_gradient
from sparsify.core.importance import D3
from sparsify.core.policy import Policy
from sparsify.core.schedule import Schedule
from sparsify.core.step import TrainingStep
from sparsify.core.topk import TopK
from sparsify.masked.tensor import ModelTensor
from sparsify.selection.distributed import RanksSelector

LLAMA_8B = MODELS["Llama-8B, 1 x 4096"]
LLAMA_70B = LLAMA_8B._replace(
    blocks=80,
    hidden=8192,
    layers=[(8192, 8192, 160), (1024, 8192, 160), (28672, 8192, 160), (8192, 28672, 80), (128256, 8192, 1)],
)
SIZES = {"Llama-8B": LLAMA_8B, "Llama-70B": LLAMA_70B}
MACHINE = 8  # GPUs
LINK, CARD, REACHED = 450e9, 50e9, 0.8  # bytes a second between two GPUs and of a network card, and the share of it
MESSAGE = 25e-6  # seconds
STEPS, GPU, RANK = 1_000, "H100", 8
ENGINES, METHODS = ("DDP", "FSDP2"), ("full", "lora", "static", "id3")


class Counted(Ranks):
    """Exchanges that are counted, and in which all ranks have the same."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def _call(self, exchange: Any, *tensors: Any, **options: Any) -> Any:
        if exchange is distributed.isend:
            self.calls["host"] += 1
            self._message = tensors[0]
        elif exchange is distributed.recv:
            tensors[0].copy_(self._message)
        elif tensors:
            self.calls["device"] += 1
        for part in tensors[0] if exchange is distributed.all_gather else ():
            part.copy_(tensors[1])
        return SimpleNamespace(wait=lambda: None)


class NoTopK(TopK):
    """A top-k that finds nothing."""

    def offer(self, *args: Any) -> None:
        pass


@contextmanager
def group(ranks: int) -> Iterator[None]:
    """A process group of so many ranks, of which this is the only one."""
    distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def count_selection(model: Model, ranks: int, number: int, *, sharded: bool) -> Counted:
    """What a rank exchanges to select so many entries of all linear layers."""
    with torch.device("meta"):
        layers = [nn.Linear(cols, rows, bias=False) for rows, cols, count in model.layers for _ in range(count)]
    root, sizes = nn.ModuleList(layers), [layer.weight.numel() for layer in layers]
    entries = Entries(root, sizes)
    entries.register(number, torch.float32, torch.float32, torch.device("cpu"))
    tensors = [
        ModelTensor(place, layer, "weight", f"{place}.weight", entries.offsets[place])
        for place, layer in enumerate(layers)
    ]
    TrainingStep(tensors, entries, Policy(D3(), Schedule(), tensors, entries, number, STEPS))
    with group(ranks):
        counted = Counted()
        selector = RanksSelector(NoTopK(number, torch.float32, "cpu"), D3(), Counter(), True, counted, tensors)
        selector._can_wait = not sharded
        for tensor in reversed(tensors):
            rows, cols = tensor.shape
            x, grad_y = torch.empty(1, cols, device="meta"), torch.empty(1, rows, device="meta")
            selector.offer(tensor, linear_gradient(x, grad_y, False))
        counted.headers([END], (), [])
        selector.winners()
    return counted


def sent(method: str, engine: str, model: Model, ranks: int, budget: int) -> float:
    """Bytes that a GPU sends in a step that does not select."""
    weights = float(sum(rows * cols * count for rows, cols, count in model.layers))
    adapters = float(sum(RANK * (rows + cols) * count for rows, cols, count in model.layers))
    of_gradient = {"full": 2 * weights, "lora": 4 * adapters}.get(method, 4.0 * budget)
    is_reduced_to_shares = engine == "FSDP2" and method == "full"
    total = (1 if is_reduced_to_shares else 2) * of_gradient + (4 * weights if engine == "FSDP2" else 0)
    return total * (ranks - 1) / ranks


def step(model: Model, method: str, density: float, sends: float, rate: float) -> float:
    """Milliseconds of a step: of the device, or of the links if these take longer."""
    tokens = model.batch * model.length
    layers = [(count, phases(method, tokens, *shape, density, "bfloat16")) for *shape, count in model.layers]
    return 1e3 * max(seconds([*layers, (1, [attention(model, "bfloat16")])], GPU), sends / rate)


def main(
    density: Annotated[float, typer.Option(help="Share of the entries that is unmasked.")] = 0.001,
    batch: Annotated[int, typer.Option(help="Sequences of 4,096 tokens a GPU.")] = 1,
    every: Annotated[int, typer.Option(help="Steps from one that selects to the next.")] = 4,
    nics: Annotated[int, typer.Option(help="Network cards of 400 Gb/s a machine.")] = 8,
) -> None:
    """Print a table for each model."""
    for name, model in SIZES.items():
        rows, numbers = [], sum(height * cols * count for height, cols, count in model.layers)
        budget, model = int(density * numbers), model._replace(batch=batch)
        for ranks in (8, 64, 512):
            rate = REACHED * (LINK if ranks <= MACHINE else min(LINK, nics * CARD))
            for engine in ENGINES:
                chosen = count_selection(model, ranks, max(1, every * budget // STEPS), sharded=engine == "FSDP2")
                for method in METHODS:
                    plain = sent(method, engine, model, ranks, budget)
                    others = step(model, "static" if method == "id3" else method, density, plain, rate)
                    row = [str(ranks), engine, method, f"{plain / 1e9:,.2f}", f"{others:,.0f}"]
                    if method == "id3":
                        hosts = 1e3 * chosen.calls["host"] * MESSAGE
                        own = step(model, "id3", density, plain + chosen.bytes_sent, rate) + hosts
                        row += [f"{(plain + chosen.bytes_sent) / 1e9:,.1f}", f"{chosen.calls['device']}"]
                        row += [f"{chosen.calls['host']}", f"{hosts:,.0f}", f"{own:,.0f}"]
                        row += [f"{(own + (every - 1) * others) / every:,.0f}"]
                    rows.append(row)
        header = ["GPUs", "engine", "method", "GB sent", "ms", "GB, selecting", "exchanges", "messages", "their ms"]
        report(f"{name}: an estimate", [*header, "ms, selecting", f"ms, every={every}"], rows, left=(1, 2))


if __name__ == "__main__":
    run(main)
