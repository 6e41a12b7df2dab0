"""The paper's experiments: runs what is missing of a suite, and prints its tables.

    python -m examples.paper.run --suite glue --model microsoft/deberta-v3-base --device cuda
    python -m examples.paper.run --suite math --model meta-llama/Llama-2-7b-hf --dtype bfloat16 --device cuda
    python -m examples.paper.run --suite local --jobs 2 --seeds 0 --budgets 38000
    python -m examples.paper.run --suite local --tasks sst2 --methods id3 --until 0.2 1.0 --decay linear constant
    python -m examples.paper.run --suite mpnet --model MPNET --with-test --jobs 2
    python -m examples.paper.run --suite local --table

Every finished run is a line of JSON in ``--results``; what is there is not run again. A suite's defaults are in
``suites.py``; options replace them. Options of the recipe take several values, and every method is run with each
combination of those that it depends on. ``--table`` prints the tables of the runs that are there, and runs nothing.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

from examples.paper.methods import METHODS
from examples.paper.runs import read, run_missing
from examples.paper.suites import SUITES, Suite, plan
from examples.paper.tables import RECIPE, report
from examples.paper.tasks import TASKS


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="local")
    parser.add_argument("--results", type=Path, help="default: <suite>.jsonl")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process of its own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument(
        "--method", choices=METHODS, help="compared with each of the others; default: the suite's first"
    )
    choice = parser.add_argument_group("instead of the suite's")
    choice.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK")
    choice.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help=", ".join(METHODS))
    choice.add_argument("--budgets", nargs="+", type=int)
    choice.add_argument("--rates", nargs="+", type=float, help="of all methods but full fine-tuning")
    choice.add_argument("--full-rates", nargs="+", type=float, help="of full fine-tuning")
    choice.add_argument("--seeds", nargs="+", type=int)
    choice.add_argument("--model", help="name, path, or MiniLM")
    for name in ("epochs", "batch-size", "max-length", "target-length", "rows"):
        choice.add_argument(f"--{name}", type=int)
    recipe = parser.add_argument_group("recipe; several values are all run")
    recipe.add_argument("--head", nargs="+", choices=("dense", "budget"), help="whether a new head is in the budget")
    recipe.add_argument("--shape", nargs="+", help="of the unmasking: uniform, linear, cubic, cosine")
    recipe.add_argument("--until", nargs="+", type=float, help="share of the steps after which all is unmasked")
    recipe.add_argument("--every", nargs="+", type=int, help="steps from one selection to the next")
    recipe.add_argument("--decay", nargs="+", choices=("constant", "linear"), help="of the learning rate")
    recipe.add_argument("--warmup", nargs="+", type=float, help="share of the steps")
    recipe.add_argument("--head-rate", nargs="+", type=float, help="of the new head, where it is not that of the rest")
    recipe.add_argument("--beta2", nargs="+", type=float, help="of AdamW")
    recipe.add_argument("--candidates", nargs="+", choices=("all", "linear"))
    recipe.add_argument("--exp", nargs="+", type=float)
    recipe.add_argument("--eps", nargs="+", type=float)
    run = parser.add_argument_group("of each run")
    run.add_argument("--held-out", type=int, help="judge on so many training rows, to choose a recipe on")
    run.add_argument("--judged", type=int, help="judge on so many rows of each set")
    run.add_argument("--with-test", action="store_true", help="judge on the test rows too, where there are some")
    run.add_argument("--steps", type=int, help="stop early, to try things out")
    run.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args(arguments)


def chosen_suite(arguments: argparse.Namespace) -> Suite:
    """The suite with what the options replace."""
    suite = SUITES[arguments.suite]
    rates = {"selective": arguments.rates, "full": arguments.full_rates}
    rates = {kind: tuple(own) if own else suite.rates[kind] for kind, own in rates.items()}
    names = [field.name for field in fields(Suite) if field.name not in ("rates", "recipe", "head")]
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return replace(suite, rates=rates, **given)


def chosen_recipes(arguments: argparse.Namespace) -> list[dict]:
    """Every combination of the recipe's options, those that were given before the suite's."""
    given = {name: value for name in RECIPE if (value := getattr(arguments, name)) is not None}
    given = SUITES[arguments.suite].recipe | given
    return [dict(zip(given, values, strict=True)) for values in product(*given.values())]


def main(arguments: list[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(given)
    common = {name: getattr(options, name) for name in ("held_out", "judged", "with_test", "steps", "dtype")}
    wanted = plan(chosen_suite(options), chosen_recipes(options), common)
    path, failed = options.results or Path(f"{options.suite}.jsonl"), []
    if not options.table:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the runs under way end, too
        command = shlex.join(["python", "-m", "examples.paper.run", *given])
        failed = run_missing(wanted, path, options.jobs, options.device, command)
    runs = read(path)
    found = [runs[settings.key] for settings in wanted if settings.key in runs]
    print(f"{len(found)} of {len(wanted)} runs in {path}\n")
    if found:
        print(report(found, options.method or SUITES[options.suite].methods[0]))
    if failed:
        raise SystemExit(f"{len(failed)} runs failed, the first with these settings: {failed[0]}")


if __name__ == "__main__":
    main()
