"""Training and evaluation: the frozen-feature baseline, the loop that trains everything, a whole set's logits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsify.demo.classifier import DocstringClassifier, Tokenized

BATCH_SIZE = 16
EVAL_BATCH_SIZE = 64
BASELINE_STEPS = 300
BASELINE_LR = 1e-2


def train(
    model: DocstringClassifier,
    data: Tokenized,
    *,
    steps: int,
    lr: float,
    seed: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """A plain loop: AdamW on whatever requires grad, the learning rate falling linearly to zero.

    Args:
        model: the model, sparsified or not.
        data: the training examples.
        steps: optimizer steps.
        lr: the first step's learning rate.
        seed: of the batches and of dropout.
        on_step: called after each step with the steps done and the loss.
    """
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)
    batches = shuffled_batches(data, random.Random(seed))
    model.train()
    for step in range(1, steps + 1):
        rows = next(batches)
        loss = F.cross_entropy(model(**data.batch(rows)), data.labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        on_step(step, loss.item())
    model.eval()


def shuffled_batches(data: Tokenized, generator: random.Random) -> Iterator[list[int]]:
    """Rows in batches of similar length, epoch after epoch, without end."""
    while True:
        order = list(range(len(data)))
        generator.shuffle(order)
        order.sort(key=lambda row: len(data.ids[row]))  # stable: rows of equal length stay shuffled
        batches = [order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE)]
        generator.shuffle(batches)
        yield from batches


def train_frozen_baseline(model: DocstringClassifier, training: Tokenized, held_out: Tokenized) -> Tensor:
    """Logits (n, c) on the held-out examples of a head that was trained alone, on the frozen encoder's features.

    The model is left as it was. The features are computed once; the head is trained on all of them at each step.
    """
    model.eval()
    features, held_out_features = all_rows(model.features, training), all_rows(model.features, held_out)
    head = nn.Linear(model.head.in_features, model.head.out_features)
    head.load_state_dict(model.head.state_dict())
    optimizer = torch.optim.AdamW(head.parameters(), lr=BASELINE_LR)
    for _ in range(BASELINE_STEPS):
        optimizer.zero_grad()
        F.cross_entropy(head(features), training.labels).backward()
        optimizer.step()
    with torch.no_grad():
        logits: Tensor = head(held_out_features)
    return logits


@torch.no_grad()
def all_rows(function: Callable[..., Tensor], data: Tokenized) -> Tensor:
    """A model's output (n, ...) for all rows, in their order, computed in batches."""
    outputs: list[tuple[int, Tensor]] = []
    for rows in data.by_length(EVAL_BATCH_SIZE):
        outputs += zip(rows, function(**data.batch(rows)), strict=True)
    return torch.stack([output for _, output in sorted(outputs, key=lambda pair: pair[0])])


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """The share of rows whose largest logit is the label's."""
    return (logits.argmax(-1) == labels).float().mean().item()
