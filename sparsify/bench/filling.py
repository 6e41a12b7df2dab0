"""Index buffers as they are late in a run: filled by ID3 itself, in a process of its own, once.

A run's first steps have almost nothing unmasked and would flatter. The state that is kept is the trained one: which
entries, their values, the order in which they were unmasked; every method that lets ID3 choose starts from it.

The support is of the same kind as a real run's, and not the same. A run of 1000 steps takes a thousandth of its budget
from each of hundreds of batches, while the weights move; here :data:`FILL_STEPS` batches give some twenty times as many
entries each. So an entry has to be less of an outlier in its batch to get in, and those that stay masked are closer to
each other in score: the bound on a tensor's scores rules out less, which is against ID3 in a comparison. Entries of one
batch share rows and columns more than those of many batches do, which is in favour of whoever gathers by rows. More
steps are nearer to a real run, and take longer the first time.

stdin   one line with the settings (JSON)
stdout  one JSON line when the file is there
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import safetensors
import torch
import transformers
from torch import Tensor, nn

from sparsify.api import get_unmasker, sparsify, trained_state
from sparsify.bench import cache
from sparsify.bench.settings import PLANNED_STEPS, Settings, errors_as_answers
from sparsify.bench.shapes import build
from sparsify.bench.tokens import Batches
from sparsify.strategies.schedules import Schedule
from sparsify.training.flat_delta import SETTINGS
from sparsify.version import __version__

FILL_STEPS = 24
FORMAT = 1  # raised when what is filled in changes


def state_path(settings: Settings) -> Path:
    """The file with the filled buffers' state for these settings."""
    return cache.path_of(
        "state",
        format=FORMAT,
        shape=settings.shape,
        layers=settings.layers,
        budget=settings.budget,
        start=settings.start,
        batch=settings.batch,
        length=settings.length,
        dtype=settings.dtype,
        device=torch.device(settings.device).type,
        tokens=Path(settings.tokens).name,
        seed=settings.seed,
        steps=FILL_STEPS,
        versions=[__version__, torch.__version__, transformers.__version__, safetensors.__version__],
    )


def load_state(settings: Settings) -> dict[str, Tensor] | None:
    """The state of the filled buffers; nothing in it where nothing is to be filled, ``None`` where it is to be made."""
    return cache.load(state_path(settings)) if settings.start else {}


def fill(model: nn.Module, settings: Settings, step: Callable[[], None], fill_steps: int = FILL_STEPS) -> None:
    """Lets ID3 unmask its share of the budget in equal parts, then puts it at that point of a long run.

    Args:
        model: sparsified by ID3.
        settings: how much is to be unmasked.
        step: does a training step.
        fill_steps: how many steps to do it in.
    """
    engine, share = get_unmasker(model), settings.start / PLANNED_STEPS
    if share:
        engine.steps = math.ceil(fill_steps / share)
        engine.schedule = Schedule(until=fill_steps / (share * engine.steps))
        for _ in range(fill_steps):
            step()
    engine.schedule, engine.steps, engine.step = Schedule(), PLANNED_STEPS, settings.start


def make_state(settings: Settings) -> dict[str, Tensor]:
    """Trains a new model until its buffers are filled."""
    model = build(settings)
    batches = Batches(settings, model, seed=settings.seed + 1)
    sparsify(model, settings.budget, "id3", steps=FILL_STEPS)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step() -> None:
        model(**batches.next()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    fill(model, settings, step)
    state = trained_state(model)
    del state[SETTINGS]  # other methods, with schedules of their own, go on from it
    return state


@errors_as_answers()
def main() -> None:
    settings = Settings(**json.loads(sys.stdin.readline()))
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if load_state(settings) is None:
        cache.save(state_path(settings), make_state(settings))
    print(json.dumps({"path": str(state_path(settings))}), flush=True)


if __name__ == "__main__":
    main()
