"""Small real architectures with random weights and no dropout, and a batch for each."""

from functools import partial

import torch
from torch import nn

from sparsify import sparsify

VOCABULARY, CLASSES = 40, 3


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.second = nn.Linear(10, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x, labels):
        hidden = self.norm(torch.tanh(self.first(x)))
        return nn.functional.cross_entropy(self.head(torch.relu(self.second(hidden))), labels)


class Extended(nn.Module):
    """A pretrained body and buffers, one of them idle, and what the base does not have: an adapter and a head."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.idle = nn.Linear(6, 30), nn.BatchNorm1d(30), nn.BatchNorm1d(30)
        self.frozen, self.adapter, self.head = nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, CLASSES)

    def forward(self, x, labels):
        hidden = self.adapter(self.frozen(self.norm(self.body(x))))
        return nn.functional.cross_entropy(self.head(hidden), labels)


def mlp():
    return MLP(), lambda: {"x": torch.randn(12, 6), "labels": torch.randint(CLASSES, (12,))}


def tokens():
    return {"input_ids": torch.randint(3, VOCABULARY, (4, 10)), "attention_mask": torch.ones(4, 10, dtype=torch.long)}


def labelled_text():
    return {**tokens(), "labels": torch.randint(CLASSES, (4,))}


def next_tokens():
    batch = tokens()
    return {**batch, "labels": batch["input_ids"].roll(1, 1)}


def transformer(name, batch, **sizes):
    import transformers  # here, since the MLP needs none
    from architectures import ARCHITECTURES

    model, config_class, config, _ = ARCHITECTURES[name]
    config = getattr(transformers, config_class)(**{**config, "vocab_size": VOCABULARY, **sizes})
    return getattr(transformers, model)(config), batch


bert = partial(transformer, "bert", labelled_text, intermediate_size=24)
gpt2 = partial(transformer, "gpt2", next_tokens, n_inner=24)
t5 = partial(transformer, "t5", next_tokens, d_ff=24, feed_forward_proj="relu")
llama = partial(transformer, "llama", next_tokens, intermediate_size=24, pad_token_id=None)
ARCHITECTURES = {"mlp": mlp, "bert": bert, "gpt2": gpt2, "t5": t5, "llama": llama}


def build(name, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    model, batch = ARCHITECTURES[name]()
    batches = [{k: v.to(dtype) if v.is_floating_point() else v for k, v in batch().items()} for _ in range(12)]
    return model.to(dtype).train(), batches


def sparsified(name, budget, strategy="id3", **options):
    model, batches = build(name)
    return sparsify(model, budget, strategy, **options), batches


def loss_of(model, batch):
    output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output["loss"]


def train(model, batches, lr=0.01, optimizer=None):
    run_steps(model, batches, optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr))
    return model


def run_steps(model, batches, optimizer=None, loss_of=loss_of):
    if optimizer is None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


def descend(model, inputs, lr=0.1):
    optimizer = torch.optim.SGD([model.sparse_values], lr=lr)
    run_steps(model, inputs, optimizer, lambda model, x: model(x).float().square().mean())
    return model
