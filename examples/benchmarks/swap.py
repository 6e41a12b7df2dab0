"""Time and memory of applying, reverting and swapping deltas, compared with PEFT's merge and unmerge of a LoRA.

    python examples/benchmarks/swap.py --rounds 7
    python examples/benchmarks/swap.py --shape llama-1b --dtype bfloat16 --rounds 3

All operations take turns in one process, on two equal models with random weights.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from common import MB, build, check_names, entries_of, report, run, write_json
from peft import LoraConfig, get_peft_model
from step_bench.settings import DTYPES
from step_bench.worker import status_bytes
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from sparsify import DeltaSwitch, SparseDelta

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 32_000,
}  # fmt: skip
SHAPES = {
    "bert-base": lambda: BertModel(BertConfig()),
    "llama-1b": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA_1B)),
    "tiny": lambda: BertModel(BertConfig(**TINY)),
}


def main(
    shape: Annotated[str, typer.Option(help=f"Model shape: {', '.join(SHAPES)}.")] = "bert-base",
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "float32",
    density: Annotated[float, typer.Option(help="Share of each weight matrix that a delta changes.")] = 0.001,
    rank: Annotated[int, typer.Option(help="Of LoRA, on all linear layers.")] = 8,
    rounds: Annotated[int, typer.Option(help="Turns of each operation.")] = 5,
    threads: Annotated[int, typer.Option(help="0 for torch's default.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write the raw measurements here.")] = None,
) -> None:
    """Measure apply, revert and swap of a sparse delta, and PEFT's merge and unmerge of LoRA."""
    check_names([shape], SHAPES, "shape")
    check_names([dtype], DTYPES, "dtype")
    if threads:
        torch.set_num_threads(threads)
    results = measure(shape, DTYPES[dtype], density, rank, rounds)
    medians = {name: statistics.median(result["seconds"]) for name, result in results.items()}
    lora = medians["LoRA merge"] + medians["LoRA unmerge"]
    report(
        f"{shape}, {dtype}, deltas of {density:.2%} of every matrix, LoRA of rank {rank} on all linear layers: medians "
        f"of {rounds} rounds in turns",
        ["operation", "time (ms)", "added (MB)", "LoRA merge and unmerge / this"],
        [
            (name, f"{1000 * seconds:,.1f}", f"{max(results[name]['bytes']) / MB:,.1f}", f"{lora / seconds:,.0f}")
            for name, seconds in medians.items()
        ],
    )
    write_json(json, results, shape=shape, dtype=dtype, density=density, rank=rank, rounds=rounds)


def measure(shape: str, dtype: torch.dtype, density: float, rank: int, rounds: int) -> dict[str, dict[str, list]]:
    """Seconds and added bytes of each operation, round by round."""
    plain = build(SHAPES[shape], dtype)
    first, second = (random_delta(plain, density, seed) for seed in (1, 2))
    switch = DeltaSwitch(plain)
    switch.attach("a", first)
    switch.attach("b", second)
    lora = get_peft_model(build(SHAPES[shape], dtype), LoraConfig(r=rank, target_modules="all-linear"))
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)  # zeros would merge nothing
    operations = {
        "apply": lambda: first.apply(plain),
        "swap": lambda: first.swap(plain, second),
        "revert": lambda: second.revert(plain),
        "activate": lambda: switch.activate("a"),
        "activate another": lambda: switch.activate("b"),
        "deactivate": switch.deactivate,
        "LoRA merge": lora.merge_adapter,
        "LoRA unmerge": lora.unmerge_adapter,
    }
    results = {name: {"seconds": [], "bytes": []} for name in operations}
    for _ in range(rounds):
        for name, operation in operations.items():
            gc.collect()
            with added_bytes(results[name]["bytes"]):
                started = time.perf_counter()
                operation()
                results[name]["seconds"].append(time.perf_counter() - started)
    return results


@contextlib.contextmanager
def added_bytes(found: list[int]) -> Iterator[None]:
    """Appends how far the block's largest resident set lies above the one before it; 0 if not on Linux."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        ctypes.CDLL(None).malloc_trim(0)  # memory that the C library keeps would not count
        clear.write_text("5")  # resets the peak, proc(5)
    before = status_bytes("VmRSS") if clear.exists() else 0
    yield
    found.append(max(0, status_bytes("VmHWM") - before) if clear.exists() else 0)


def random_delta(model: nn.Module, density: float, seed: int) -> SparseDelta:
    """Random entries of every weight matrix, each moved by one."""
    generator, parts = torch.Generator().manual_seed(seed), {}
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            indices = torch.randint(weight.numel(), (max(1, round(density * weight.numel())),), generator=generator)
            parts[name] = entries_of(weight, indices.unique(), lambda base: base + 1)
    return SparseDelta(parts)


if __name__ == "__main__":
    run(main)
