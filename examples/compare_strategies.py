"""Compare the strategies side by side: each on each task with several seeds, and a table of mean and spread.

    python examples/compare_strategies.py --tasks mrpc cola --seeds 0 1 2

Every finished run is a line of JSON in ``--results``; what is there already is not run again, so an interrupted
comparison goes on where it stopped. All strategies train at one learning rate, except full fine-tuning, which has its
own. Options that are not known here go to ``text_classification.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import text_classification

STRATEGIES = ("id3", "magnitude-increment", "pafi", "fish", "random", "bitfit", "d3-repeat", "full")
METRIC = {"cola": "matthews"}  # of the other tasks: accuracy
Key = tuple[str, str, int]  # task, strategy, seed
Runs = dict[Key, dict]


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["mrpc", "cola"])
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rows", type=int, default=1_500, help="training rows")
    parser.add_argument("--lr", default="5e-4", help="learning rate of every strategy but full")
    parser.add_argument("--results", type=Path, default=Path("strategies.jsonl"))
    return parser.parse_known_args(arguments)


def read_runs(path: Path) -> Runs:
    """The finished runs by (task, strategy, seed)."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {(run["task"], run["strategy"], run["seed"]): run for run in map(json.loads, lines)}


def run_missing(wanted: list[Key], path: Path, run: Callable[[str, str, int], dict]) -> Runs:
    """Returns the wanted runs; those that the file lacks are run, and added to it as they finish."""
    runs = read_runs(path)
    for key in wanted:
        if key not in runs:
            runs[key] = run(*key)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(runs[key]) + "\n")
    return {key: runs[key] for key in wanted}


def make_table(runs: Runs, tasks: list[str]) -> str:
    """A row per strategy in Markdown: the metric in percent and the loss, mean ± standard deviation over the seeds."""
    names = [(task, METRIC.get(task, "accuracy")) for task in tasks]
    header = ["strategy", "entries", *[cell for task, metric in names for cell in (f"{task} {metric}", "loss")]]
    lines = [" | ".join(header), "|".join(["---", *["---:"] * (len(header) - 1)])]
    for strategy in dict.fromkeys(strategy for _, strategy, _ in runs):
        own = [run for (_, name, _), run in runs.items() if name == strategy]
        entries = {run.get("entries") for run in own} - {None}
        cells = [strategy, f"{min(entries):,}".replace(",", " ") if entries else "all"]
        for task, metric in names:
            runs_of_task = [run for run in own if run["task"] == task]
            cells.append(mean_and_spread([100 * run[metric] for run in runs_of_task], digits=1))
            cells.append(mean_and_spread([run["loss"] for run in runs_of_task], digits=3))
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def mean_and_spread(values: list[float], digits: int) -> str:
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else ""
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def main(arguments: list[str] | None = None) -> None:
    options, others = parse_arguments(arguments)

    def run(task: str, strategy: str, seed: int) -> dict:
        own = ["--task", task, "--strategy", strategy, "--seed", str(seed), "--rows", str(options.rows)]
        rate = [] if strategy == "full" else ["--lr", options.lr]
        return text_classification.main([*own, *rate, *others])

    wanted = [(t, s, n) for n in options.seeds for t in options.tasks for s in options.strategies]
    print(make_table(run_missing(wanted, options.results, run), options.tasks))


if __name__ == "__main__":
    main()
