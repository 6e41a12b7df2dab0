"""The library against the dense oracle: the same losses, unmasked sets and weights."""

import copy

import pytest
import torch
from models import ARCHITECTURES, build, loss_of
from oracle import DenseOracle, unmasked_sets

from sparsify import D3, Increment, Schedule, Strategy, sparsify

STEPS = 10
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0, fused=True),
}
# Adam divides by the root of a squared gradient; where that is all rounding error, so is the step
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6}


def compare(name, make_optimizer, budget, dtype=torch.float64, strategy="id3", steps=STEPS, run=STEPS, **options):
    """Trains both from the same weights on the same batches and compares them after every step."""
    dense, batches = build(name, dtype=dtype)
    sparse = copy.deepcopy(dense)
    schedule = options.pop("schedule", {})
    dense_optimizer = make_optimizer(dense.parameters())
    padding_row = next(((n, 0) for n, _ in dense.named_parameters() if name == "bert" and "word_emb" in n), None)
    oracle = DenseOracle(dense, dense_optimizer, budget, steps, padding_row=padding_row, **options, **schedule)
    sparsify(sparse, budget, strategy, steps=steps, schedule=Schedule(**schedule))
    sparse_optimizer = make_optimizer([sparse.sparse_values])
    for step in range(run):
        batch = batches[step % len(batches)]
        dense_loss, sparse_loss = loss_of(dense, batch), loss_of(sparse, batch)
        torch.testing.assert_close(sparse_loss, dense_loss, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        oracle.step(dense_loss)
        sparse_optimizer.zero_grad()
        sparse_loss.backward()
        sparse_optimizer.step()
        if dtype == torch.float64:
            assert unmasked_sets(sparse) == oracle.unmasked_sets()
        weights = dict(sparse.named_parameters())
        for parameter_name, parameter in dense.named_parameters():
            torch.testing.assert_close(
                weights[parameter_name], parameter, rtol=10 * TOLERANCE[dtype], atol=10 * TOLERANCE[dtype],
                check_device=False,
            )  # fmt: skip
    return sparse, oracle


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_id3_in_float64_is_the_oracle_to_the_last_entry(name, optimizer):
    sparse, _ = compare(name, OPTIMIZERS[optimizer], budget=97)
    assert sum(map(len, unmasked_sets(sparse).values())) == 97


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_id3_in_float32_has_the_oracles_losses_and_weights(name):
    compare(name, OPTIMIZERS["sgd"], budget=97, dtype=torch.float32)


@pytest.mark.parametrize("shape", ["uniform", "linear", "cubic", "cosine"])
@pytest.mark.parametrize(("every", "until"), [(1, 1.0), (3, 1.0), (1, 0.5), (4, 0.7)])
def test_every_schedule_unmasks_what_the_oracle_does(shape, every, until):
    schedule = {"shape": shape, "every": every, "until": until}
    compare("mlp", OPTIMIZERS["adamw"], budget=61, schedule=schedule, run=STEPS + 2)


@pytest.mark.parametrize(("exp", "eps"), [(0, 1), (1, 1e-3), (-1, 1), (-2, 0.1)])
def test_every_exponent_scores_as_the_oracle_does(exp, eps):
    strategy = Strategy(D3(exp=exp, eps=eps), Increment())
    compare("mlp", OPTIMIZERS["adamw"], budget=61, strategy=strategy, exp=exp, eps=eps)


def smallest_magnitudes(model, budget):
    """PaFi, densely: the ``budget`` smallest weights of the whole model."""
    entries = [
        (value, position, name, index)
        for position, (name, parameter) in enumerate(model.named_parameters())
        for index, value in enumerate(parameter.detach().abs().flatten().tolist())
    ]
    masks = {name: torch.zeros_like(parameter, dtype=torch.bool) for name, parameter in model.named_parameters()}
    for _, _, name, index in sorted(entries)[:budget]:
        masks[name].view(-1)[index] = True
    return masks


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_pafi_trains_the_smallest_weights(optimizer):
    model, _ = build("mlp", dtype=torch.float64)
    sparse, oracle = compare(
        "mlp", OPTIMIZERS[optimizer], budget=50, strategy="pafi", masks=smallest_magnitudes(model, 50)
    )
    assert unmasked_sets(sparse) == oracle.unmasked_sets()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bitfit_trains_every_bias_and_nothing_else(optimizer):
    model, _ = build("mlp", dtype=torch.float64)
    masks = {name: torch.full_like(p, name.endswith("bias"), dtype=torch.bool) for name, p in model.named_parameters()}
    budget = sum(int(mask.sum()) for mask in masks.values())
    sparse, oracle = compare("mlp", OPTIMIZERS[optimizer], budget=budget, strategy="bitfit", masks=masks)
    assert unmasked_sets(sparse) == oracle.unmasked_sets()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_random_trains_exactly_the_entries_it_drew(optimizer):
    model, _ = build("mlp", dtype=torch.float64)
    drawn = sparsify(copy.deepcopy(model), 50, "random")
    masks = {name: torch.zeros_like(parameter, dtype=torch.bool) for name, parameter in model.named_parameters()}
    for name, indices in unmasked_sets(drawn).items():
        masks[name].view(-1)[indices] = True
    compare("mlp", OPTIMIZERS[optimizer], budget=50, strategy="random", masks=masks)


def test_full_is_plain_fine_tuning():
    dense, batches = build("mlp")
    full = sparsify(copy.deepcopy(dense), None, "full")
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in (dense, full)]
    for batch in batches:
        losses = [loss_of(model, batch) for model in (dense, full)]
        assert torch.equal(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
