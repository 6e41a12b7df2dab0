"""Small models made of random parts, for random training programs: every way in which a weight is used."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

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
    """A layer whose weight is read past it, and which is called too."""

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
    def __init__(self):
        super().__init__(WIDTH, WIDTH, 3, padding=1, groups=2)

    def forward(self, x):
        return torch.tanh(super().forward(x.transpose(1, 2))).transpose(1, 2)


class Stacked(nn.Module):
    """Experts in one tensor; a token goes to one of them, some perhaps to none."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))

    def forward(self, x):
        share, expert = self.router(x).softmax(-1).max(-1)
        return share[..., None] * torch.einsum("btoi,bti->bto", self.weight[expert], x)


class Experts(nn.Module):
    """Experts in modules of their own, called with the tokens that are theirs, perhaps none."""

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
            if rows.numel() or number == 0:  # the first is called in any case, the others are left out
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
    def __init__(self):
        super().__init__(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


PARTS = {
    "layers": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH, bias=False)),
    "transposed": lambda: nn.Sequential(Conv1D(WIDTH, WIDTH), nn.Tanh()),
    "twice": Twice, "tied": tied, "read": Read, "norms": Norms, "convolution": Convolution, "stacked": Stacked,
    "experts": Experts, "listed": Listed, "mixed": Mixed, "attention": Attention,
    "shared": None,  # the part before it, again
}  # fmt: skip
HEADS = ("own", "tied", "read", "tied and read")


class Network(nn.Module):
    """Predicts tokens: a table, residual parts, a head; it has parameters of its own, one of them a number."""

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
        self.scale = nn.Parameter(torch.empty(()))

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
