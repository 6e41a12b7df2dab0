"""Random training programs, each made from a seed: a model of random parts, a strategy and a script of actions.

``run(program(7).but(script=...))`` makes a failing one smaller.
"""

import random
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from program_oracle import IMPORTANCES, OPTIMIZERS
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from sparsify.common.ranks import num_ranks

VOCABULARY, TOKENS, WIDTH, EXPERTS = 11, 4, 6, 3


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


def tied():
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    layers[2].weight = layers[0].weight
    return layers


class Read(Twice):
    def forward(self, x):
        return self.layer(torch.tanh(F.linear(x, self.layer.weight.t())))


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.rms, self.group = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-6), nn.GroupNorm(2, WIDTH)

    def forward(self, x):
        x = torch.tanh(self.rms(x) + self.layer(x))
        return self.group(x.transpose(1, 2)).transpose(1, 2)


class Convolution(nn.Conv1d):
    def forward(self, x):
        return torch.tanh(super().forward(x.transpose(1, 2))).transpose(1, 2)


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))

    def forward(self, x):
        share, expert = self.router(x).softmax(-1).max(-1)
        return share[..., None] * torch.einsum("btoi,bti->bto", self.weight[expert], x)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        share, chosen = self.router(tokens).softmax(-1).max(-1)
        output = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if rows.numel() or number == 0 or num_ranks() > 1:  # the first is called in any case, others are left out
                output = output.index_add(0, rows, share[rows, None] * expert(tokens[rows]))
        return output.view_as(x)


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.vectors = nn.ParameterList([torch.empty(WIDTH) for _ in range(3)])

    def forward(self, x):
        return torch.tanh(x * self.vectors[0] + sum(self.vectors[1:]))


class Mixed(nn.Bilinear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH, WIDTH)
        self.slope = nn.PReLU()

    def forward(self, x):
        return super().forward(torch.tanh(x), self.slope(x))


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


PARTS = {
    "layers": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH, bias=False)),
    "transposed": lambda: nn.Sequential(Conv1D(WIDTH, WIDTH), nn.Tanh()),
    "twice": Twice, "tied": tied, "read": Read, "norms": Norms,
    "convolution": lambda: Convolution(WIDTH, WIDTH, 3, padding=1, groups=2), "stacked": Stacked,
    "experts": Experts, "listed": Listed, "mixed": Mixed,
    "attention": lambda: Attention(WIDTH, 2, batch_first=True),
    "shared": None,  # the part before it, again
}  # fmt: skip
HEADS = ("own", "tied", "read", "tied and read")


class Network(nn.Module):
    def __init__(self, parts, checkpointed, head, padding):
        super().__init__()
        self.checkpointed, self.reads_table = checkpointed, "read" in head
        self.table = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.positions = nn.Parameter(torch.empty(TOKENS, WIDTH))
        self.parts = nn.ModuleList()
        for kind in parts:
            shared = kind == "shared" and len(self.parts) > 0
            self.parts.append(self.parts[-1] if shared else (PARTS[kind] or Twice)())
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if "tied" in head:
            self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.empty((1,) if num_ranks() > 1 else ()))  # FSDP2 takes no scalars

    def forward(self, tokens, labels, skipped=(), probe=lambda place, hidden: hidden):
        """The loss; ``probe`` sees the hidden states before each part and after the last."""
        hidden = self.table(tokens) + self.positions
        for number, part in enumerate(self.parts):
            hidden = probe(number, hidden)
            if number in skipped:
                continue
            if self.checkpointed[number]:
                hidden = hidden + checkpoint(part, hidden, use_reentrant=False)
            else:
                hidden = hidden + part(hidden)
        hidden = probe(len(self.parts), hidden)
        logits = self.head(torch.tanh(hidden))
        if self.reads_table:
            logits = logits + F.linear(hidden, self.table.weight)
        return F.cross_entropy(self.scale * logits.flatten(0, 1), labels.flatten())


# of actions, those named often more often
KINDS = {
    "backward": ("one", "one", "one", "summed", "pending", "retained", "kept"),
    "fail": ("forward", "backward", "recomputed"),
    "evaluate": ("no grad", "inference", "eval", "dropped", "base"),
    "resume": ("state_dict", "trained_state"),
    "copy": ("deepcopy", "pickle"),
}


class Program(SimpleNamespace):
    """A random model and a script of actions, each the name of a method of ``Run`` and its arguments."""

    def but(self, **changes):
        return Program(**{**vars(self), **changes})

    def __str__(self):
        settings = [f"{name:12} = {value!r}" for name, value in vars(self).items() if name != "script"]
        actions = [f"    {name}({', '.join(map(repr, arguments))})" for name, *arguments in self.script]
        return "\n".join([*settings, "script:", *actions])

    def model(self):
        torch.manual_seed(self.seed)
        model = Network(self.parts, self.checkpointed, self.head, self.padding)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape) + (0.5 if parameter.dim() < 2 else 0))
                if self.coarse:
                    parameter.copy_((4 * parameter).round() / 4)
        for name in self.frozen:
            model.get_submodule(name).requires_grad_(False)
        return model.to(self.dtype).train()

    def batches(self):
        """Tokens, labels and the numbers of the parts that are skipped, of ten batches."""
        generator = torch.Generator().manual_seed(self.seed)
        rng, batches = random.Random(self.seed), []
        for _ in range(10):
            tokens, labels = torch.randint(VOCABULARY, (2, rng.randint(1, 3), TOKENS), generator=generator)
            skipped = tuple(number for number in range(len(self.parts)) if rng.random() < 0.15)
            batches.append((tokens, labels, skipped))
        return batches


def program(seed):
    """The program of a seed; kinds of parts and optimizers take turns, the rest is drawn."""
    rng = random.Random(seed)
    kinds, optimizers = list(PARTS), list(OPTIMIZERS)
    parts = (kinds[seed % len(kinds)], *rng.choices(kinds, k=rng.randint(1, 3)))
    checkpointed = tuple(rng.random() < 0.3 for _ in parts)
    importance = rng.choice(["D3", "D3", "D3", *IMPORTANCES])
    static = 4 if importance in ("smallest", "largest") else 0  # the others would need a calibration
    selection = rng.choices(["increment", "repeat", "static", "given"], [14, 2, static, 1])[0]
    schedule = {
        "shape": rng.choice(["uniform", "uniform", "linear", "cubic", "cosine"]),
        "every": rng.choice([1, 1, 1, 2, 3]),
        "until": rng.choice([1.0, 1.0, 0.5]),
    }
    steps, dtype = rng.randint(2, 6), rng.choices([torch.float64, torch.float32, torch.bfloat16], [6, 2, 1])[0]
    return Program(
        seed=seed, parts=parts, checkpointed=checkpointed, head=rng.choice(HEADS),
        padding=rng.choice([None, None, 0, VOCABULARY - 1]),
        frozen=tuple(f"parts.{number}" for number in range(len(parts)) if rng.random() < 0.1),
        coarse=rng.random() < 0.3,  # weights are multiples of 1/4, so that many are equal
        dtype=dtype, importance=importance,
        selection=selection,  # or "given": a set that is drawn
        share=rng.choice([0.002, 0.01, 0.05, 0.05, 0.3, 0.95]),  # of the candidates
        steps=steps, schedule=schedule if selection == "increment" else {},
        optimizer=optimizers[seed % len(optimizers)],
        scaled=rng.random() < 0.3,  # by GradScaler
        clip=rng.choice([None, None, 0.1]), set_to_none=rng.random() < 0.8,
        tiny=rng.random() < 0.4,  # small tensors go the ways of large ones
        script=tuple(_script(rng, steps + rng.randint(-1, 1), len(parts))),
        select=rng.choice(["all", "all", "all", "first"]),  # of increment-S
    )  # fmt: skip


def _script(rng, steps, parts):
    place, batch = (lambda: rng.randrange(parts + 1)), (lambda: rng.randrange(10))
    yield ("sparsify",)
    for _ in range(max(1, steps)):
        overflowing = rng.random() < 0.12
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            if rng.random() < 0.12:
                yield "fail", rng.choice(KINDS["fail"]), place(), batch()
            if rng.random() < 0.12:
                yield "evaluate", rng.choice(KINDS["evaluate"]), batch()
            kind, overflow = rng.choice(KINDS["backward"]), place() if overflowing and rng.random() < 0.6 else None
            yield "backward", kind, batch(), batch(), overflow
        yield ("step",)
        if rng.random() < 0.12:
            yield "resume", rng.choice(KINDS["resume"])
        if rng.random() < 0.1:
            yield "copy", rng.choice(KINDS["copy"])
    yield ("export",)
