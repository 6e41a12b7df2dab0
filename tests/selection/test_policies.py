"""Policies warn of an importance that leaves nothing to unmask, and of nothing else."""

import pytest
import torch
from models import build, loss_of, sparsified, train

from sparsify import D3, SNIP, Increment, Repeat, Strategy, get_engine, register_importance, sparsify

USELESS = {
    "NaN": lambda weight, grad: weight * torch.nan,
    "infinity": lambda weight, grad: torch.full_like(weight, torch.inf),
    "zero": lambda weight, grad: torch.zeros_like(weight),
    "negative": lambda weight, grad: -grad.abs(),
}


def assert_warned_once(importance, selection, message, zeros=False):
    model, batches = build("mlp")
    if zeros:
        for parameter in model.head.parameters():
            torch.nn.init.zeros_(parameter)
    sparsify(model, 20, Strategy(importance, selection), steps=5, target_modules=["head"])
    with pytest.warns(UserWarning, match=message) as told:
        train(model, batches[:3])
    assert len([warning for warning in told if "gave no masked entry" in str(warning.message)]) == 1
    assert get_engine(model).unmasked == 0


@pytest.mark.parametrize("kind", USELESS)
@pytest.mark.parametrize("selection", [Increment(), Repeat()])
@pytest.mark.parametrize("on_device", [False, True])
def test_an_importance_that_scores_nothing_is_warned_of_once_by_its_name(kind, selection, on_device, monkeypatch):
    monkeypatch.setattr("sparsify.selection.policies.runs_ahead", lambda device: on_device)
    useless = register_importance("test-policy-useless")(USELESS[kind])
    assert_warned_once(useless, selection, "'test-policy-useless' gave no masked entry a score above 0 in step 0")


def test_weights_without_a_finite_score_and_snip_on_zeros_are_warned_of():
    useless = register_importance("test-policy-weights", uses_gradient=False)(lambda weight: weight / 0)
    assert_warned_once(useless, Increment(), "'test-policy-weights' gave no masked entry a score that is finite")
    assert_warned_once(SNIP(), Increment(), "'snip' gave no masked entry a score above 0", zeros=True)


@pytest.mark.filterwarnings("error")
def test_no_warning_without_a_gradient_or_after_the_budget_is_unmasked():
    model, batches = sparsified("mlp", 20, Strategy(D3(), Increment()), steps=3)
    optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
    for batch, factor in zip(batches[:6], (0, 1, 1, 1, 0, 1), strict=True):
        optimizer.zero_grad()
        (factor * loss_of(model, batch)).backward()
        optimizer.step()
    assert get_engine(model).unmasked == 20


@pytest.mark.filterwarnings("error")
def test_gradients_that_overflow_are_not_blamed_on_the_importance():
    movement = register_importance("test-policy-movement")(lambda weight, grad: (weight * grad).abs())
    model, batches = sparsified("mlp", 20, Strategy(movement, Increment()), steps=3)
    (loss_of(model, batches[0]) * torch.inf).backward()
    assert get_engine(model).unmasked == 0
