"""The library against the dense oracle: the same losses, unmasked sets and weights."""

import copy
import hashlib
import math

import pytest
import torch
from models import ARCHITECTURES, build, loss_of
from oracle import DenseOracle, d3, unmasked_sets
from twins import Twins, sgd

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


class ClippedAdamW(torch.optim.AdamW):
    """Clips the norm of its gradients: that of the entries in training, as their number grows."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.01)
        return super().step(closure)


OPTIMIZERS = {
    "sgd": sgd,
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0, fused=True),
    "adamw-clipped": lambda parameters: ClippedAdamW(parameters, lr=1e-2, weight_decay=0.0),
}


def trained_sets(model):
    """The entries that the last step gave a gradient; for all but repeat-S those that are unmasked."""
    engine = get_unmasker(model)
    if not isinstance(engine.strategy.selection, Repeat):
        return unmasked_sets(model)
    active = engine.collection.policy.active
    return {tensor.name: sorted(tensor.indices[active[tensor.slots]].tolist()) for tensor in engine.tensors}


def compare(name, optimizer, budget, strategy="id3", run=STEPS, calibration=None, schedule=None, **options):
    """Trains twins of a model in float64 for ``run`` of ``STEPS`` planned steps; the sparsified one."""
    dense, batches = build(name, dtype=torch.float64)
    schedule = schedule or {}
    sparse = sparsify(
        copy.deepcopy(dense), budget, strategy, steps=STEPS, schedule=Schedule(**schedule), calibration=calibration
    )
    twins = Twins(dense, sparse, budget, STEPS, OPTIMIZERS[optimizer], sets=trained_sets, **schedule, **options)
    twins.train(batches[:run])
    return sparse


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_id3_in_float64_is_the_oracle_to_the_last_entry(name, optimizer):
    sparse = compare(name, optimizer, budget=97)
    assert sum(map(len, unmasked_sets(sparse).values())) == 97


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_id3_in_float32_has_the_oracles_losses_and_weights(name):
    dense, batches = build(name)
    sparse = sparsify(copy.deepcopy(dense), 97, steps=STEPS)
    Twins(dense, sparse, 97, STEPS, tolerance=1e-6, sets=None).train(batches[:STEPS])


@pytest.mark.parametrize("shape", ["uniform", "linear", "cubic", "cosine"])
@pytest.mark.parametrize(("every", "until"), [(1, 1.0), (3, 1.0), (1, 0.5), (4, 0.7)])
def test_every_schedule_unmasks_what_the_oracle_does(shape, every, until):
    schedule = {"shape": shape, "every": every, "until": until}
    compare("mlp", "adamw", budget=61, schedule=schedule, run=STEPS + 2)


@pytest.mark.parametrize(("exp", "eps"), [(0, 1), (1, 1e-3), (-1, 1), (-2, 0.1)])
def test_every_exponent_scores_as_the_oracle_does(exp, eps):
    strategy = Strategy(D3(exp=exp, eps=eps), Increment())
    compare("mlp", "adamw", budget=61, strategy=strategy, exp=exp, eps=eps)


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
    compare("mlp", optimizer, BUDGET, strategy=Strategy(importance, selection), **options)
