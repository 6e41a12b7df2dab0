"""Training and evaluation: the frozen-feature baseline, the loop that trains everything, a whole set's logits."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsify.cli.demo.classifier import DocstringClassifier, Tokenized

BATCH_SIZE = 16
EVAL_BATCH_SIZE = 64
BASELINE_DECAYS = (0.1, 0.03, 0.01, 0.003)


def train(
    model: DocstringClassifier,
    data: Tokenized,
    *,
    steps: int,
    lr: float,
    seed: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """A plain loop: AdamW on all parameters that require grad, at a constant learning rate.

    The seed is that of batches and dropout; ``on_step`` gets the number of steps done and the loss.
    """
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    batches = shuffled_batches(data, random.Random(seed))
    model.train()
    for step in range(1, steps + 1):
        rows = next(batches)
        loss = F.cross_entropy(model(**data.batch(rows)), data.labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step(step, loss.item())
    model.eval()


def shuffled_batches(data: Tokenized, generator: random.Random) -> Iterator[list[int]]:
    """Yields rows in batches of similar length, epoch after epoch, without end."""
    lengths = data.lengths.tolist()
    while True:
        order = list(range(len(lengths)))
        generator.shuffle(order)
        order.sort(key=lengths.__getitem__)  # stable: rows of equal length stay shuffled
        batches = [order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE)]
        generator.shuffle(batches)
        yield from batches


def frozen_baseline_accuracy(model: DocstringClassifier, training: Tokenized, held_out: Tokenized) -> float:
    """Held-out accuracy of the same head trained alone, on features of the frozen encoder; the model stays as it is.

    The best of several weight decays on the held-out examples themselves: an upper bound, so that nothing is gained by
    a weak baseline.
    """
    model.eval()
    features, held_out_features = all_rows(model.features, training), all_rows(model.features, held_out)
    heads = [copy.deepcopy(model.head) for _ in BASELINE_DECAYS]
    for head, decay in zip(heads, BASELINE_DECAYS, strict=True):
        fit_head(head, features, training.labels, decay)
    return max(accuracy(head(held_out_features), held_out.labels) for head in heads)


def fit_head(head: nn.Linear, features: Tensor, labels: Tensor, decay: float) -> None:
    """Logistic regression of labels (n,) on features (n, d), in place, by L-BFGS.

    Minimises the cross entropy plus decay / 2 times the weight's squared norm.
    """
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(head(features), labels) + decay / 2 * head.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


@torch.no_grad()
def all_rows(function: Callable[..., Tensor], data: Tokenized) -> Tensor:
    """Returns a model's output (n, ...) for all rows, in their order, computed in batches of similar length."""
    order = data.lengths.argsort(stable=True)
    outputs = torch.cat([function(**data.batch(rows)) for rows in order.split(EVAL_BATCH_SIZE)])
    return outputs[order.argsort()]


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Returns the share of rows whose largest logit is the label's."""
    return (logits.argmax(-1) == labels).float().mean().item()
