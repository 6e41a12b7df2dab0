"""``sparsify bench-swap``: how long it takes to change what a model does, beside PEFT's merging of LoRA.

In: a model shape. Out: seconds and added memory of putting a sparse delta on, taking it off and swapping two, and of
merging and unmerging a LoRA adapter on every linear layer of an equal model, in turns within one process.
"""

from __future__ import annotations

import gc
import json as json_module
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from sparsify.bench.memory import added_bytes
from sparsify.bench.run import conditions
from sparsify.bench.settings import DTYPES
from sparsify.common.raw_bits import digest
from sparsify.delta.entries import TensorDelta
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.delta.switch import DeltaSwitch
from sparsify.errors import SparsifyError

MB = 2**20
SHAPES = ("bert-base", "llama-1b", "tiny")
_NOISE = 1_000_003  # random numbers that are repeated over large tensors


@dataclass
class Operation:
    """What one operation took, round by round."""

    name: str
    seconds: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def bench_swap(
    shape: Annotated[str, typer.Option(help=f"Model shape: {', '.join(SHAPES)}.")] = "bert-base",
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "float32",
    density: Annotated[float, typer.Option(help="Share of each weight matrix that a delta changes.")] = 0.001,
    rank: Annotated[int, typer.Option(help="Of LoRA, on all linear layers.")] = 8,
    rounds: Annotated[int, typer.Option(help="Turns of each operation.")] = 5,
    threads: Annotated[int, typer.Option(help="0 for torch's default.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write the raw measurements here.")] = None,
) -> None:
    """Measure apply, revert and swap of a sparse delta beside PEFT's merge and unmerge of LoRA."""
    if shape not in SHAPES:
        raise SparsifyError(f"unknown shape {shape!r}; expected one of {', '.join(SHAPES)}.")
    if dtype not in DTYPES:
        raise SparsifyError(f"unknown dtype {dtype!r}; expected one of {', '.join(DTYPES)}.")
    if threads:
        torch.set_num_threads(threads)
    console = Console()
    with console.status("building two models"):
        operations = measure(shape, DTYPES[dtype], density, rank, rounds)
    entries = f"deltas of {density:.2%} of every matrix, LoRA of rank {rank} on all linear layers"
    console.print(f"{shape}, {dtype}, {entries}: medians of {rounds} rounds in turns")
    console.print(make_table(operations))
    if json is not None:
        rows = [asdict(operation) for operation in operations]
        settings = {"shape": shape, "dtype": dtype, "density": density, "rank": rank, "rounds": rounds}
        json.write_text(json_module.dumps({"conditions": conditions(), **settings, "results": rows}, indent=2) + "\n")


def measure(shape: str, dtype: torch.dtype, density: float, rank: int, rounds: int) -> list[Operation]:
    """Measures all operations in interleaved rounds.

    Args:
        shape: one of ``SHAPES``.
        dtype: of the weights.
        density: share of each weight matrix that a delta changes.
        rank: of LoRA.
        rounds: turns of each operation.
    """
    from peft import LoraConfig, get_peft_model

    plain = build(shape, dtype)
    deltas = [random_delta(plain, density, seed) for seed in (1, 2)]
    switch = DeltaSwitch(plain)
    for name, delta in zip("ab", deltas, strict=True):
        switch.attach(name, delta)
    lora = get_peft_model(build(shape, dtype), LoraConfig(r=rank, target_modules="all-linear"))
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)  # of zeros nothing would be merged

    steps: list[tuple[str, Callable[[], object]]] = [
        ("apply", lambda: deltas[0].apply(plain)),
        ("swap", lambda: deltas[0].swap(plain, deltas[1])),
        ("revert", lambda: deltas[1].revert(plain)),
        ("activate", lambda: switch.activate("a")),
        ("activate another", lambda: switch.activate("b")),
        ("deactivate", switch.deactivate),
        ("LoRA merge", lora.merge_adapter),
        ("LoRA unmerge", lora.unmerge_adapter),
    ]
    operations = [Operation(name) for name, _ in steps]
    for _ in range(rounds):
        for operation, (_, run) in zip(operations, steps, strict=True):
            gc.collect()
            with added_bytes() as added:
                started = time.perf_counter()
                run()
                operation.seconds.append(time.perf_counter() - started)
            operation.bytes.append(added.bytes)
    return operations


def make_table(operations: list[Operation]) -> Table:
    """A row an operation; the last column is how many of it take as long as LoRA's merge and unmerge together."""
    table = Table()
    for column in ("operation", "time (ms)", "added (MB)", "LoRA / this"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    lora = sum(operation.median for operation in operations if operation.name.startswith("LoRA"))
    for operation in operations:
        ratio = "" if operation.name.startswith("LoRA") else f"{lora / operation.median:,.0f}"
        table.add_row(operation.name, f"{1000 * operation.median:,.1f}", f"{max(operation.bytes) / MB:,.1f}", ratio)
    return table


def build(shape: str, dtype: torch.dtype) -> nn.Module:
    """A model of the shape with random weights; the large ones repeat a million random numbers, which is quick."""
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        if shape == "llama-1b":
            config = LlamaConfig(
                hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                num_key_value_heads=4, vocab_size=32_000,
            )  # fmt: skip
            model: nn.Module = LlamaForCausalLM(config)
        else:
            tiny = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
            model = BertModel(BertConfig.from_dict(tiny if shape == "tiny" else {}))
    model.to(dtype).to_empty(device="cpu")
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            for start in range(0, parameter.numel(), _NOISE):
                part = parameter.view(-1)[start : start + _NOISE]
                part.copy_(noise[: part.numel()])
    return model.eval()


def random_delta(model: nn.Module, density: float, seed: int) -> SparseDelta:
    """Random entries of every weight matrix, each moved by one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        count = max(1, round(density * parameter.numel()))
        indices = torch.randint(parameter.numel(), (count,), generator=generator).unique()
        base = parameter.detach().take(indices)
        tensors[name] = TensorDelta(indices, base + 1, tuple(parameter.shape), base.dtype, "replace", digest(base))
    return SparseDelta(tensors)
