"""The library against the dense oracle: the same losses, unmasked sets and weights."""

import copy
import hashlib
import math
from functools import partial

import pytest
import torch
from models import ARCHITECTURES, build, run_steps, sparsified, train
from oracle import d3, unmasked_sets
from torch.optim import SGD, AdamW
from twins import Twins, sgd

from sparsify import Schedule, extend, get_engine, register_importance, sparsify, summary
from sparsify.core.importance import D3
from sparsify.strategies.importance import Bias, Random
from sparsify.strategies.strategy import Increment, Repeat, Strategy

STEPS, BUDGET, SMALL = 10, 61, 12
OPTIMIZERS = {
    "sgd": sgd,
    "momentum": partial(SGD, lr=0.02, momentum=0.9),
    "adamw": partial(AdamW, lr=1e-2, weight_decay=0.0),
    "adamw-fused": partial(AdamW, lr=1e-2, weight_decay=0.0, fused=True),
}


def trained_sets(model):
    """The entries that the last step gave a gradient; for all but repeat-S those that are unmasked."""
    engine = get_engine(model)
    if not isinstance(engine.strategy.selection, Repeat):
        return unmasked_sets(model)
    active = engine.policy.active
    return {tensor.name: sorted(tensor.indices[active[tensor.slots]].tolist()) for tensor in engine.tensors}


def compare(name, optimizer, strategy="id3", budget=BUDGET, schedule="uniform", **options):
    dense, batches = build(name, dtype=torch.float64)
    sparse = sparsify(copy.deepcopy(dense), budget, strategy, steps=STEPS, schedule=schedule)
    # Adam divides by the root of a squared gradient; where that is all rounding error, so is the step
    options = {"sets": trained_sets, "tolerance": 1e-8, **options}
    return Twins(dense, sparse, budget, STEPS, OPTIMIZERS[optimizer], **options).train(batches[:STEPS])


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_several_passes_of_a_step_choose_by_the_sum_of_their_gradients(name, on_device, monkeypatch):
    monkeypatch.setattr("sparsify.selection.policies.runs_ahead", lambda device: on_device)
    twins = compare(name, "adamw", micro=2)
    assert get_engine(twins.sparse).step == STEPS // 2


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_modules_with_budgets_of_their_own_are_trained_as_the_oracle_trains_each(every, on_device, monkeypatch):
    monkeypatch.setattr("sparsify.selection.policies.runs_ahead", lambda device: on_device)
    dense, batches = build("llama", dtype=torch.float64)
    allocation = {"q_proj": 9, r"1\.mlp": 0.01, "mlp": 23}
    strategy = Strategy(D3(exp=2, eps=1), Increment(allocation=allocation))
    sparse = sparsify(copy.deepcopy(dense), SMALL, strategy, steps=STEPS, schedule=Schedule(every=every))
    names = [name for name, _ in dense.named_parameters()]
    budgets = {"0.self_attn.q_proj": 9, "1.self_attn.q_proj": 9, "0.mlp": 23, "1.mlp": 11}  # 0.01 of 1,152
    groups = [([name for name in names if f"{part}." in name], budget) for part, budget in budgets.items()]
    groups.append(([name for name in names if not any(name in own for own, _ in groups)], SMALL))
    Twins(dense, sparse, None, STEPS, groups=groups, every=every).train(batches[:STEPS])
    found = summary(sparse, verify=True)
    assert found.unmasked == found.budget == SMALL + 9 + 9 + 23 + 11
    assert found.verification.ok
    extend(sparse, budget=SMALL + 5, steps=STEPS + 3)  # of the others
    train(sparse, batches[:3])
    assert summary(sparse, verify=True).verification.ok
    assert get_engine(sparse).unmasked == found.budget + 5
    counts = [sum(len(unmasked_sets(sparse)[name]) for name in own) for own, _ in groups]
    assert counts == [9, 9, 23, 11, SMALL + 5]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bitfit_trains_every_bias_and_nothing_else(optimizer):
    model, _ = build("mlp")
    masks = {name: torch.full_like(p, name.endswith("bias"), dtype=torch.bool) for name, p in model.named_parameters()}
    compare("mlp", optimizer, "bitfit", budget=None, masks=masks)


def test_full_is_plain_fine_tuning():
    dense, batches = build("mlp")
    full = sparsify(copy.deepcopy(dense), None, "full")
    assert run_steps(full, batches)[0] == run_steps(dense, batches)[0]


movement = register_importance("movement")(lambda weight, grad: -weight * grad)
middling = register_importance("middling", uses_gradient=False)(lambda weight: -(weight.abs() - 0.1).abs())


def drawn(name, step, weight):
    """The numbers that ``Random()`` with seed 0 draws: one generator a tensor, and for repeat-S one a step."""
    seed = f"0:{name}" if step is None else f"0:{step}:{name}"
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little"))
    return torch.rand(weight.numel(), generator=generator).to(weight).view_as(weight)


def positive(score):
    return score.where(score > 0, -math.inf)


# importance -> the library's, and the oracle's score of (name, step, weight, grad); others are in program_oracle.py
IMPORTANCES = {
    "d3, exp -2": (D3(exp=-2, eps=0.1), d3(-2, 0.1)),
    "bias": (Bias(), lambda name, step, weight, grad: weight * 0 - (0 if name.endswith(".bias") else math.inf)),
    "random": (Random(), lambda name, step, weight, grad: drawn(name, step, weight)),
    "a user's own": (movement, lambda name, step, weight, grad: positive(-weight * grad)),
    "a user's own, of weights": (middling, lambda name, step, weight, grad: -(weight.abs() - 0.1).abs()),
}


@pytest.mark.parametrize("name", IMPORTANCES)
@pytest.mark.parametrize("selection", [Increment(), Repeat()], ids=lambda selection: selection.name)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_any_importance_goes_with_any_selection(name, selection, optimizer):
    importance, score = IMPORTANCES[name]
    repeat = isinstance(selection, Repeat)
    if name == "random" and not repeat:

        def score(name, step, weight, grad):
            return drawn(name, None, weight)  # one order for all steps

    compare("mlp", optimizer, Strategy(importance, selection), budget=25, score=score, repeat=repeat)


def test_each_step_trains_the_budget_and_touched_entries_add_up():
    model, batches = sparsified("mlp", SMALL, "d3-repeat", steps=6)
    assert model.sparse_values.numel() == 6 * SMALL
    touched = []
    for batch in batches[:6]:
        train(model, [batch])
        assert int(get_engine(model).policy.active.sum()) == int((model.sparse_values.grad != 0).sum()) == SMALL
        touched.append(summary(model).unmasked)
    assert touched == sorted(touched)
    assert SMALL == touched[0] < touched[-1] <= 6 * SMALL
    assert summary(model).updates == summary(model).static_updates == 6 * SMALL
    assert "touched" in str(summary(model))
    model = sparsify(build("mlp")[0], SMALL, Strategy(D3(), Repeat(capacity=SMALL + 2)))
    train(model, batches)  # where the room ends a step goes without new entries
    assert summary(model).unmasked == SMALL + 2
    assert 0 < int(get_engine(model).policy.active.sum()) <= SMALL
