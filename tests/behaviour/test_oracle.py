"""The library against the dense oracle: the same losses, unmasked sets and weights."""

import copy
import hashlib
import math

import pytest
import torch
from models import build, sparsified, train
from oracle import d3, unmasked_sets
from twins import Twins

from sparsify import Schedule, extend, get_engine, register_importance, sparsify, summary
from sparsify.core.importance import D3
from sparsify.strategies.importance import Bias, Random
from sparsify.strategies.strategy import Increment, Repeat, Strategy

STEPS, SMALL = 10, 12


def trained_sets(model):
    """The entries that the last step gave a gradient; for all but repeat-S those that are unmasked."""
    engine = get_engine(model)
    if not isinstance(engine.strategy.selection, Repeat):
        return unmasked_sets(model)
    active = engine.policy.active
    return {tensor.name: sorted(tensor.indices[active[tensor.slots]].tolist()) for tensor in engine.tensors}


def compare(strategy, budget, **options):
    dense, batches = build("mlp", dtype=torch.float64)
    sparse = sparsify(copy.deepcopy(dense), budget, strategy, steps=STEPS)
    Twins(dense, sparse, budget, STEPS, sets=trained_sets, **options).train(batches[:STEPS])


@pytest.mark.parametrize(("every", "on_device"), [(1, False), (3, True)])
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


movement = register_importance("movement")(lambda weight, grad: -weight * grad)
middling = register_importance("middling", uses_gradient=False)(lambda weight: -(weight.abs() - 0.1).abs())


def drawn(name, step, weight):
    """Scores by the order in which ``Random()`` with seed 0 draws 25 entries; for repeat-S in each step."""
    sizes = {name: parameter.numel() for name, parameter in build("mlp")[0].named_parameters()}
    seed = "0" if step is None else f"0:{step}"
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little"))
    found = set()
    while len(found) < 25:
        found.update(torch.randint(sum(sizes.values()), (25 - len(found),), generator=generator).tolist())
    ids = torch.tensor(sorted(found))[torch.randperm(25, generator=generator)]
    scores = torch.full((sum(sizes.values()),), -math.inf).index_copy(0, ids, torch.arange(25.0).flip(0))
    return dict(zip(sizes, scores.split([*sizes.values()]), strict=True))[name].to(weight).view_as(weight)


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
def test_any_importance_goes_with_any_selection(name, selection):
    importance, score = IMPORTANCES[name]
    repeat = isinstance(selection, Repeat)
    if name == "random" and not repeat:

        def score(name, step, weight, grad):
            return drawn(name, None, weight)  # one order for all steps

    compare(Strategy(importance, selection), 25, score=score, repeat=repeat)


def test_touched_entries_of_repeat_add_up_as_far_as_there_is_room():
    model, batches = sparsified("mlp", SMALL, "d3-repeat", steps=6)
    train(model, batches[:6])
    assert SMALL < summary(model).unmasked <= model.sparse_values.numel() == 6 * SMALL
    assert summary(model).updates == summary(model).static_updates == 6 * SMALL
    assert "touched" in str(summary(model))
    model = sparsify(build("mlp")[0], SMALL, Strategy(D3(), Repeat(capacity=SMALL + 2)))
    train(model, batches)  # where the room ends a step goes without new entries
    assert summary(model).unmasked == SMALL + 2
    assert 0 < int(get_engine(model).policy.active.sum()) <= SMALL
