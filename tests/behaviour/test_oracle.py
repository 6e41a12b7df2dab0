"""The library against the dense oracle: the same losses, unmasked sets and weights."""

import copy
import hashlib
import math

import pytest
import torch
from models import ARCHITECTURES, build, loss_of
from oracle import DenseOracle, d3, unmasked_sets

from sparsify import (
    D3,
    Bias,
    Fisher,
    Increment,
    Magnitude,
    Random,
    Repeat,
    Schedule,
    Static,
    Strategy,
    get_unmasker,
    register_importance,
    sparsify,
)  # fmt: skip

STEPS = 10
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0, fused=True),
}
# Adam divides by the root of a squared gradient; where that is all rounding error, so is the step
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6}


def trained_sets(model):
    """The entries that the last step gave a gradient; for all but repeat-S those that are unmasked."""
    engine = get_unmasker(model)
    if not isinstance(engine.strategy.selection, Repeat):
        return unmasked_sets(model)
    active = engine.policy.active
    return {tensor.name: sorted(tensor.indices[active[tensor.slots]].tolist()) for tensor in engine.tensors}


def compare(
    name,
    make_optimizer,
    budget,
    dtype=torch.float64,
    strategy="id3",
    steps=STEPS,
    run=STEPS,
    calibration=None,
    **options,
):
    """Trains both from the same weights on the same batches and compares them after every step."""
    dense, batches = build(name, dtype=dtype)
    sparse = copy.deepcopy(dense)
    schedule = options.pop("schedule", {})
    dense_optimizer = make_optimizer(dense.parameters())
    oracle = DenseOracle(dense, dense_optimizer, budget, steps, **options, **schedule)
    sparsify(sparse, budget, strategy, steps=steps, schedule=Schedule(**schedule), calibration=calibration)
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
            assert trained_sets(sparse) == oracle.unmasked_sets()
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


@register_importance("movement")
def movement(weight, grad):
    return -weight * grad


@register_importance("middling", uses_gradient=False)
def middling(weight):
    return -(weight.abs() - 0.1).abs()


def drawn(name, step, weight):
    """The numbers that ``Random()`` with seed 0 draws: one generator a tensor, and for repeat-S one a step."""
    seed = f"0:{name}" if step is None else f"0:{step}:{name}"
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little"))
    return torch.rand(weight.numel(), generator=generator).to(weight).view_as(weight)


def positive(score):
    return score.where(score > 0, -math.inf)


# importance -> the library's, and the oracle's score of (name, step, weight, grad)
IMPORTANCES = {
    "d3": (D3(exp=2, eps=1), d3(2, 1)),
    "gradient magnitude": (D3(exp=0), d3(0, 1)),
    "fisher": (Fisher(num_samples=20), lambda name, step, weight, grad: positive(grad**2)),
    "magnitude": (Magnitude(), lambda name, step, weight, grad: -weight.abs()),
    "largest": (Magnitude(largest=True), lambda name, step, weight, grad: weight.abs()),
    "bias": (
        Bias(),
        lambda name, step, weight, grad: torch.full_like(weight, 0.0 if name.endswith(".bias") else -math.inf),
    ),
    "random": (Random(), lambda name, step, weight, grad: drawn(name, step, weight)),
    "a user's own": (movement, lambda name, step, weight, grad: positive(-weight * grad)),
    "a user's own, of weights": (middling, lambda name, step, weight, grad: -(weight.abs() - 0.1).abs()),
}
BUDGET = 25


def calibrated(model, batches, examples):
    """Summed gradients, and squared gradients summed over single examples, of the plain model."""
    sums = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in model.named_parameters()}
    singles = [{key: value[i : i + 1] for key, value in batch.items()} for batch in batches for i in range(12)]
    for which, parts in ((0, batches), (1, singles[:examples])):
        for part in parts:
            model.zero_grad()
            loss_of(model, part).backward()
            for name, parameter in model.named_parameters():
                sums[name][which] += parameter.grad**2 if which else parameter.grad
    model.zero_grad()
    return {name: pair[0] for name, pair in sums.items()}, {name: pair[1] for name, pair in sums.items()}


def static_masks(model, importance, score, batches):
    gradients, squares = calibrated(model, batches, examples=20)
    if isinstance(importance, Fisher):
        score, gradients = (lambda name, step, weight, grad: positive(grad)), squares
    oracle = DenseOracle(model, None, BUDGET, 1, score=score)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    oracle.step_number = None
    oracle.unmask(BUDGET)
    model.zero_grad()
    return oracle.masks


@pytest.mark.parametrize("name", IMPORTANCES)
@pytest.mark.parametrize("selection", [Static(), Increment(), Repeat()], ids=lambda selection: selection.name)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_any_importance_goes_with_any_selection(name, selection, optimizer):
    importance, score = IMPORTANCES[name]
    options = {"score": score}
    if isinstance(selection, Static):
        model, batches = build("mlp", dtype=torch.float64)
        options["masks"] = static_masks(model, importance, score, batches[:3])
        options["calibration"] = batches[:3] if importance.uses_gradient else None
    elif isinstance(selection, Increment) and name == "random":
        options["score"] = lambda name, step, weight, grad: drawn(name, None, weight)  # one order for all steps
    options["repeat"] = isinstance(selection, Repeat)
    compare("mlp", OPTIMIZERS[optimizer], BUDGET, strategy=Strategy(importance, selection), **options)


@pytest.mark.parametrize("preset", ["d3-repeat", "fish"])
def test_the_other_presets_are_what_they_say(preset):
    importance, selection = (D3(exp=2, eps=1), Repeat()) if preset == "d3-repeat" else (Fisher(), Static())
    model, batches = build("mlp", dtype=torch.float64)
    calibration = batches[:1] if preset == "fish" else None
    runs = [sparsify(copy.deepcopy(model), BUDGET, s, steps=4, calibration=calibration)
            for s in (preset, Strategy(importance, selection))]  # fmt: skip
    assert unmasked_sets(runs[0]) == unmasked_sets(runs[1])
    assert get_unmasker(runs[0]).strategy == get_unmasker(runs[1]).strategy
