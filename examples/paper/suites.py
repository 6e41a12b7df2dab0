"""Suites: the runs that an experiment is made of.

Every task x method x budget x rate x seed of a suite is one run. The order is that in which they say most: the seeds
are the outermost loop, so that a table of one seed is complete before the next seed begins; then the budgets; of the
rates the middle ones come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from examples.paper.methods import METHODS
from examples.paper.settings import Settings
from examples.paper.tasks import TASKS

SELECTIVE = ("id3", "pafi", "fish", "bitfit", "random")


@dataclass(frozen=True)
class Suite:
    """An experiment's defaults; each is an option of the command.

    Args:
        rates: learning rates, of full fine-tuning and of all other methods.
        epochs, max_length, target_length, rows: ``None``: the task's, all rows.
        recipe: the values of the recipe's options, all of which are run.
    """

    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    budgets: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]
    model: str = "microsoft/deberta-v3-base"
    head: str = "budget"
    epochs: int | None = None
    max_length: int | None = None
    target_length: int | None = None
    rows: int | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    batch_size: int = 16
    recipe: dict[str, tuple[Any, ...]] = field(default_factory=dict)


PAPER_RATES = {"selective": (3e-4, 5e-4, 1e-4, 7e-4), "full": (1e-5, 7e-6, 3e-5, 5e-6)}
MATH_RATES = {"selective": (3e-4,), "full": (1e-5,)}  # the paper has none for full fine-tuning
SUITES = {
    # real weights on two cores: a table on MiniLM, of a few thousand rows
    "local": Suite(
        tasks=("sst2", "mrpc", "cola", "wnut17"),
        methods=("id3", "lora", "static-gradient", "full", "pafi", "random", "bitfit", "magnitude-increment", "fish",
                 "lora-8", "id3+lora", "pfeiffer", "id3+pfeiffer"),
        budgets=(38_000, 84_000),
        rates={"selective": (1e-3, 3e-3, 3e-4, 1e-2), "full": (5e-5, 1e-4, 2e-5, 2e-4)},
        model="MiniLM", head="dense", epochs=3, max_length=128, rows=2_000,
    ),
    # a model of the paper's size, in days of a core; --model is the folder of all-mpnet-base-v2
    "mpnet": Suite(
        tasks=("sst2", "mrpc", "cola", "wnut17"),
        methods=("id3", "lora", "random", "full", "fish", "pafi", "bitfit", "static-gradient", "lora-8"),
        budgets=(320_000, 103_000),
        rates={"selective": (1e-3, 3e-3, 3e-4, 1e-2, 3e-2), "full": (5e-5, 2e-5, 1e-4)},
        model="all-mpnet-base-v2", head="dense", epochs=3, max_length=128, rows=2_000,
        recipe={"until": (0.2,), "decay": ("linear",), "candidates": ("linear",)},
    ),
    "glue": Suite(
        tasks=("rte", "mrpc", "cola", "stsb", "sst2", "qnli", "qqp", "mnli"),
        methods=(*SELECTIVE, "full", "lora-8", "pafi+lora", "id3+lora"),
        budgets=(103_000, 320_000), rates=PAPER_RATES,
    ),
    "ner": Suite(tasks=("conll2003",), methods=(*SELECTIVE, "full"), budgets=(103_000, 320_000), rates=PAPER_RATES),
    "ablations": Suite(
        tasks=("mrpc", "rte", "cola", "stsb"),
        methods=("id3", "d3-static", "d3-repeat", "magnitude-increment"),
        budgets=(320_000,), rates=PAPER_RATES,
    ),
    "summarization": Suite(
        tasks=("cnn_dailymail", "xsum"), methods=("id3", "pafi", "full"), budgets=(100_000, 320_000, 1_000_000),
        rates={"selective": (1e-4,), "full": (1e-5,)}, model="google-t5/t5-small", seeds=(0,), batch_size=64,
        recipe={"exp": (1.0,), "eps": (1e-3,)},
    ),
    "math": Suite(
        tasks=("math",), methods=("id3+lora-32", "pafi+lora-32", "lora-2", "lora-32"), budgets=(2_700_000,),
        rates=MATH_RATES, model="Qwen/Qwen2.5-1.5B", seeds=(0,), batch_size=4, recipe={"exp": (0.0, 1.0)},
    ),
    "math-full": Suite(
        tasks=("math",), methods=("id3", "pafi", "full"), budgets=(2_700_000, 1_300_000),
        rates=MATH_RATES, model="mtgv/MobileLLaMA-2.7B-Base", seeds=(0,), batch_size=4, recipe={"exp": (0.0, 1.0)},
    ),
}  # fmt: skip


def plan(suite: Suite, recipes: Iterable[dict[str, Any]], common: dict[str, Any]) -> list[Settings]:
    """The runs of a suite, each once, in the order to run them in.

    Args:
        recipes: settings that every method is run with, one dict after the other.
        common: further settings of all runs.
    """
    return list(dict.fromkeys(_runs(suite, list(recipes), common)))


def _runs(suite: Suite, recipes: Sequence[dict[str, Any]], common: dict[str, Any]) -> Iterator[Settings]:
    count = max(len(rates) for rates in suite.rates.values())
    for seed, budget, place, recipe in product(suite.seeds, suite.budgets, range(count), recipes):
        for name, method in product(suite.tasks, suite.methods):
            rates = suite.rates[METHODS[method].rates]
            if place < len(rates):
                length = TASKS[name].target_length
                run = Settings(
                    task=name, model=suite.model, method=method, rate=rates[place], seed=seed, budget=budget,
                    epochs=suite.epochs or TASKS[name].epochs, max_length=suite.max_length or TASKS[name].max_length,
                    target_length=length and (suite.target_length or length), rows=suite.rows, head=suite.head,
                    batch_size=suite.batch_size,
                )  # fmt: skip
                yield METHODS[method].normalise(replace(run, **recipe, **common))
