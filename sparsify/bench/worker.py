"""One method in one process: builds the model, then does training steps on request and reports their times.

stdin   one line with the settings (JSON), then a line with a number of steps for each round
stdout  one JSON line when ready, then one a round: the seconds of each step, and the peak memory so far
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.api import get_unmasker, sparsify
from sparsify.bench.memory import peak_bytes

FILL_STEPS = 6
PLANNED_STEPS = 1000
SHAPES: dict[str, dict[str, int]] = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
METHODS = ("full", "floor", "pafi", "id3")


@dataclass(frozen=True)
class Settings:
    """What is measured: a method on a model shape.

    Attributes:
        method: one of ``METHODS``; ``floor`` is the frozen model's forward, and backward to its embeddings.
        shape: one of ``SHAPES``.
        budget: entries.
        fill: share of the budget that ID3 has unmasked before the first measured step.
        batch: sequences a step.
        length: tokens a sequence.
        dtype: of the weights.
        threads: of torch; 0 for its default.
    """

    method: str
    shape: str = "bert-base"
    budget: int = 320_000
    fill: float = 0.5
    batch: int = 8
    length: int = 128
    dtype: str = "float32"
    threads: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def build(settings: Settings) -> nn.Module:
    """A BERT of the given shape with random weights and a two-class head, in training mode."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig.from_dict(SHAPES[settings.shape]))
    return model.to(getattr(torch, settings.dtype)).train()


def vocabulary_of(model: nn.Module) -> int:
    """How many tokens the model knows."""
    size: int = model.config.vocab_size  # type: ignore[union-attr,assignment]
    return size


def prepare(settings: Settings, model: nn.Module) -> None:
    """Makes the model train what the method trains."""
    if settings.method == "floor":
        model.requires_grad_(False)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(_let_gradients_in)
    elif settings.method != "full":
        sparsify(model, settings.budget, settings.method, steps=FILL_STEPS)


def make_step(settings: Settings, model: nn.Module, vocabulary: int) -> Callable[[], None]:
    """A function that does one whole training step on fresh random tokens."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=True) if trainable else None

    def step() -> None:
        tokens = torch.randint(5, vocabulary, (settings.batch, settings.length))
        model(input_ids=tokens, labels=tokens[:, 0] % 2).loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _let_gradients_in(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.requires_grad_()


def fill(settings: Settings, model: nn.Module, step: Callable[[], None]) -> None:
    """Lets ID3 itself unmask a share of the budget, then puts it at that point of a long run.

    A run's first steps have almost nothing unmasked and would flatter.
    """
    if not settings.method.startswith("id3"):
        step()
        return
    engine = get_unmasker(model)
    engine.steps = max(1, round(FILL_STEPS / settings.fill)) if settings.fill else PLANNED_STEPS
    for _ in range(FILL_STEPS if settings.fill else 0):
        step()
    engine.steps = PLANNED_STEPS
    engine.step = min(PLANNED_STEPS - 1, round(settings.fill * PLANNED_STEPS))
    step()


def main() -> None:
    settings = Settings(**json.loads(sys.stdin.readline()))
    if settings.threads:
        torch.set_num_threads(settings.threads)
    importlib.import_module("transformers.models.bert.modeling_bert")
    libraries = peak_bytes()
    model = build(settings)
    started = time.perf_counter()
    prepare(settings, model)
    step = make_step(settings, model, vocabulary_of(model))
    initialisation = time.perf_counter() - started
    fill(settings, model, step)
    unmasked = get_unmasker(model).unmasked if settings.method in ("pafi", "id3") else 0
    _say({"initialisation": initialisation, "unmasked": unmasked, "library_bytes": libraries})
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            started = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - started)
        _say({"seconds": seconds, "peak_bytes": peak_bytes() - libraries})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
