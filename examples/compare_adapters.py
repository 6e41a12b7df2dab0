"""Compare dense adapters with sparse ones: each on each task with several seeds, and a table of mean and spread.

    python examples/compare_adapters.py --tasks mrpc cola --seeds 0 1 2

A method is an adapter (``sparse_lora.py``, ``sparse_adapters.py``) and a strategy for its entries. As in
``compare_strategies.py``, every finished run is a line of JSON in ``--results``, what is there is not run again, and
all methods train at one learning rate. Options that are not known here go to both scripts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sparse_adapters
import sparse_lora
from compare_strategies import make_table, run_missing

PFEIFFER = ("--kind", "pfeiffer", "--reduction-factor", "2")
METHODS = {
    "LoRA": (sparse_lora, ("--strategy", "dense")),
    "ID3 + LoRA": (sparse_lora, ("--strategy", "id3", "--budget", "0.24")),
    "PaFi + LoRA": (sparse_lora, ("--strategy", "pafi", "--budget", "0.24")),
    "Pfeiffer": (sparse_adapters, (*PFEIFFER, "--strategy", "dense")),
    "ID3 + Pfeiffer": (sparse_adapters, (*PFEIFFER, "--strategy", "id3", "--budget", "0.04")),
    "SparseAdapter + Pfeiffer": (sparse_adapters, (*PFEIFFER, "--strategy", "sparseadapter", "--budget", "0.04")),
}


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["mrpc", "cola"])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="METHOD")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rows", type=int, default=1_500, help="training rows")
    parser.add_argument("--lr", default="1e-3", help="learning rate of every method")
    parser.add_argument("--results", type=Path, default=Path("lora_and_adapters.jsonl"))
    return parser.parse_known_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options, others = parse_arguments(arguments)

    def run(task: str, method: str, seed: int) -> dict:
        script, own = METHODS[method]
        shared = ["--task", task, "--seed", str(seed), "--rows", str(options.rows), "--lr", options.lr]
        start = ["--fresh", "store"]  # the adapters of one seed begin with the same numbers for every method
        return script.main([*shared, *start, *own, *others]) | {"strategy": method}

    wanted = [(task, method, seed) for task in options.tasks for seed in options.seeds for method in options.methods]
    print(make_table(run_missing(wanted, options.results, run), options.tasks))


if __name__ == "__main__":
    main()
