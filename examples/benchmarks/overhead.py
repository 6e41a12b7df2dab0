"""Python's share of a training step: microseconds of a step of a model so small that its arithmetic takes next to none.

    python examples/benchmarks/overhead.py --layers 12 --steps 200
    python examples/benchmarks/overhead.py --as-on-a-gpu

Prints one line a method: frozen (gradients to the embeddings only), LoRA on all linear layers, a static strategy, and
ID3 while it selects in every step. All in one process, in turns; the median of the rounds, and that of the ratios to
LoRA in the same round. Beside them, how many functions of Python a step calls, which no other load on the machine
changes.

With ``--as-on-a-gpu`` the host does what it does for a GPU: each weight is looked at by itself, and the top-k is the
one that never waits. The launches of Triton's kernels are left out, those of torch's are next to none: what is left is
the host's time.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections import defaultdict
from typing import Annotated, Any

import torch
import typer
from transformers import BertConfig, BertForSequenceClassification

from sparsify import sparsify

WIDTH = 8  # at 32, ID3 looks at 150 000 entries
METHODS = ("frozen", "lora", "static", "id3")
_WON = itertools.count()


def take_the_gpus_way() -> None:
    """Has tensors on the CPU go through the library as a GPU's do, but for the launches of Triton's kernels."""
    from sparsify.core import devices
    from sparsify.kernels import sddmm, triton
    from sparsify.selection import device_topk, joined
    from sparsify.training import weights

    def cut(
        ids: Any, scores: Any, grads: Any, weights: Any, count: Any, _: Any, size: int, limit: int, *__: Any
    ) -> None:
        if limit == size:  # at the end of a pass: as if the next entries had won
            ids[:size] = torch.tensor(list(itertools.islice(_WON, size)))
            scores[:size] = grads[:size] = weights[:size] = 1
            count.fill_(size)

    launches = dict.fromkeys(("_scatter", "_sddmm", "_select"), lambda *arguments, **options: None)
    for name, run in (launches | {"_cut": lambda *arguments, **options: cut(*arguments)}).items():
        setattr(triton, name, defaultdict(lambda run=run: run))  # kernel[grid](...)
    devices.AHEAD = (*devices.AHEAD, "cpu")
    joined.LARGEST = 4 * WIDTH  # entries of the longest bias
    joined.LARGEST_AHEAD, joined.AT_ONCE = 4 * WIDTH**2, 16 * WIDTH**2  # all matrices of a layer, as of BERT-base
    for module in (sddmm, device_topk, weights):
        module.has_triton = lambda device: True  # type: ignore[attr-defined]


def make(method: str, layers: int, width: int, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=2
    )
    model = BertForSequenceClassification(config)
    if method == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("embeddings.word" in name)
    elif method == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=1, target_modules="all-linear"))
    else:
        model = sparsify(model, 2_000, {"static": "random"}.get(method, method), steps=steps)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3, foreach=True)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One training step."""
    optimizer.zero_grad()
    model(input_ids=torch.ones(2, 8, dtype=torch.long), labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()


def calls_of_a_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """How many functions of Python a step calls."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(count)
        try:
            step(model, optimizer)
        finally:
            sys.setprofile(None)
    return calls


def main(
    layers: Annotated[int, typer.Option(help="Of the BERT.")] = 12,
    width: Annotated[int, typer.Option(help="Of its hidden states.")] = WIDTH,
    steps: Annotated[int, typer.Option(help="In a round.")] = 100,
    rounds: Annotated[int, typer.Option(help="Whose median counts.")] = 5,
    as_on_a_gpu: Annotated[bool, typer.Option("--as-on-a-gpu", help="Host time of a GPU's step.")] = False,
) -> None:
    """Measures the methods."""
    torch.set_num_threads(1)
    if as_on_a_gpu:
        take_the_gpus_way()
    trained = {method: make(method, layers, width, (rounds + 1) * steps + 1) for method in METHODS}
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(rounds + 1):
        for method, (model, optimizer) in trained.items():
            start = time.perf_counter()
            for _ in range(steps):
                step(model, optimizer)
            seconds[method].append((time.perf_counter() - start) / steps)
    for method, found in seconds.items():
        calls = calls_of_a_step(*trained[method])
        ratio = statistics.median(own / lora for own, lora in zip(found[1:], seconds["lora"][1:], strict=True))
        print(f"{method:<8}{1e6 * statistics.median(found[1:]):>10,.0f} us a step{ratio:>8.2f}{calls:>10,} calls")


if __name__ == "__main__":
    typer.run(main)
