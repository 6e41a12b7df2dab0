"""Gradient accumulation: by which of a step's micro-batches its entries are chosen."""

import copy

import pytest
import torch
from models import build, loss_of
from oracle import DenseOracle, unmasked_sets

from sparsify import D3, Increment, Magnitude, Repeat, Schedule, SparsifyError, Strategy, get_unmasker, sparsify

STEPS, MICRO_BATCHES, BUDGET = 4, 3, 25


def steps_of(batches):
    return [batches[start : start + MICRO_BATCHES] for start in range(0, len(batches), MICRO_BATCHES)]


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0)


def backward(model, micro_batches):
    for batch in micro_batches:
        (loss_of(model, batch) / len(micro_batches)).backward()


def compare(name, strategy="id3", schedule=None, zero_grad=torch.optim.Optimizer.zero_grad, **of_oracle):
    """Trains the oracle on whole batches and the library on their micro-batches."""
    dense, batches = build(name, dtype=torch.float64)
    sparse = sparsify(
        copy.deepcopy(dense), BUDGET, strategy, steps=STEPS, schedule=schedule or Schedule(), accumulation="exact"
    )
    oracle = DenseOracle(dense, optimizer_of(dense), BUDGET, STEPS, **of_oracle)
    optimizer = optimizer_of(sparse)
    for micro_batches in steps_of(batches):
        zero_grad(optimizer)
        backward(sparse, micro_batches)
        optimizer.step()
        oracle.step(sum(loss_of(dense, batch) for batch in micro_batches) / len(micro_batches))
        if not of_oracle.get("repeat"):
            assert unmasked_sets(sparse) == oracle.unmasked_sets()
    weights = dict(sparse.named_parameters())
    for parameter_name, parameter in dense.named_parameters():
        torch.testing.assert_close(weights[parameter_name], parameter, rtol=1e-9, atol=1e-9)
    return sparse


@pytest.mark.parametrize("name", ["mlp", "bert", "gpt2", "t5"])
def test_exact_micro_batches_are_one_batch_to_the_oracle(name):
    compare(name)


def test_exact_works_with_a_schedule_that_skips_steps():
    compare("bert", schedule=Schedule("cubic", every=2), shape="cubic", every=2)


def test_exact_works_with_gradients_that_are_set_to_zero_instead_of_none():
    compare("mlp", zero_grad=lambda optimizer: optimizer.zero_grad(set_to_none=False))


def test_exact_repeat_trains_what_the_sum_chooses():
    compare("mlp", Strategy(D3(), Repeat()), repeat=True)


def test_exact_with_an_importance_of_the_weights_unmasks_once_a_step():
    plain, batches = build("mlp")
    model = sparsify(plain, 12, Strategy(Magnitude(), Increment()), steps=STEPS, accumulation="exact")
    for batch in batches[:MICRO_BATCHES]:
        loss_of(model, batch).backward()
        assert get_unmasker(model).unmasked == 3


def test_first_chooses_by_the_first_micro_batch_and_trains_on_all():
    plain, batches = build("mlp", dtype=torch.float64)
    model = sparsify(copy.deepcopy(plain), BUDGET, steps=STEPS)
    backward(model, batches[:1])
    chosen = unmasked_sets(model)
    backward(model, batches[1:2])
    assert unmasked_sets(model) == chosen
    (loss_of(plain, batches[0]) + loss_of(plain, batches[1])).backward()
    dense = dict(plain.named_parameters())
    for tensor in get_unmasker(model).tensors:
        torch.testing.assert_close(model.sparse_values.grad[tensor.slots], dense[tensor.name].grad.take(tensor.indices))


def test_a_sum_that_was_dropped_leaves_nothing_behind():
    plain, batches = build("mlp", dtype=torch.float64)
    straight, dropped = (sparsify(copy.deepcopy(plain), BUDGET, steps=STEPS, accumulation="exact") for _ in range(2))
    backward(dropped, batches[2:4])
    optimizer_of(dropped).zero_grad()
    for model in (straight, dropped):
        backward(model, batches[:2])
    assert unmasked_sets(straight) == unmasked_sets(dropped)
    assert torch.equal(straight.sparse_values.grad, dropped.sparse_values.grad)


def test_an_overflow_in_any_micro_batch_unmasks_nothing_and_reaches_the_optimizer():
    model, batches = build("mlp")
    sparsify(model, BUDGET, steps=STEPS, accumulation="exact")
    backward(model, batches[:1])
    assert get_unmasker(model).unmasked > 0
    backward(model, [{**batches[1], "x": batches[1]["x"] * torch.inf}])
    backward(model, batches[2:3])
    assert get_unmasker(model).unmasked == 0
    assert not model.sparse_values.grad.isfinite().any()


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("out of memory")


def test_a_step_after_a_micro_batch_that_failed_leaves_free_slots_at_zero():
    model, batches = build("mlp")
    sparsify(model, BUDGET, steps=STEPS, accumulation="exact")
    optimizer = optimizer_of(model)
    for batch in batches[:2]:  # the first step has no entries of earlier ones
        optimizer.zero_grad()
        backward(model, [batch])
        with pytest.raises(RuntimeError, match="out of memory"):
            loss_of(model, {**batch, "x": Failing.apply(batch["x"].clone().requires_grad_())}).backward()
        optimizer.step()
        assert not model.sparse_values[get_unmasker(model).unmasked :].any()
        optimizer.zero_grad()
        backward(model, [batch])
        optimizer.step()
        assert get_unmasker(model).unmasked > 0


def test_a_tensor_that_only_an_early_micro_batch_used_is_chosen_from():
    class Either(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)

        def forward(self, x, side):
            return getattr(self, side)(x).square().sum()

    torch.manual_seed(0)
    model, x = sparsify(Either(), 2, steps=1, accumulation="exact"), torch.randn(3, 4)
    model(100 * x, "left").backward()
    model(x, "right").backward()
    assert [tensor.count for tensor in get_unmasker(model).tensors] == [2, 0]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_of_an_input_alone_is_no_micro_batch(compiled):
    def model():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        return sparsify(model, BUDGET, steps=STEPS, accumulation="exact")

    plain, asked = model(), model()
    if compiled:
        asked.compile(backend="aot_eager")
    for micro_batch in torch.randn(3, 4, 6):
        x = micro_batch.clone().requires_grad_()
        (saliency,) = torch.autograd.grad(100 * asked(x).square().sum(), x)
        assert saliency.any()
        for each in (plain, asked):
            each(micro_batch).square().sum().backward()
        assert unmasked_sets(asked) == unmasked_sets(plain)
        torch.testing.assert_close(asked.sparse_values.grad, plain.sparse_values.grad)


def test_a_copy_of_the_model_begins_the_step_anew():
    model, batches = build("mlp")
    sparsify(model, BUDGET, steps=STEPS, accumulation="exact")
    backward(model, batches[:1])
    other = copy.deepcopy(model)
    backward(other, batches[1:2])
    assert get_unmasker(other).unmasked == get_unmasker(model).unmasked


def test_an_unknown_accumulation_is_refused_before_anything_is_changed():
    model, _ = build("mlp")
    with pytest.raises(SparsifyError, match="accumulation='last'; expected one of 'first', 'exact'"):
        sparsify(model, BUDGET, steps=STEPS, accumulation="last")
    assert type(model.first) is torch.nn.Linear
