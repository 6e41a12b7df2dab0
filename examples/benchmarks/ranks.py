"""DDP on this machine's CPU, method by method: step time, memory of a rank, bytes that it sends.

    python examples/benchmarks/ranks.py --rounds 3 --steps 2

The methods take turns, each time with a new process for each rank. An all-reduce counts as on a ring.
"""

from __future__ import annotations

import importlib
import json as json_module
import statistics
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed.nn.functional  # before there is a group: its default arguments would keep it
import typer
from common import BERTS, MB, check_names, report, run, write_json
from step_bench.methods import LORA_RANK
from step_bench.models import make_batches
from step_bench.settings import PLANNED_STEPS, SEED, Settings
from step_bench.worker import fill, peak_bytes
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from sparsify import get_engine, sparsify

METHODS = ("full", "lora", "id3")
FILL_STEPS = 6


def main(
    shape: Annotated[str, typer.Option(help=f"Model shape, random weights: {', '.join(BERTS)}.")] = "minilm",
    methods: Annotated[str, typer.Option(help="Comma-separated; ratios are to the first.")] = ",".join(METHODS),
    ranks: Annotated[int, typer.Option(help="Processes of each method.")] = 2,
    budget: Annotated[int, typer.Option(help="Entries.")] = 38_000,
    fill: Annotated[float, typer.Option(help="Share of the budget unmasked before measuring.")] = 0.5,
    batch: Annotated[int, typer.Option(help="Sequences a step and rank.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens a sequence.")] = 128,
    rounds: Annotated[int, typer.Option(help="Turns of each method.")] = 5,
    steps: Annotated[int, typer.Option(help="Training steps a turn.")] = 2,
    threads: Annotated[int, typer.Option(help="Of each process.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Also write the raw measurements here.")] = None,
) -> None:
    """Measure DDP training on several ranks side by side: step time, memory of a rank, bytes it sends."""
    names = [name.strip() for name in methods.split(",")]
    check_names(names, METHODS, "method")
    check_names([shape], BERTS, "shape")
    settings = [Settings(name, shape, budget, fill, batch, seq) for name in names]
    results = measure(settings, ranks, rounds, steps, threads)
    medians = {name: statistics.median(result["seconds"]) for name, result in results.items()}
    report(
        f"{shape}, float32, {ranks} ranks with batch {batch} x {seq} each, budget {budget:,}: medians of "
        f"{rounds * steps} steps in {rounds} interleaved rounds",
        ["method", "trained", "step (s)", "ratio", "peak memory (MB)", "averaging (MB)", "choosing (MB)"],
        [
            (name, f"{result['trained']:,}", f"{medians[name]:.2f}", f"{medians[name] / medians[names[0]]:.2f}",
             f"{result['peak_bytes'] / MB:,.0f}",
             *(f"{result[key] / 1e6:,.3f}" for key in ("averaging_bytes", "choosing_bytes")))
            for name, result in results.items()
        ],
    )  # fmt: skip
    write_json(json, results, ranks=ranks, threads_of_a_rank=threads, **asdict(settings[0]))


def measure(methods: list[Settings], ranks: int, rounds: int, steps: int, threads: int) -> dict[str, dict[str, Any]]:
    """Numbers trained, seconds on the slowest rank, and the most of any rank's memory and bytes a step, by method."""
    results: dict[str, dict[str, Any]] = {one.method: {"seconds": []} for one in methods}
    for _ in range(rounds):
        for one in methods:
            with tempfile.TemporaryDirectory() as folder:
                multiprocessing.spawn(train, (ranks, one, steps, threads, folder), nprocs=ranks)
                answers = [json_module.loads(path.read_text()) for path in Path(folder).glob("*.json")]
            result = results[one.method]
            result["seconds"] += map(max, zip(*(answer.pop("seconds") for answer in answers), strict=True))
            result |= {key: max(answer[key] for answer in answers) for key in answers[0]}
    return results


class Averaged:
    """Counts what DDP averages, as it does so."""

    bytes = 0

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future:
        self.bytes += bucket.buffer().nbytes
        return allreduce_hook(dist.group.WORLD, bucket)


def prepare(settings: Settings, model: nn.Module) -> nn.Module:
    """The model that trains what the method trains."""
    if settings.method == "lora":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=LORA_RANK, target_modules="all-linear", task_type="SEQ_CLS"))
    if settings.method == "id3":
        sparsify(model, settings.budget, "id3", steps=PLANNED_STEPS)
    return model


def train(rank: int, ranks: int, settings: Settings, steps: int, threads: int, folder: str) -> None:
    """One turn of one rank, whose numbers go into a file of the folder."""
    torch.set_num_threads(threads)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=ranks, timeout=timedelta(hours=1))
    from transformers import BertConfig, BertForSequenceClassification

    if settings.method == "lora":
        importlib.import_module("peft")
    libraries = peak_bytes()
    torch.manual_seed(SEED)
    plain = BertForSequenceClassification(BertConfig(**BERTS[settings.shape])).train()
    batches = make_batches(settings, plain.config.vocab_size, seed=SEED + 1 + rank)
    model = prepare(settings, plain)
    parallel, averaged = DistributedDataParallel(model), Averaged()
    parallel.register_comm_hook(averaged, lambda state, bucket: state.average(bucket))
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step() -> None:
        parallel(**next(batches)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    sparse = settings.method == "id3"
    if sparse:
        fill(model, settings, step, FILL_STEPS)
    step()
    chosen_before = get_engine(model).ranks.bytes_sent if sparse else 0
    averaged.bytes, seconds = 0, []
    for _ in range(steps):
        dist.barrier()
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    chosen = get_engine(model).ranks.bytes_sent - chosen_before if sparse else 0
    numbers = {
        "trained": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "seconds": seconds,
        "peak_bytes": peak_bytes() - libraries,
        "averaging_bytes": 2 * averaged.bytes * (ranks - 1) // ranks // steps,  # an all-reduce on a ring
        "choosing_bytes": chosen // steps,
    }
    Path(folder, f"rank-{rank}.json").write_text(json_module.dumps(numbers))
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
