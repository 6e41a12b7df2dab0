"""Train in bfloat16 and in float32, sparsely and in full, and compare how many entries move.

    python examples/bfloat16.py --task mrpc --rows 1500

A bfloat16 number has three significant digits, so a weight that full fine-tuning changes by less than a few thousandths
of its size stays as it is, step after step. A sparsified model keeps its delta in float32, adds the small changes up
there, and rounds only their sum into the weight. Options that are not known here go to ``text_classification.py``.
"""

from __future__ import annotations

import argparse
import json

from text_classification import Task, load_task, parse_arguments, train

from sparsify import get_unmasker, sparsify

RATES = {"id3": 5e-4, "full": 5e-5}


def run(strategy: str, dtype: str, options: list[str]) -> dict:
    """Trains once; returns the result, with the share of the trained entries that have moved, and how far."""
    arguments = parse_arguments(["--strategy", strategy, "--dtype", dtype, "--lr", str(RATES[strategy]), *options])
    task = load_task(arguments)
    before = [parameter.detach().clone() for parameter in task.model.parameters()]
    parameters = list(task.model.parameters())
    sparsify(task.model, arguments.budget, strategy, steps=task.steps, seed=arguments.seed)  # the head's entries too
    result = train(task.model, task, arguments)
    changes = [(now.detach().double() - then.double()).abs() for now, then in zip(parameters, before, strict=True)]
    moved, distance = sum(int(change.count_nonzero()) for change in changes), sum(float(c.sum()) for c in changes)
    trained = num_trained(task, strategy)
    return result | {"dtype": dtype, "moved": moved / trained, "distance": distance / trained}


def num_trained(task: Task, strategy: str) -> int:
    """Number of entries that the run may have moved."""
    if strategy == "full":
        return sum(parameter.numel() for parameter in task.model.parameters())
    return get_unmasker(task.model).unmasked


def make_table(results: list[dict]) -> str:
    header = ["strategy", "weights", "loss after each epoch", "entries that moved", "by, on average"]
    lines = [" | ".join(header), "|".join(["---", "---", *["---:"] * 3])]
    for result in results:
        losses = ", ".join(f"{epoch['loss']:.3f}" for epoch in result["epochs"])
        moved = [f"{100 * result['moved']:.1f} %", f"{result['distance']:.1e}"]
        lines.append(" | ".join([result["strategy"], result["dtype"], losses, *moved]))
    return "\n".join(f"| {line} |" for line in lines)


def main(arguments: list[str] | None = None) -> list[dict]:
    _, options = argparse.ArgumentParser(description=__doc__, add_help=False).parse_known_args(arguments)
    results = [run(strategy, dtype, options) for strategy in RATES for dtype in ("float32", "bfloat16")]
    for result in results:
        print(json.dumps(result))
    print(make_table(results))
    return results


if __name__ == "__main__":
    main()
