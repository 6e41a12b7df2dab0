"""The calibration pass sums up gradients of the plain model and leaves it as it was."""

import copy

import pytest
import torch
from models import build, loss_of
from torch import nn
from tqdm import tqdm

from sparsify import D3, Fisher, SparsifyError, sparsify
from sparsify.calibration import calibrate


@pytest.fixture
def model_and_batches():
    return build("mlp", dtype=torch.float64)


def gradient(model, batch):
    plain = copy.deepcopy(model)
    loss_of(plain, batch).backward()
    return [parameter.grad for parameter in plain.parameters()]


def examples(batches):
    return [{key: value[i : i + 1] for key, value in batch.items()} for batch in batches for i in range(12)]


def assert_close(totals, expected):
    for total, grad in zip(totals, expected, strict=True):
        torch.testing.assert_close(total, grad)


def test_gradients_of_batches_are_summed(model_and_batches):
    model, batches = model_and_batches
    totals = calibrate(model, list(model.parameters()), D3(), iter(batches[:3]))
    assert_close(totals, [sum(grads) for grads in zip(*(gradient(model, b) for b in batches[:3]), strict=True)])


@pytest.mark.parametrize("num_samples", [1, 12, 17, 1024])
def test_fisher_squares_the_gradients_of_single_examples_up_to_its_number(model_and_batches, num_samples):
    model, batches = model_and_batches
    totals = calibrate(model, list(model.parameters()), Fisher(num_samples), batches[:2])
    squares = [[grad**2 for grad in gradient(model, example)] for example in examples(batches[:2])[:num_samples]]
    assert_close(totals, [sum(of_parameter) for of_parameter in zip(*squares, strict=True)])


def test_fisher_does_not_read_more_batches_than_it_needs(model_and_batches):
    model, batches = model_and_batches

    waiting = iter(batches)
    calibrate(model, list(model.parameters()), Fisher(num_samples=24), waiting)
    assert next(waiting) is batches[2]


def test_a_function_that_runs_backward_itself_does_the_same(model_and_batches):
    model, batches = model_and_batches

    def run(model):
        for example in examples(batches[:2]):
            loss_of(model, example).backward()

    totals = calibrate(model, list(model.parameters()), Fisher(num_samples=24), run)
    assert_close(totals, calibrate(model, list(model.parameters()), Fisher(num_samples=24), batches[:2]))


def test_a_loss_of_ones_own(model_and_batches):
    model, batches = model_and_batches
    totals = calibrate(model, list(model.parameters()), D3(), batches[:1], lambda model, batch: 3 * model(**batch))
    assert_close(totals, [3 * grad for grad in gradient(model, batches[0])])


def test_the_model_is_left_as_it_was():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))

        def forward(self, x):
            return self.layers(x).square().mean()

    model = Net()
    model.layers[1].eval()
    model.layers[0].weight.grad = grad = torch.ones(4, 4)
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    with torch.no_grad():  # whatever the caller's mode
        calibrate(model, [model.layers[0].weight], D3(), [{"x": torch.randn(8, 4, generator=torch.Generator())}])
    assert model.layers[0].weight.grad is grad
    assert torch.equal(grad, torch.ones(4, 4))
    assert model.layers[3].weight.grad is None
    assert [module.training for module in model.layers] == [True, False, True, True]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_failure_leaves_the_model_as_it_was(model_and_batches):
    model, batches = model_and_batches

    def run(model):
        loss_of(model, batches[0]).backward()
        raise KeyError("nothing of ours")

    with pytest.raises(KeyError):
        sparsify(model, 20, "fish", calibration=run)
    assert all(p.grad is None and p.requires_grad and not p._post_accumulate_grad_hooks for p in model.parameters())
    assert model.training


def test_a_model_that_makes_no_loss_says_so():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(SparsifyError, match="Sequential made no loss of a calibration batch with input; put labels"):
        calibrate(model, list(model.parameters()), D3(), [{"input": torch.ones(3, 2)}])


@pytest.mark.parametrize(("importance", "total", "passes"), [(Fisher(num_samples=5), 5, 5), (D3(), None, 2)])
def test_progress_is_shown_for_every_backward_pass(model_and_batches, monkeypatch, importance, total, passes):
    model, batches = model_and_batches
    shown = []

    def bar(**settings):
        shown.append(tqdm(**settings))
        return shown[-1]

    monkeypatch.setattr("tqdm.auto.tqdm", bar)
    calibrate(model, list(model.parameters()), importance, batches[:2])
    assert [(bar.total, bar.n) for bar in shown] == [(total, passes)]


def test_more_entries_than_have_a_gradient_are_refused():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(4, 1))
    batch = {"input": torch.tensor([[3]])}
    with pytest.raises(SparsifyError, match=r"budget=30, but only 9 entries have an importance above 0"):
        sparsify(model, 30, "fish", calibration=[batch], loss_fn=lambda model, b: model(**b).sum())
