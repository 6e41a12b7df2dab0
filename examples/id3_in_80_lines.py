"""The paper's Algorithm 1 (ID3) written densely, next to ``sparsify()``: the same entries, the same weights.

    python examples/id3_in_80_lines.py

    theta     the model's parameters: N numbers, of which B (the budget) are trained in T steps
    u_t       how many of them are unmasked at step t; uniform: B / T
    H         importance of an entry: |gradient| / (|theta| + eps)^exp, the heuristic D3
    lambda_t  the u_t entries with the largest H among those that are masked
    Lambda_t  all entries that are unmasked so far; it only grows (increment-S)

``algorithm_1`` keeps N gradients, N scores, N masks and 2 N moments of AdamW. ``with_sparsify`` keeps B of each.
"""

# ruff: noqa: N806, the names are the paper's symbols
import copy

import torch
from torch import nn
from torch.nn import functional as F

from sparsify import get_engine, sparsify

B, T = 200, 20
EXP, EPS = 2, 1.0
ETA = 3e-2  # learning rate


def algorithm_1(model, batches):
    """Trains a model at B of its entries; yields the loss and Lambda_{t+1} (N,) after each step t."""
    theta = list(model.parameters())
    sizes = [p.numel() for p in theta]
    Lambda = torch.zeros(sum(sizes), dtype=torch.bool)
    optimizer = torch.optim.AdamW(theta, lr=ETA, weight_decay=0.0)  # decay would move masked entries
    for t, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        H = torch.cat([(p.grad.abs() / (p.detach().abs() + EPS) ** EXP).flatten() for p in theta])
        u_t = (t + 1) * B // T - t * B // T
        lambda_t = H.masked_fill(Lambda, -1).topk(u_t).indices
        Lambda[lambda_t] = True
        for p, unmasked in zip(theta, Lambda.split(sizes), strict=True):
            p.grad *= unmasked.view_as(p)  # the masked entries' gradient is 0, and so are their moments
        optimizer.step()
        yield loss.item(), Lambda.clone()


def with_sparsify(model, batches):
    """The same by the library."""
    Lambda = {name: torch.zeros(p.numel(), dtype=torch.bool) for name, p in model.named_parameters()}
    sparsify(model, budget=B, strategy="id3", steps=T)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=ETA, weight_decay=0.0)
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        for tensor in get_engine(model).tensors:
            Lambda[tensor.name][tensor.indices] = True
        yield loss.item(), torch.cat([*Lambda.values()])


if __name__ == "__main__":
    torch.manual_seed(0)
    layers = nn.Embedding(20, 16), nn.Flatten(), nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 4)
    dense = nn.Sequential(*layers)
    sparse = copy.deepcopy(dense)
    batches = [(x, x[:, 0] % 4) for x in (torch.randint(20, (64, 4)) for _ in range(T))]
    print(" t  loss (dense)  loss (sparsify)  unmasked  the same entries")
    for t, (a, b) in enumerate(zip(algorithm_1(dense, batches), with_sparsify(sparse, batches), strict=True)):
        print(f"{t:2}  {a[0]:12.6f}  {b[0]:15.6f}  {int(b[1].sum()):8}  {'yes' if a[1].equal(b[1]) else 'NO'}")
    weights = zip(dense.state_dict().values(), (sparse.state_dict()[name] for name in dense.state_dict()), strict=True)
    print(f"largest difference between two weights: {max(float((a - b).abs().max()) for a, b in weights):.1e}")
    print(f"numbers in the optimizer: {2 * len(a[1]):,} dense, {2 * len(sparse.sparse_values):,} with sparsify")
