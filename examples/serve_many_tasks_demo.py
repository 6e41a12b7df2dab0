"""``serve_many_tasks.py`` at work: train two quick deltas, serve both over HTTP, ask, and show how long a swap takes.

    python examples/serve_many_tasks_demo.py

The tasks are made of the docstrings of Python's standard library: what does a docstring document (three labels), and
are its words in order or shuffled (two labels)?
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import socket
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import serve_many_tasks
import text_classification
import uvicorn
from classifiers import model_path
from fastapi import FastAPI
from transformers.utils import logging

from sparsify.cli.demo import Example, load_examples

LABELS = {"documents": ("module", "class", "function"), "order": ("shuffled", "in order")}
TEXTS = [
    "Return the next item from the iterator.",
    "from item iterator the Return next the.",
    "Base class for all warnings about deprecated features.",
]
ROUNDS = 20


@contextlib.contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serves an app in a thread, on a free port; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listening:  # requests wait here until the server is up
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield "http://{}:{}".format(*listening.getsockname())
        finally:
            server.should_exit = True
            thread.join()


def ask(url: str, body: dict | None = None) -> dict:
    """Returns the answer to a POST request, or to a GET request where there is no body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def rows_of(examples: list[Example], task: str) -> list[dict]:
    if task == "documents":
        return [{"text": example.text, "label": example.label} for example in examples]
    generator, rows = random.Random(0), []
    for example in examples:
        words, label = example.text.split(), generator.randrange(2)
        if label == 0:
            generator.shuffle(words)
        rows.append({"text": " ".join(words), "label": label})
    return rows


def train(task: str, training: list[Example], held_out: list[Example], folder: Path, steps: int) -> Path:
    """Trains a task's delta with ``text_classification.py``; returns the delta's folder."""
    files = {split: folder / f"{task}-{split}.jsonl" for split in ("train", "validation")}
    for file, examples in zip(files.values(), (training, held_out), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows_of(examples, task)), encoding="utf-8")
    options = ["--train-file", str(files["train"]), "--validation-file", str(files["validation"])]
    with contextlib.redirect_stdout(io.StringIO()):
        result = text_classification.main([*options, "--steps", str(steps), "--out", str(folder / task)])
    print(f"{task}: held-out accuracy {result['accuracy']:.2f} after {steps} steps ({result['seconds']:.0f} s)")
    return folder / task


def run(training: list[Example], held_out: list[Example], steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = {task: train(task, training, held_out, Path(folder), steps) for task in LABELS}
        tasks = serve_many_tasks.load(model_path("MiniLM"), paths)
    with served(serve_many_tasks.make_app(tasks)) as url:
        for task, labels in LABELS.items():
            answer = ask(f"{url}/predict", {"task": task, "texts": TEXTS})
            print(f"\nPOST /predict, task {task}: swapped in {answer['swap_ms']:.2f} ms")
            for text, label, scores in zip(TEXTS, answer["labels"], answer["scores"], strict=True):
                print(f"  {labels[label]:<9} {scores[label]:.2f}  {text}")
        for _ in range(ROUNDS):
            for task in LABELS:
                ask(f"{url}/predict", {"task": task, "texts": TEXTS})
        print(f"\nGET /tasks after {2 * ROUNDS} more requests, the tasks in turn:")
        print(json.dumps(ask(f"{url}/tasks"), indent=2))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="of training, for each task")
    steps = parser.parse_args(arguments).steps
    logging.set_verbosity_error()  # the heads are new: that is known
    logging.disable_progress_bar()
    run(*load_examples(), steps)


if __name__ == "__main__":
    main()
