"""One rank of one method under DDP: trains on request and reports times, memory and bytes.

stdin   one line (JSON): the settings, this rank, the number of ranks and a file to meet at; then a number of steps for
        each round
stdout  one JSON line when ready, then one a round: the seconds of each step, the peak memory so far, bytes a step
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from sparsify.api import get_unmasker, sparsify
from sparsify.bench.filling import fill
from sparsify.bench.memory import peak_bytes
from sparsify.bench.methods import LORA_RANK
from sparsify.bench.settings import Settings, errors_as_answers
from sparsify.bench.shapes import random_bert
from sparsify.bench.tokens import Batches

METHODS = ("full", "lora", "id3-exact", "id3-candidates")
FILL_STEPS = 6


class Averaged:
    """Counts what DDP averages, as it does so."""

    def __init__(self) -> None:
        self.bytes = 0

    def average(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """What DDP does with a bucket of gradients."""
        self.bytes += bucket.buffer().nbytes
        world: Any = dist.group.WORLD
        return allreduce_hook(world, bucket)


def prepare(settings: Settings, model: nn.Module) -> nn.Module:
    """The model that trains what the method trains."""
    if settings.method == "lora":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=LORA_RANK, target_modules="all-linear", task_type="SEQ_CLS"))
    if settings.method.startswith("id3"):
        sparsify(model, settings.budget, "id3", steps=FILL_STEPS, sync=settings.method.removeprefix("id3-"))
    return model


def make_step(model: nn.Module, batches: Batches) -> Callable[[], None]:
    """A function that does one whole training step."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=True)

    def step() -> None:
        model(**batches.next()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@errors_as_answers()
def main() -> None:
    task = json.loads(sys.stdin.readline())
    settings, ranks = Settings(**task["settings"]), task["ranks"]
    torch.set_num_threads(settings.threads or 1)
    dist.init_process_group(
        "gloo", init_method=f"file://{task['meeting']}", rank=task["rank"], world_size=ranks, timeout=timedelta(hours=1)
    )
    importlib.import_module("transformers.models.bert.modeling_bert")
    if settings.method == "lora":
        importlib.import_module("peft")
    libraries = peak_bytes()
    torch.manual_seed(settings.seed)
    plain = random_bert(settings.shape).train()
    batches = Batches(settings, plain, seed=settings.seed + 1 + task["rank"])
    model = prepare(settings, plain)
    parallel, averaged = DistributedDataParallel(model), Averaged()
    parallel.register_comm_hook(averaged, lambda state, bucket: state.average(bucket))
    torch.manual_seed(1 + task["rank"])
    step = make_step(parallel, batches)
    if settings.method.startswith("id3"):
        fill(model, settings, step, FILL_STEPS)
    step()
    exchanges = get_unmasker(model).ranks if settings.method.startswith("id3") else None
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    _say({"trained": trained, "library_bytes": libraries})
    for line in sys.stdin:
        seconds, chosen_before = [], exchanges.bytes_sent if exchanges is not None else 0
        averaged.bytes = 0
        for _ in range(int(line)):
            dist.barrier()
            started = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - started)
        chosen = exchanges.bytes_sent - chosen_before if exchanges is not None else 0
        _say(
            {
                "seconds": seconds,
                "peak_bytes": peak_bytes() - libraries,
                "averaging_bytes": 2 * averaged.bytes * (ranks - 1) // ranks // len(seconds),  # on a ring
                "choosing_bytes": chosen // len(seconds),
            }
        )


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
