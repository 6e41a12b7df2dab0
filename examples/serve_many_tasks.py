"""Serve many tasks from one model in memory: each request's delta is swapped in before the model answers.

    python examples/serve_many_tasks.py --base MODEL --delta mrpc=mrpc-delta --delta cola=cola-delta

    GET  /tasks                                         the deltas, and how long swaps take
    POST /predict {"task": "cola", "texts": ["..."]}    labels, scores, and the milliseconds of this request's swap
    POST /predict {"task": "mrpc", "pairs": [["...", "..."]]}

The deltas are those that ``text_classification.py`` saves. Their entries go through a ``DeltaSwitch``, which checks
each delta against the base when the server starts; a swap then touches the entries of two deltas. Tasks differ in
their number of labels, so that their heads have different shapes and cannot be written into one module: what a delta
stores whole stays outside the switch, and the forward pass takes it in place of the base's own (``functional_call``).

Requests take turns on the model; one for the task that is active already swaps nothing. There is no authentication:
put the server behind something that has it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path

import torch
import uvicorn
from classifiers import classifier_class
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field, model_validator
from torch.func import functional_call
from transformers import AutoTokenizer

from sparsify import DeltaSwitch, SparseDelta
from sparsify.errors import SparsifyError

MAX_BATCH = 64  # texts in a request
SWAPS_KEPT = 1_000  # of which the median is taken


class Request(BaseModel, extra="forbid"):
    """A batch of texts, or of pairs of texts, for one task."""

    task: str
    texts: list[str] = Field([], max_length=MAX_BATCH)
    pairs: list[tuple[str, str]] = Field([], max_length=MAX_BATCH)

    @model_validator(mode="after")
    def of_one_kind(self) -> Request:
        if bool(self.texts) == bool(self.pairs):
            raise ValueError("give either texts or pairs")
        return self


class Tasks:
    """One model, the switch that holds the tasks' entries, and each task's head.

    Args:
        model: a transformers model for sequence classification, the base of all deltas.
        tokenizer: the model's.
        paths: each task's delta, a folder or a file, by the task's name.
        new: names of the model's tensors that were drawn at random, so that every delta has to bring its own.
        max_length: tokens, beyond which texts are cut.
    """

    def __init__(self, model, tokenizer, paths: Mapping[str, Path], new: Iterable[str] = (), max_length: int = 128):
        self.model, self.tokenizer, self.max_length = model.eval(), tokenizer, max_length
        self.switch = DeltaSwitch(model)
        self.heads: dict[str, dict[str, torch.Tensor]] = {}
        self.about: dict[str, dict] = {}
        self.swaps_ms: deque[float] = deque(maxlen=SWAPS_KEPT)
        self.lock = threading.Lock()  # around model, switch, and the tokenizer, which keeps its padding as a state
        for name, path in paths.items():
            delta = SparseDelta.load(path)
            self.switch.attach(name, delta.entries_only())
            if missing := set(new) - delta.whole.keys():
                raise SparsifyError(f"neither the base nor {path} has a trained `{min(missing)}`.")
            self.heads[name] = fitting(delta.whole, model)
            files = [path] if path.is_file() else path.glob("*.safetensors")
            self.about[name] = {"entries": delta.num_entries, "bytes": sum(file.stat().st_size for file in files)}

    def predict(self, request: Request) -> dict:
        columns = map(list, zip(*request.pairs, strict=True)) if request.pairs else [request.texts]
        with self.lock, torch.inference_mode():
            swap_ms = self._activate(request.task)
            tokens = self.tokenizer(
                *columns, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
            ).to(self.model.device)
            logits = functional_call(self.model, self.heads[request.task], kwargs=dict(tokens)).logits
            scores = logits.float().softmax(-1).cpu()  # (texts, labels)
        answer = {"task": request.task, "labels": scores.argmax(-1).tolist(), "scores": scores.tolist()}
        return {**answer, "swap_ms": swap_ms}

    def listing(self) -> dict:
        with self.lock:
            active, swaps_ms = self.switch.active, list(self.swaps_ms)
        tasks = {name: {**about, "active": name == active} for name, about in self.about.items()}
        return {"tasks": tasks, "swaps": len(swaps_ms), "median_swap_ms": statistics.median(swaps_ms or [0.0])}

    def _activate(self, task: str) -> float:
        """Swaps the task's entries in, unless they are in the model already; returns the milliseconds it took."""
        if task == self.switch.active:
            return 0.0
        started = time.perf_counter()
        self.switch.activate(task)
        self.swaps_ms.append(round(1_000 * (time.perf_counter() - started), 3))
        return self.swaps_ms[-1]


def fitting(head: Mapping[str, torch.Tensor], model) -> dict[str, torch.Tensor]:
    """A head in the model's dtype and on its device, if its shape fits but for the number of labels."""
    places = model.state_dict()
    for name, tensor in head.items():
        if name not in places or tensor.shape[1:] != places[name].shape[1:]:
            raise SparsifyError(f"the base has no place for the delta's `{name}` of shape {tuple(tensor.shape)}.")
    return {name: tensor.to(places[name].device, places[name].dtype) for name, tensor in head.items()}


def load(base: str, paths: Mapping[str, Path]) -> Tasks:
    tokenizer = AutoTokenizer.from_pretrained(base)
    model, loading = classifier_class(base).from_pretrained(base, output_loading_info=True)
    if tokenizer.pad_token is None:  # decoders often have none
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    return Tasks(model, tokenizer, paths, loading["missing_keys"])


def make_app(tasks: Tasks) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        found = tasks.listing()
        print(f"{found['swaps']} swaps, median {found['median_swap_ms']:.2f} ms", flush=True)

    app = FastAPI(title="One model, many tasks", lifespan=lifespan)

    @app.get("/tasks")
    def listing() -> dict:
        return tasks.listing()

    @app.post("/predict")
    def predict(request: Request) -> dict:  # no `async`: it runs in a thread, where it may wait for its turn
        if request.task not in tasks.about:
            raise HTTPException(404, f"there is no task {request.task!r}; there are: {', '.join(tasks.about)}")
        return tasks.predict(request)

    return app


def named_path(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r}; expected NAME=PATH")
    return name, Path(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="name or path of the pretrained model")
    parser.add_argument("--delta", type=named_path, action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args(arguments)
    if len(dict(arguments.delta)) < len(arguments.delta):
        parser.error("a task's name is there twice")
    try:
        tasks = load(arguments.base, dict(arguments.delta))
    except SparsifyError as error:
        raise SystemExit(str(error)) from None
    uvicorn.run(make_app(tasks), host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
