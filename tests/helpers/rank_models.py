"""Small models and batches that every rank of a test makes alike, and each rank's part of a batch."""

import torch
from models import MLP
from torch import distributed as dist
from torch import nn

from sparsify import SparsifyError
from sparsify.common.ranks import num_ranks

STEPS, BUDGET, BATCH = 6, 60, 8
VOCABULARY, WIDTH = 24, 12


class Words(nn.Module):
    """Tokens to tokens, with a tied output layer, a norm and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.wide = nn.Linear(WIDTH, 20)
        self.narrow = nn.Linear(20, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.out.weight = self.table.weight

    def between(self, hidden):
        hidden = hidden + self.narrow(torch.relu(self.wide(hidden)))
        return self.norm(self.again(torch.tanh(self.again(hidden))))

    def forward(self, x, labels):
        logits = self.out(self.between(self.table(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def words(dtype=torch.float64, model_class=Words):
    torch.manual_seed(0)
    model = model_class().to(dtype)
    batches = [torch.randint(1, VOCABULARY, (BATCH, 5)) for _ in range(STEPS)]
    return model, [{"x": batch, "labels": batch.roll(1, 1)} for batch in batches]


def mlp(seed=0):
    torch.manual_seed(seed)
    model = MLP().double()
    return model, [
        {"x": torch.randn(BATCH, 6, dtype=torch.float64), "labels": torch.randint(3, (BATCH,))} for _ in range(STEPS)
    ]


def own_part(batch, rank):
    ranks = num_ranks()
    return {name: values.chunk(ranks)[rank] for name, values in batch.items()}


def mean_over_ranks(loss):
    loss = loss.detach().clone()
    if num_ranks() > 1:
        dist.all_reduce(loss)
    return loss.item() / num_ranks()


def error_of(function, *args):
    try:
        function(*args)
    except SparsifyError as error:
        return str(error)
    return "no error"
