"""The dense oracle: the paper's Algorithm 1 as it stands in the paper, with every gradient of a plain model kept."""

import math
from collections import defaultdict

import torch

from sparsify import D3, Increment, Strategy, get_engine, sparsify

SHAPES = {
    "uniform": lambda s: s,
    "linear": lambda s: 1 - (1 - s) ** 2,
    "cubic": lambda s: 1 - (1 - s) ** 3,
    "cosine": lambda s: (1 - math.cos(math.pi * s)) / 2,
}


def cumulative_target(step, steps, budget, shape="uniform", every=1, until=1.0):
    """Entries unmasked after optimizer step ``step``, counted from 0."""
    last_of_block = (step // every) * every + every - 1
    share = min(1.0, (last_of_block + 1) / (until * steps))
    return math.floor(budget * SHAPES[shape](share) + 1e-9)


def d3(exp, eps):
    """The paper's importance; an entry without a gradient is never unmasked."""

    def score(name, step, weight, grad):
        score = grad.abs() / (weight.abs() + eps) ** exp
        return score.where(score > 0, -math.inf)

    return score


class DenseOracle:
    """Trains ``model`` at a set of entries; ``masks`` are dense and bool, one a parameter.

    The set grows (increment-S); or is ``masks`` from the start (static-S); or is chosen afresh at each step (repeat-S).
    With ``names`` the other parameters keep their whole gradient. ``groups`` are names that share a budget, and it.
    """

    def __init__(
        self, model, optimizer, budget, steps, exp=2, eps=1, masks=None, score=None, repeat=False, names=None,
        groups=None, **schedule,
    ):  # fmt: skip
        self.model, self.optimizer = model, optimizer
        self.budget, self.steps, self.schedule = budget, steps, schedule
        self.score, self.repeat, self.padding_rows = score or d3(exp, eps), repeat, padding_rows(model)
        self.parameters = {name: p for name, p in model.named_parameters() if names is None or name in names}
        self.groups = groups or [(list(self.parameters), budget)]
        self.static = masks is not None
        nothing = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in self.parameters.items()}
        self.masks = {name: masks[name] for name in self.parameters} if self.static else nothing
        self.step_number = 0

    def step(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        is_due = self.step_number % self.schedule.get("every", 1) == 0
        if self.repeat:
            for mask in self.masks.values():
                mask.fill_(False)
            self.unmask(self.budget)
        elif not self.static and self.step_number < self.steps and is_due:
            for names, budget in self.groups:
                self.unmask(cumulative_target(self.step_number, self.steps, budget, **self.schedule), names)
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                parameter.grad[~self.masks[name]] = 0
        self.optimizer.step()
        self.step_number += 1

    def unmask(self, target, names=None):
        """Adds the best masked entries, of all tensors or some, by score, position of the tensor, and index in it."""
        scored = []
        for position, (name, parameter) in enumerate(self.parameters.items()):
            if parameter.grad is None or name not in (names or self.parameters):
                continue
            score = self.score(name, self.step_number, parameter.detach(), parameter.grad).clone()
            score[self.masks[name]] = -math.inf
            if name in self.padding_rows:
                score[self.padding_rows[name]] = -math.inf
            for index, value in enumerate(score.flatten().tolist()):
                if value > -math.inf:
                    scored.append((-value, position, name, index))
        unmasked = sum(int(mask.sum()) for name, mask in self.masks.items() if name in (names or self.masks))
        for _, _, name, index in sorted(scored)[: target - unmasked]:
            self.masks[name].view(-1)[index] = True

    def unmasked_sets(self):
        return {name: mask.flatten().nonzero().flatten().tolist() for name, mask in self.masks.items()}


def padding_rows(model):
    """The row of each embedding's table that stands for padding in all that hold it, by the table's first name."""
    rows = defaultdict(set)
    for module in model.modules():
        for parameter in module._parameters.values():
            rows[parameter].add(getattr(module, "padding_idx", None))
    paddings = {parameter: own.pop() for parameter, own in rows.items() if len(own) == 1}
    named = ((name, paddings.get(parameter)) for name, parameter in model.named_parameters())
    return {name: row for name, row in named if row is not None}


def unmasked_sets(model):
    return {tensor.name: sorted(tensor.indices.tolist()) for tensor in get_engine(model).tensors}


def sparsify_fully(model, steps=1):
    budget = sum(parameter.numel() for parameter in set(model.parameters()) if parameter.requires_grad)
    padding = sum(model.get_parameter(name).shape[-1] for name in padding_rows(model))
    return sparsify(model, budget - padding, Strategy(D3(exp=0), Increment()), steps=steps)


def model_gradients(model):
    gradients = {}
    for tensor in get_engine(model).tensors:
        gradient = torch.zeros(tensor.parameter.numel(), dtype=model.sparse_values.dtype)
        gradient[tensor.indices] = model.sparse_values.grad[tensor.slots]
        gradients[tensor.name] = gradient.view(tensor.parameter.shape)
    return gradients
