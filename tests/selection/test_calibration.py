"""The calibration sums up gradients of the plain model and leaves it unchanged."""

import contextlib
import copy

import pytest
import torch
from deltas import unchanged
from models import build, loss_of
from torch import nn
from tqdm import tqdm

from sparsify import D3, GSNR, SNIP, Fisher, SparsifyError, Static, Strategy, sparsify
from sparsify.selection.static import calibrate


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


def test_gradients_are_summed_over_the_batches(model_and_batches):
    model, batches = model_and_batches
    totals = calibrate(model, list(model.parameters()), D3(), batches[:2])
    assert_close(totals, map(sum, zip(*(gradient(model, batch) for batch in batches[:2]), strict=True)))


@pytest.mark.parametrize("num_samples", [1, 12, 17, 1024])
def test_fisher_squares_the_gradients_of_single_examples_up_to_its_number(model_and_batches, num_samples):
    model, batches = model_and_batches
    waiting = iter(batches[:2])
    totals = calibrate(model, list(model.parameters()), Fisher(num_samples), waiting)
    assert len(list(waiting)) == (num_samples <= 12), "no more batches are read than it needs"
    squares = [[grad**2 for grad in gradient(model, example)] for example in examples(batches[:2])[:num_samples]]
    assert_close(totals, map(sum, zip(*squares, strict=True)))


def test_gsnr_is_the_size_of_the_sum_by_the_root_of_the_sum_of_squares(model_and_batches):
    model, batches = model_and_batches
    ratios = calibrate(model, list(model.parameters()), GSNR(), batches[:3])
    grads = zip(*(gradient(model, batch) for batch in batches[:3]), strict=True)
    assert_close(ratios, [sum(own).abs() / sum(grad**2 for grad in own).sqrt() for own in grads])
    with unchanged(model), pytest.raises(SparsifyError, match=r"of one batch; GSNR compares batches: pass several"):
        sparsify(model, 20, "gsnr", calibration=batches[:1])


def test_a_function_that_runs_backward_itself_does_the_same(model_and_batches):
    model, batches = model_and_batches

    def run(model):
        for example in examples(batches[:2]):
            loss_of(model, example).backward()

    totals = calibrate(model, list(model.parameters()), Fisher(num_samples=24), run)
    assert_close(totals, calibrate(model, list(model.parameters()), Fisher(num_samples=24), batches[:2]))


@pytest.mark.parametrize(("importance", "factor"), [(D3(), 3), (Fisher(), 9)])
def test_a_loss_of_ones_own(model_and_batches, importance, factor):
    model, batches = model_and_batches
    plain = calibrate(model, list(model.parameters()), importance, batches[:1])
    tripled = calibrate(model, list(model.parameters()), importance, batches[:1], lambda model, b: 3 * model(**b))
    assert_close(tripled, [factor * total for total in plain])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, x):
        return self.layers(x).square().mean()


def failing(model):
    model(torch.ones(8, 4)).backward()
    raise KeyError("nothing of ours")


@pytest.mark.parametrize("calibration", [[{"x": torch.ones(8, 4)}], failing])
def test_the_model_is_left_as_it_was(calibration):
    model = Net()
    model.layers[1].eval()
    first, last = model.layers[0].weight, model.layers[3].weight
    first.grad = grad = torch.ones(4, 4)
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    fails = pytest.raises(KeyError) if calibration is failing else contextlib.nullcontext()
    with torch.no_grad(), fails:  # whatever the caller's mode
        calibrate(model, [first, last], D3(), calibration)
    assert first.grad is grad
    assert torch.equal(grad, torch.ones(4, 4))
    assert last.grad is None
    assert [module.training for module in model.layers] == [True, False, True, True]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize(
    ("importance", "calibration", "text"),
    [
        (D3(), [{"input": torch.ones(3, 2)}], r"made no loss of a batch with \['input'\]; put labels"),
        (D3(), {"input": torch.ones(3, 2)}, r"calibration= is a single dict; expected several, as in \[batch\]"),
        (Fisher(), [torch.ones(3, 2)], "a calibration batch is a Tensor; expected a dict, or a function"),
        (D3(), [], "the calibration gave no candidate a gradient; pass labels"),
    ],
)
def test_data_that_gives_no_gradient_is_refused(importance, calibration, text):
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(SparsifyError, match=text):
        calibrate(model, list(model.parameters()), importance, calibration)


ROWS = {
    "lists": {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": 1},
    "text too": {"text": "a row", "input_ids": [5, 6, 7], "labels": 1},
    "tensors": {"input_ids": torch.tensor([5, 6, 7]), "labels": torch.tensor(1)},
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("importance", [SNIP(), Fisher()], ids=lambda importance: importance.name)
def test_rows_of_a_dataset_are_told_from_batches(kind, importance):
    model, _ = build("bert")
    message = r"got single rows .* `input_ids` is a .*DataLoader\(dataset, batch_size=8"
    with unchanged(model), pytest.raises(SparsifyError, match=message):
        sparsify(model, 20, Strategy(importance, Static()), calibration=[ROWS[kind]] * 3)
    assert model.training


def test_an_error_of_the_model_with_a_batch_is_the_models_own(model_and_batches):
    model, batches = model_and_batches
    with pytest.raises(TypeError, match="unexpected keyword argument 'text'"):
        sparsify(model, 20, "fish", calibration=[{**batches[0], "text": ["a"] * 4}])


@pytest.mark.parametrize(("importance", "total"), [(Fisher(num_samples=5), 5), (D3(), 2)])
def test_progress_is_shown_for_every_backward_pass(model_and_batches, monkeypatch, importance, total):
    model, batches = model_and_batches
    shown = []

    def bar(batches, **settings):
        shown.append(tqdm(batches, **settings))
        return shown[-1]

    monkeypatch.setattr("sparsify.selection.static.tqdm", bar)
    calibrate(model, list(model.parameters()), importance, batches[:2])
    assert [(bar.total, bar.n) for bar in shown] == [(total, total)]
