"""The calibration sums up gradients of the plain model and leaves it unchanged."""

import copy

import pytest
import torch
from models import build, loss_of
from torch import nn
from tqdm import tqdm

from sparsify import D3, SNIP, Fisher, GraSP, Prune, SparsifyError, Static, Strategy, sparsify
from sparsify.strategies.calibration import calibrate


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


@pytest.mark.parametrize("importance", [D3(), SNIP()])
def test_gradients_of_batches_are_summed(model_and_batches, importance):
    model, batches = model_and_batches
    totals = calibrate(model, list(model.parameters()), importance, iter(batches[:3]))
    assert_close(totals, [sum(grads) for grads in zip(*(gradient(model, b) for b in batches[:3]), strict=True)])


@pytest.mark.parametrize("num_samples", [1, 12, 17, 1024])
def test_fisher_squares_the_gradients_of_single_examples_up_to_its_number(model_and_batches, num_samples):
    model, batches = model_and_batches
    waiting = iter(batches[:2])
    totals = calibrate(model, list(model.parameters()), Fisher(num_samples), waiting)
    assert len(list(waiting)) == (num_samples <= 12), "no more batches are read than it needs"
    squares = [[grad**2 for grad in gradient(model, example)] for example in examples(batches[:2])[:num_samples]]
    assert_close(totals, [sum(of_parameter) for of_parameter in zip(*squares, strict=True)])


def test_a_function_that_runs_backward_itself_does_the_same(model_and_batches):
    model, batches = model_and_batches

    def run(model):
        for example in examples(batches[:2]):
            loss_of(model, example).backward()

    totals = calibrate(model, list(model.parameters()), Fisher(num_samples=24), run)
    assert_close(totals, calibrate(model, list(model.parameters()), Fisher(num_samples=24), batches[:2]))


@pytest.mark.parametrize(("importance", "factor"), [(D3(), 3), (Fisher(), 9), (GraSP(), 9)])
def test_a_loss_of_ones_own(model_and_batches, importance, factor):
    model, batches = model_and_batches
    plain = calibrate(model, list(model.parameters()), importance, batches[:1])
    tripled = calibrate(model, list(model.parameters()), importance, batches[:1], lambda model, b: 3 * model(**b))
    assert_close(tripled, [factor * total for total in plain])


@pytest.mark.parametrize("importance", [D3(), GraSP()])
def test_the_model_is_left_as_it_was(importance):
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
        calibrate(model, [model.layers[0].weight], importance, [{"x": torch.randn(8, 4, generator=torch.Generator())}])
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


@pytest.mark.parametrize(
    ("importance", "calibration", "text"),
    [
        (D3(), [{"input": torch.ones(3, 2)}], "Sequential made no loss of a calibration batch with input; put labels"),
        (D3(), {"input": torch.ones(3, 2)}, r"calibration= is a single dict; expected an iterable .* or \[batch\]"),
        (D3(), [torch.ones(3, 2)], r"a calibration batch is a Tensor; expected a dict for model\(\*\*batch\)"),
        (Fisher(), [torch.ones(3, 2)], "a calibration batch is a Tensor; expected a dict of tensors, to be cut"),
        (D3(), [], "the calibration gave no candidate a gradient; expected batches"),
        (GraSP(), [], "the calibration gave no candidate a gradient; expected batches"),
        (GraSP(), lambda model: None, r"GraSP\(\) got a function .* differentiate each loss twice; expected"),
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


@pytest.mark.parametrize(
    ("importance", "kind"), [(SNIP(), "lists"), (Fisher(), "text too"), (GraSP(), "tensors"), (SNIP(), "tensors")]
)
def test_rows_of_a_dataset_are_told_from_batches(kind, importance):
    model, _ = build("bert")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SparsifyError, match=r"got single rows .* `input_ids` is a .*DataLoader\(dataset, batch_size=8"):
        sparsify(model, 20, Strategy(importance, Static()), calibration=[ROWS[kind]] * 3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_a_dataset_of_rows_is_told_from_batches():
    datasets = pytest.importorskip("datasets", reason="an optional library")
    rows = datasets.Dataset.from_list([{"input_ids": [5, 6, 7], "labels": 1}] * 3)
    for dataset in (rows, rows.with_format("torch")):
        with pytest.raises(SparsifyError, match="got single rows of a dataset"):
            sparsify(build("bert")[0], 20, "fish", calibration=dataset)


def test_an_error_of_the_model_with_a_batch_is_the_models_own(model_and_batches):
    model, batches = model_and_batches
    with pytest.raises(TypeError, match="unexpected keyword argument 'text'"):
        sparsify(model, 20, "fish", calibration=[{**batches[0], "text": ["a"] * 4}])


@pytest.mark.parametrize(("importance", "total", "passes"), [(Fisher(num_samples=5), 5, 5), (D3(), 2, 2)])
def test_progress_is_shown_for_every_backward_pass(model_and_batches, monkeypatch, importance, total, passes):
    model, batches = model_and_batches
    shown = []

    def bar(batches, **settings):
        shown.append(tqdm(batches, **settings))
        return shown[-1]

    monkeypatch.setattr("sparsify.strategies.calibration.tqdm", bar)
    calibrate(model, list(model.parameters()), importance, batches[:2])
    assert [(bar.total, bar.n) for bar in shown] == [(total, passes)]


def test_more_entries_than_have_a_gradient_are_refused():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(4, 1))
    batch = {"input": torch.tensor([[3]])}
    with pytest.raises(SparsifyError, match=r"budget=30, but only 9 entries have an importance above 0"):
        sparsify(model, 30, "fish", calibration=[batch], loss_fn=lambda model, b: model(**b).sum())


class Tiny(nn.Module):
    """Two layers with a bend between them: 17 entries, so that the Hessian can be written out."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(2, 3), nn.Linear(3, 2), nn.Parameter(torch.ones(3))

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.second(torch.tanh(self.first(x))), labels)


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    batches = [{"x": torch.randn(5, 2).double(), "labels": torch.randint(2, (5,))} for _ in range(3)]
    return Tiny().double(), batches


def hessian_and_gradient(model, names, batches):
    """H and g of the summed losses, as functions of the named parameters laid end to end."""
    parameters = dict(model.named_parameters())
    shapes = [parameters[name].shape for name in names]

    def loss(flat):
        parts = flat.split([shape.numel() for shape in shapes])
        values = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return sum(torch.func.functional_call(model, values, kwargs=batch) for batch in batches)

    at = torch.cat([parameters[name].detach().flatten() for name in names])
    return torch.autograd.functional.hessian(loss, at), torch.autograd.functional.jacobian(loss, at)


def as_flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize("names", [["first.weight", "first.bias", "second.weight", "second.bias"], ["second.weight"]])
def test_grasp_gets_the_hessian_times_the_gradient(tiny, names):
    model, batches = tiny
    hessian, gradient = hessian_and_gradient(model, names, batches)
    parameters = [model.get_parameter(name) for name in names]
    *totals, unused = calibrate(model, [*parameters, model.unused], GraSP(), iter(batches))
    torch.testing.assert_close(as_flat(totals), hessian @ gradient)
    assert not unused.any()


def test_grasps_score_is_the_change_of_the_squared_gradient_norm_without_the_entry(tiny):
    """The sign: where the score is high, taking the entry away costs the most gradient flow."""
    model, batches = tiny
    names = ["first.weight", "second.weight"]
    parameters = [model.get_parameter(name) for name in names]
    scores = as_flat(
        GraSP().score(p.detach(), total)
        for p, total in zip(parameters, calibrate(model, parameters, GraSP(), batches), strict=True)
    )
    step, changes = 1e-6, []
    before = hessian_and_gradient(model, names, batches)[1].square().sum()
    for parameter in parameters:
        for index in range(parameter.numel()):
            value = parameter.data.view(-1)[index].item()
            parameter.data.view(-1)[index] = value * (1 - step)  # a little of the way to zero
            changes.append((hessian_and_gradient(model, names, batches)[1].square().sum() - before) / step)
            parameter.data.view(-1)[index] = value
    torch.testing.assert_close(-2 * scores, torch.stack(changes), rtol=1e-4, atol=1e-5)


def test_grasp_differentiates_attention_twice():
    model, batches = build("bert", dtype=torch.float64)
    assert model.config._attn_implementation == "sdpa"
    parameters = list(model.bert.encoder.parameters())
    totals = calibrate(model, parameters, GraSP(), batches[:1])
    model.set_attn_implementation("eager")
    assert_close(totals, calibrate(model, parameters, GraSP(), batches[:1]))


def test_a_new_lora_has_nothing_that_snip_could_tell_apart():
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False))
    nn.init.zeros_(model[1].weight)  # as LoRA's B
    options = {"calibration": [torch.ones(3, 4)], "loss_fn": lambda m, x: (m(x) - 1).square().sum()}
    with pytest.raises(SparsifyError, match=r"budget=5, but only 0 entries .*1 of 2 tensors are all zeros"):
        sparsify(model, 5, Strategy(SNIP(), Prune(pretrained=True)), **options)
