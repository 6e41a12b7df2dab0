"""Why some entries bear larger rates than others: where a rule puts them, and how the loss bends along a first step.

    python -m examples.paper.curvature --model GEMMA --out examples/figures/curvature.svg

Adam's first step moves each trained number by the rate r against the sign s of its gradient g, and along this step

    loss(r) = loss(0) - slope r + curvature r^2 / 2 + ...        slope = sum of abs(g)        curvature = s^T H s

so that the loss falls up to r = 2 slope / curvature, if it is quadratic. Slope and entries come from the gradient of a
calibration at the pretrained weights, the losses from the same rows, the curvature from a central difference at the
rate where the loss fell most. Of a LoRA of rank 1 the first step moves B alone. The model, its rows and the rules are
those of ``examples.paper.language``, in float32. Needs the extras ``paper`` and ``plot``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from examples.figures.look import INK, save
from examples.paper import language, rules
from examples.paper.rules import Entries, Tensors, capped
from examples.paper.tables import markdown

RULES = ("gradient", "column-8", "floor-1", "mixed-25", "square-4", "random")
OTHERS = ("lora-1", "full")
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
FULLEST = 0.01  # share of the columns, and of the rows, whose entries are counted


class Curve(NamedTuple):
    """What was found of one rule."""

    trained: int
    columns: list[int]  # entries of each column of each tensor, the fullest first; of a LoRA and all weights: none
    rows: list[int]
    slope: float
    start: float  # the loss at the pretrained weights
    losses: list[float]  # at RATES
    curvature: float


def entries_of(rule: str, gradients: Tensors, budget: int, seed: int) -> Entries:
    """The flat indices of each tensor's entries."""
    if rule == "gradient":
        return capped(gradients, budget)
    if rule == "random":
        return rules.mixed(gradients, budget, 0, seed)
    moments = rules.Moments(gradients, consistency={})  # which no rule here looks at
    return rules.RULES[rule](moments, budget, seed)


def step_of(rule: str, gradients: Tensors, entries: Entries | None) -> tuple[Tensors, float, int]:
    """Adam's first step at rate 1, of every weight; the slope along it; and the numbers that it moves."""
    step, slope, moved = {}, 0.0, 0
    for name, gradient in gradients.items():
        sign = gradient.sign()
        if rule == "lora-1":  # y = W x + B A x, with A as PEFT starts it, and B zero
            a = nn.init.kaiming_uniform_(torch.empty(1, gradient.shape[1]), a=5**0.5).to(gradient.device)
            of_b = gradient @ a.t()
            step[name], parts = -of_b.sign() @ a, of_b
        elif entries is None:
            step[name], parts = -sign, gradient
        else:
            own = entries.get(name, torch.empty(0, dtype=torch.int64)).to(gradient.device)
            step[name], parts = torch.zeros_like(gradient), gradient.take(own)
            step[name].view(-1)[own] = -sign.take(own)
        slope, moved = slope + float(parts.abs().sum()), moved + parts.numel()
    return step, slope, moved


def counts(entries: Entries, gradients: Tensors) -> tuple[list[int], list[int]]:
    """How many entries each column and each row has, of all tensors, the fullest first."""
    columns, rows = [], []
    for name, gradient in gradients.items():
        own, (height, width) = entries.get(name, torch.empty(0, dtype=torch.int64)), gradient.shape
        columns += (own % width).bincount(minlength=width).tolist()
        rows += (own // width).bincount(minlength=height).tolist()
    return sorted(columns, reverse=True), sorted(rows, reverse=True)


def measure(rule: str, gradients: Tensors, budget: int, seed: int, loss_at: Callable[[Tensors, float], float]) -> Curve:
    """Follows a rule's first step at each rate."""
    torch.manual_seed(seed)
    entries = None if rule in OTHERS else entries_of(rule, gradients, budget, seed)
    step, slope, moved = step_of(rule, gradients, entries)
    start, losses = loss_at(step, 0.0), [loss_at(step, rate) for rate in RATES]
    best = min(range(len(RATES)), key=losses.__getitem__)
    curvature = (losses[best] + loss_at(step, -RATES[best]) - 2 * start) / RATES[best] ** 2
    lines = ([], []) if entries is None else counts(entries, gradients)
    return Curve(moved, *lines, slope, start, losses, curvature)


def losses_along(model: nn.Module, batches: Sequence[language.Batch]) -> Callable[[Tensors, float], float]:
    """A function: the mean loss of some batches once the weights have moved along a step at a rate."""
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def loss_at(step: Tensors, rate: float) -> float:
        for name, direction in step.items():
            model.get_parameter(name).copy_(base[name]).add_(direction, alpha=rate)
        return statistics.mean(float(language.answer_loss(model, batch, torch.float32)) for batch in batches)

    return loss_at


def table(curves: dict[str, Curve]) -> str:
    """A row for each rule."""
    found = []
    for rule, curve in curves.items():
        shares = [f"{100 * share(lines):.0f} %" if lines else "" for lines in (curve.columns, curve.rows)]
        best = min(zip(curve.losses, RATES, strict=True))
        predicted = f"{2 * curve.slope / curve.curvature:.0e}" if curve.curvature > 0 else "none"
        found.append([rule, f"{curve.trained:,}", *shares, f"{curve.slope:.0f}", f"{curve.curvature:.1e}", predicted,
                      f"{best[1]:g}", f"{best[0]:.3f}"])  # fmt: skip
    header = ["first step of", "numbers", "in 1 % of the columns", "in 1 % of the rows", "slope", "curvature",
              "falls up to", "falls most at", "to"]  # fmt: skip
    return markdown(header, found)


def share(lines: list[int]) -> float:
    """The share of all entries that are in the fullest lines."""
    return sum(lines[: max(1, round(FULLEST * len(lines)))]) / sum(lines)


def draw(curves: dict[str, Curve], path: Path) -> None:
    """The share of the entries in the fullest columns, and the loss along the first step."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained")
    for color, (rule, curve) in enumerate(curves.items()):
        look: Any = {"color": f"C{color}", "label": rule}
        if curve.columns:
            places = [(at + 1) / len(curve.columns) for at in range(len(curve.columns))]
            left.plot(places, [number / curve.trained for number in accumulate(curve.columns)], **look)
        right.plot(RATES, [loss - curve.start for loss in curve.losses], marker=".", **look)
    left.set(xscale="log", xlabel="share of the columns, the fullest first", ylabel="share of the entries", ylim=(0, 1))
    right.set(xscale="log", xlabel="rate of Adam's first step", ylabel="change of the loss", ylim=(-0.8, 0.3))
    right.axhline(0, color=INK, linewidth=0.6)
    left.legend(*right.get_legend_handles_labels(), loc="upper left", frameon=False, fontsize=8)
    save(figure, path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a causal language model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=int, default=237_312, help="default: Gemma 3 270M's LoRA of rank 1")
    parser.add_argument("--batches", type=int, default=4, help="of the calibration")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--max-length", type=int, default=128, help="longer rows are left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("curvature.svg"))
    options = parser.parse_args(arguments)
    size = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in ("batch-size", "max-length")]
    given = ["--model", options.model, "--methods", "none", "--held-out", "1", *size]
    bed = language.Bed(options.model, language.plan(language.parse_arguments(given))[0], options.device)
    moments = bed.moments(options.seed, options.batch_size, "linear", options.batches, torch.float32)
    gradients = {name: gradient / options.batches for name, gradient in moments.gradients.items()}
    batches = list(islice(bed.batches(options.seed, options.batch_size), options.batches))
    loss_at = losses_along(bed.load(torch.float32).eval(), batches)
    curves = {}
    for rule in (*RULES, *OTHERS):
        curves[rule] = measure(rule, gradients, options.budget, options.seed, loss_at)
        print(table({rule: curves[rule]}).splitlines()[-1], flush=True)
    print(table(curves))
    draw(curves, options.out)


if __name__ == "__main__":
    main()
