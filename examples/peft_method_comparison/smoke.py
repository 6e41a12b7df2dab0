"""Runs the same on a CPU, for a few steps: another model, rows from this machine, and stand-ins for a GPU and for git.

    python -m examples.peft_method_comparison.smoke peft/method_comparison/MetaMathQA path/to/gemma-3-270m

Rows are GSM8K's, in the folder ``math`` of ``SPARSIFY_DATA``. It shows that the runner takes the experiment
from start to end; its numbers say nothing.
"""

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import peft.utils
import torch

from examples.peft_method_comparison.run import HERE, run
from examples.rows import read_jsonl

STEPS, ROWS = 4, 4
SETTINGS = {
    "dtype": "float32", "max_steps": STEPS, "eval_steps": 2, "batch_size": 2, "batch_size_eval": 4,
    "generation_kwargs": {"max_length": 800, "max_new_tokens": 4},
}  # fmt: skip


class Rows(datasets.Dataset):
    def take(self, number: int) -> "Rows":  # as of a stream
        return self.select(range(min(number, len(self))))


def load_dataset(name: str, *args: object, **kwargs: object) -> object:
    """A few rows of GSM8K, with the columns of the data set that is asked for."""
    rows = read_jsonl(Path(os.environ["SPARSIFY_DATA"], "math", "train_gsm8k.jsonl.gz"))[: 2 * ROWS]
    questions, answers = ([row[key] for row in rows] for key in ("instruction", "output"))
    if name == "meta-math/MetaMathQA":
        own = {"type": questions, "query": questions, "original_question": questions, "response": answers}
        return {"train": datasets.Dataset.from_dict(own)}
    if name == "openai/gsm8k":
        every = datasets.Dataset.from_dict({"question": questions, "answer": answers})
        return datasets.DatasetDict({"train": every, "test": every.select(range(ROWS))})
    return Rows.from_dict({"text": [f"{question} {question}" for question in questions]})  # a loss that it expects


def smoke(suite: Path, model: Path, experiment: str = "llama-3.2-3B-id3") -> None:
    for name in ("reset_peak_memory_stats", "manual_seed_all", "max_memory_reserved", "memory_allocated",
                 "memory_reserved", "empty_cache", "get_device_name"):  # fmt: skip
        setattr(torch.cpu, name, lambda *args: 0)
    datasets.load_dataset = load_dataset
    sys.path.insert(0, str(suite))
    peft.utils.infer_device = lambda: "cuda"  # without which the runner's module is not imported
    runner: Any = importlib.import_module("utils")
    runner.device, runner.infer_device = "cpu", lambda: "cpu"
    peft.utils.infer_device = runner.infer_device
    runner.get_peft_branch = lambda: "smoke"  # of a clone of PEFT
    config = json.loads((HERE / "experiments" / "sparsify" / experiment / "adapter_config.json").read_text())
    config |= {"steps": STEPS, "budget": 50_000}
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, "experiments", "sparsify", "smoke")
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        settings = {**SETTINGS, "model_id": str(model.resolve())}
        (folder / "training_params.json").write_text(json.dumps(settings))
        run(suite, "smoke", Path(home))


if __name__ == "__main__":
    smoke(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
