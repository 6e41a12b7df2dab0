"""Several backward passes in one optimizer step: all, or the first one, choose the step's entries, all train these."""

import copy
from contextlib import nullcontext

import pytest
import torch
from models import build, loss_of
from oracle import unmasked_sets

from sparsify import D3, Increment, Magnitude, SparsifyError, Strategy, get_engine, sparsify, summary, trained_state
from sparsify.selection import policies

STEPS, BUDGET = 4, 25


def pair(steps=STEPS, dtype=torch.float32, strategy="id3"):
    """Two sparsified models with the same weights."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)
    return [sparsify(copy.deepcopy(plain), BUDGET, strategy, steps=steps) for _ in range(2)]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_of_an_input_alone_is_no_micro_batch(compiled):
    plain, asked = pair()
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


def test_a_graph_that_was_asked_before_and_a_newer_one_choose_by_the_sum_of_their_gradients():
    asked, fresh = pair(1, torch.float64)
    batches = torch.randn(2, 5, 6, dtype=torch.float64)
    x = batches[0].clone().requires_grad_()
    kept = asked(x).square().sum()
    torch.autograd.grad(kept, x, retain_graph=True)
    (kept + 3 * asked(batches[1]).square().sum()).backward()
    (fresh(batches[0]).square().sum() + 3 * fresh(batches[1]).square().sum()).backward()
    assert unmasked_sets(asked) == unmasked_sets(fresh)
    torch.testing.assert_close(asked.sparse_values.grad, fresh.sparse_values.grad)


FIRST = Strategy(D3(exp=2, eps=1), Increment(select="first"))
BY_WEIGHT = Strategy(Magnitude(), Increment())


def chosen(plain, steps, stop=None, resume=None, strategy="id3"):
    """The entries after each step, of so many batches and passes each, and the state; the weights stay as they are."""
    model, found = sparsify(copy.deepcopy(plain), BUDGET, strategy, steps=len(steps)), []
    optimizer = torch.optim.SGD([model.sparse_values], lr=0.0)
    model.load_state_dict(resume or model.state_dict())
    for batches in steps[get_engine(model).step : stop]:
        for batch in batches:
            model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(unmasked_sets(model))
    return found, trained_state(model)


@pytest.mark.parametrize("numbers", [(3, 1, 2, 2, 1), (1, 1, 3, 2, 1)])
def test_all_passes_choose_but_where_a_run_goes_over_to_several_also_after_a_resume(numbers):
    plain = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    steps = [torch.randn(number, 4, 6, dtype=torch.float64) for number in numbers]
    found, _ = chosen(plain, steps)
    several = [True, *[number > 1 for number in numbers]]
    choosing = [step if keeps else step[:1] for step, keeps in zip(steps, several, strict=False)]
    assert found == chosen(plain, [batches.flatten(0, 1)[None] for batches in choosing])[0], "as of one large batch"
    assert chosen(plain, steps, strategy=FIRST)[0] == chosen(plain, [step[:1] for step in steps])[0]
    for stop in range(1, 5):
        assert chosen(plain, steps, resume=chosen(plain, steps, stop)[1])[0] == found[stop:]


@pytest.mark.parametrize("strategy", ["id3", BY_WEIGHT], ids=str)
def test_no_gradient_is_lost_where_the_first_pass_finds_nothing_or_a_gradient_is_asked_for_in_between(strategy):
    large, small = pair(strategy=strategy)
    batches, scales = torch.randn(3, 4, 6), (0, 1, 2)
    sum(scale * large(x).square().sum() for scale, x in zip(scales, batches, strict=True)).backward()
    for scale, x in zip(scales, batches, strict=True):
        (scale * small(x).square().sum()).backward()
        torch.autograd.grad(small(x + 1).norm(), small.sparse_values)  # which is in no sum
    assert unmasked_sets(small) == unmasked_sets(large)
    assert get_engine(small).unmasked == BUDGET // STEPS
    torch.testing.assert_close(small.sparse_values.grad, large.sparse_values.grad)


def test_most_entries_that_all_passes_choose_are_those_of_the_large_batch(monkeypatch):
    monkeypatch.setattr(policies, "_LEAST_KEPT", 1)  # less than the model has
    base = torch.nn.Sequential(torch.nn.Linear(20, 80), torch.nn.ReLU(), torch.nn.Linear(80, 3))
    inputs, sets = torch.randn(32, 20), []
    for strategy, parts in (("id3", 1), (FIRST, 8), ("id3", 8)):
        model = sparsify(copy.deepcopy(base), 100, strategy, steps=1)
        for part in inputs.chunk(parts):
            (model(part).logsumexp(1).mean() / parts).backward()
        sets.append({(name, index) for name, own in unmasked_sets(model).items() for index in own})
    assert len(sets[0] & sets[1]) < 80
    assert len(sets[0] & sets[2]) > 95


def test_an_overflow_in_a_later_pass_is_seen_in_the_sum_and_ranks_and_other_words_are_refused(monkeypatch):
    model = sparsify(torch.nn.Linear(6, 4), BUDGET, "id3", steps=1)
    for scale in (1, torch.inf, 1):
        (scale * model(torch.randn(3, 6)).sum()).backward()
    assert model.sparse_values.grad.isnan().all()
    model.zero_grad()
    with pytest.warns(UserWarning, match="a gradient was dropped"):
        model(torch.randn(3, 6))
    assert summary(model).unmasked == 0
    monkeypatch.setattr(policies, "num_ranks", lambda: 2)
    own = Strategy(D3(), Increment(allocation={"0": 2}))
    model = sparsify(torch.nn.Sequential(torch.nn.Linear(6, 4)), None, own, steps=1)
    with pytest.raises(SparsifyError, match="budgets of modules of their own work on one rank"):
        model(torch.randn(3, 6)).sum().backward()
    with pytest.raises(SparsifyError, match="select='last'; expected 'all' or 'first'"):
        Increment(select="last")
    assert Strategy.from_dict(FIRST.to_dict()) == FIRST


class SAM(torch.optim.SGD):
    """Sharpness-aware minimisation: descends from where it was by the gradient a little uphill."""

    @torch.no_grad()
    def step(self, closure):
        (values,) = self.param_groups[0]["params"]
        climb = 0.05 * values.grad / values.grad.norm()
        values.add_(climb)
        with torch.enable_grad():
            closure()
        values.sub_(climb)
        super().step()


OPTIMIZERS = {
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, line_search_fn="strong_wolfe"),
    "sam": lambda parameters: SAM(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["id3", "d3-repeat"])
def test_frozen_entries_stay_bit_equal_while_values_move_between_passes(name, strategy):
    plain, batches = build("mlp")
    model = sparsify(copy.deepcopy(plain), BUDGET, strategy, steps=STEPS)
    optimizer = OPTIMIZERS[name]([model.sparse_values])
    for step in range(STEPS):

        def closure(micro_batches=tuple(batches[2 * step : 2 * step + 2])):
            optimizer.zero_grad()
            total = 0
            for batch in micro_batches:
                loss = loss_of(model, batch)
                loss.backward()
                total += loss.detach()
            return total

        closure()
        chosen = unmasked_sets(model)
        optimizer.step(closure)
        assert unmasked_sets(model) == chosen, "the step's entries are those of its first pass"
    assert get_engine(model).step == STEPS
    assert summary(model, verify=True).verification.ok
    for tensor in get_engine(model).tensors:
        before, now = (weight.detach().view(-1) for weight in (plain.get_parameter(tensor.name), tensor.parameter))
        assert torch.equal(now, before.index_add(0, tensor.indices, tensor.delta)), "the base plus the delta"


def run_inside(tensor, model, chunks):
    """Trains the model at chunks inside of a tensor's backward pass, one after the other, as cached losses do."""

    def hook(_):
        with torch.enable_grad():
            for chunk in chunks:
                model(chunk).square().sum().backward()

    tensor.register_hook(hook)
    return tensor


@pytest.mark.parametrize("compiled", [False, True])
def test_a_cached_loss_adds_up_and_all_of_its_chunks_select(compiled):
    (model, fresh), chunks = pair(dtype=torch.float64), torch.randn(3, 4, 6, dtype=torch.float64)
    if compiled:
        model.compile(backend="aot_eager")
    run_inside(torch.ones(1, requires_grad=True), model, chunks).sum().backward()
    fresh(chunks).square().sum().backward()
    assert unmasked_sets(model) == unmasked_sets(fresh) != {}
    torch.testing.assert_close(model.sparse_values.grad, fresh.sparse_values.grad)


def test_a_backward_pass_inside_one_that_selects_is_refused():
    model, (outer, inner) = pair()[0], torch.randn(2, 4, 6)
    hook = model[0].register_forward_hook(lambda module, args, output: run_inside(output, model, [inner]))
    loss = model(outer).square().sum()
    hook.remove()
    with pytest.raises(SparsifyError, match=r"at the same time, in several threads or one inside the other"):
        loss.backward()


def three_steps(model, dropped):
    """Three steps, two of them after a batch whose gradient is dropped; the last one spends the budget."""
    optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
    for number, x in enumerate(torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))):
        if dropped and number:
            model(50 * x.flip(0)).square().sum().backward()
        loss = model(x).square().sum() if dropped == "between" else None  # forward, zero_grad(), backward
        optimizer.zero_grad(set_to_none=dropped != "zeros")
        if dropped == "a copy":
            model = copy.deepcopy(model)
            optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
        (model(x).square().sum() if loss is None else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("strategy", ["id3", "d3-repeat"])
@pytest.mark.parametrize("how", ["none", "zeros", "between", "a copy"])
def test_a_batch_that_is_dropped_after_backward_might_not_have_been(how, strategy):
    straight, model = pair(steps=3, strategy=strategy)
    expected = three_steps(straight, None)
    with pytest.warns(UserWarning, match=r"gradient was dropped before an optimizer step \(zero_grad\(\)\)"):
        state = three_steps(model, how)
    assert all(torch.equal(value, state[name]) for name, value in expected.items())


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_leaves_out_drops_its_gradient_whatever_the_optimizer(fused):
    straight, model = pair(steps=2)
    for trained, overflows in ((straight, False), (model, True)):
        optimizer = torch.optim.AdamW([trained.sparse_values], lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        if overflows:
            for factor in (1.0, torch.inf):  # the first one selects
                scaler.scale(trained(torch.full((4, 6), 3.0)).square().sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        with pytest.warns(UserWarning, match="gradient was dropped") if overflows else nullcontext():
            scaler.scale(trained(torch.eye(4, 6)).square().sum()).backward()
        scaler.step(optimizer)
    assert unmasked_sets(model) == unmasked_sets(straight)
    assert get_engine(model).step == get_engine(straight).step == 1


def test_gradients_that_are_zero_were_not_dropped(recwarn):
    model = pair(strategy=Strategy(Magnitude(), Increment()))[0]
    for retained in (False, True, False):
        (model(torch.ones(2, 6)).sum() * 0).backward(retain_graph=retained)
    assert get_engine(model).unmasked == BUDGET // STEPS
    assert not recwarn.list


def test_gradients_that_are_combined_by_hand_are_of_one_set_of_entries(recwarn):
    losses = [lambda model, x=x: model(x).square().sum() for x in torch.randn(3, 4, 6)]
    summed, by_grad, retained = *pair(strategy=FIRST), pair()[0]
    for loss in losses:
        loss(summed).backward()
    grads = [torch.autograd.grad(loss(by_grad), by_grad.sparse_values)[0] for loss in losses]
    torch.testing.assert_close(sum(grads), summed.sparse_values.grad)
    graphs, grads = [loss(retained) for loss in losses], []
    for graph in graphs:  # as PCGrad does
        retained.zero_grad()
        graph.backward(retain_graph=True)
        grads.append(retained.sparse_values.grad.clone())
    torch.testing.assert_close(sum(grads), summed.sparse_values.grad)
    with torch.no_grad():
        retained.sparse_values.add_(0.05)  # as SAM's first_step(zero_grad=True)
    retained.zero_grad()
    losses[1](retained).backward()
    assert unmasked_sets(summed) == unmasked_sets(by_grad) == unmasked_sets(retained)
    assert not [each for each in recwarn if "dropped" in str(each.message)]
