"""Several ranks train as one process with all their batches would: gloo processes on the CPU, many checks a spawn.

Each scenario is a function that every rank runs; a test compares what came back with one process, or among the ranks.
"""

import contextlib
import os
import time

import pytest
import torch
from oracle import unmasked_sets
from products import FREE
from rank_models import BUDGET, STEPS, error_of, mean_over_ranks, mlp, own_part, words
from rank_processes import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsify import (
    D3,
    SNIP,
    Increment,
    Magnitude,
    Repeat,
    SparseDelta,
    SparsifyError,
    Strategy,
    desparsify,
    get_unmasker,
    register_importance,
    sparsify,
    summary,
)
from sparsify.common.ranks import Ranks, num_ranks
from sparsify.integrations.distributed import check_ranks
from sparsify.masked.gradients import DenseGradient
from sparsify.selection import screening as screen
from sparsify.selection.context import SelectionContext, Work
from sparsify.selection.distributed import DistributedSelector
from sparsify.selection.topk import TopK


def train(rank, model, batches, *, micro=1, steps=STEPS, wrap=lambda model: model, **options):
    """Trains under DDP, or alone where there is one rank; returns mean losses, unmasked sets and the flat delta."""
    model = wrap(model)
    parallel = DistributedDataParallel(model, **options) if num_ranks() > 1 else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            batch = own_part({name: values.chunk(micro)[part] for name, values in batches[step].items()}, rank)
            with parallel.no_sync() if num_ranks() > 1 and part + 1 < micro else contextlib.nullcontext():
                loss = parallel(**batch) / micro
                loss.backward()
            losses.append(mean_over_ranks(loss))
        optimizer.step()
    return {"losses": losses, "sets": unmasked_sets(model), "delta": model.sparse_values.detach().clone()}


# ------------------------------------------------------------------- scenarios that one process can be compared with


def within_another_model(model):
    """DDP is told of the outer model, whose names of the index buffers are others, and broadcasts them."""
    outer = nn.ModuleDict({"inner": model})
    outer.forward = lambda **batch: outer["inner"](**batch)
    outer.sparse_values = model.sparse_values
    return outer


@register_importance("away-from-zero")
def away_from_zero(weight, grad):
    return -weight * grad


def of(importance, selection=Increment()):  # noqa: B008 - frozen
    return {"strategy": Strategy(importance, selection)}


# name -> model and batches, arguments of sparsify(), arguments of train()
RUNS = {
    "exact": (words, {}, {}),
    "in float32": (lambda: words(torch.float32), {}, {}),
    "options of DDP": (words, of(SNIP()), {"gradient_as_bucket_view": True, "find_unused_parameters": True}),
    "a static graph": (words, {}, {"static_graph": True}),
    "accumulating": (words, {}, {"micro": 2}),
    "within another model": (words, {}, {"wrap": within_another_model}),
    "an importance that is not monotone": (mlp, of(away_from_zero), {}),
    "repeat": (mlp, {**of(D3(), Repeat()), "budget": 20}, {}),
    "growing by magnitude": (mlp, of(Magnitude()), {}),
    "static beside a dense head": (mlp, {"strategy": "pafi", "steps": None, "modules_to_save": ["head"]}, {}),
    "candidates": (words, {"sync": "candidates"}, {}),  # with ranks exact but for entries in no rank's own top
}


def trained(rank, name):
    make, settings, options = RUNS[name]
    model, batches = make()
    result = train(rank, sparsify(model, **{"budget": BUDGET, "steps": STEPS, **settings}), batches, **options)
    check_ranks(model)
    return result


def screened(rank):
    """Float32 with the screen, as large layers have it."""
    before, screen.SMALLEST_SCREENED = screen.SMALLEST_SCREENED, 1
    try:
        model, batches = words(torch.float32)
        return train(rank, sparsify(model, 12, steps=STEPS), batches)
    finally:
        screen.SMALLEST_SCREENED = before


def counted(rank):
    """The work of a rank in its last step, without a screen and with one."""
    model, batches = words(torch.float32)
    train(rank, sparsify(model, 12, steps=STEPS), batches)
    before = screen.SMALLEST_SCREENED, screen.costs_of
    screen.SMALLEST_SCREENED, screen.costs_of = 1, lambda *_: FREE
    try:
        other, batches = words(torch.float32)
        train(rank, sparsify(other, 12, steps=STEPS), batches)
    finally:
        screen.SMALLEST_SCREENED, screen.costs_of = before
    return summary(model).last_work, summary(other).last_work


def checked(rank):
    model, batches = words()
    sparsify(model, 12, steps=STEPS)
    get_unmasker(model).check = True
    return error_of(train, rank, model, batches)


# ------------------------------------------------------------------- scenarios of their own


def bytes_and_calls(rank):
    """Bytes and exchanges of steps that select, of later ones, and with a set known in advance."""
    model, batches = words()
    sparsify(model, BUDGET, steps=STEPS - 2)
    ranks, sent = get_unmasker(model).ranks, []
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD([model.sparse_values], lr=1e-2)
    for batch in batches:
        before = ranks.bytes_sent, ranks.exchanges
        parallel(**own_part(batch, rank)).backward()
        optimizer.step()
        sent.append((ranks.bytes_sent - before[0], ranks.exchanges - before[1]))
    known, _ = words()
    train(rank, sparsify(known, BUDGET, "pafi"), batches)
    return sent, get_unmasker(known).ranks.exchanges, str(summary(model)), ranks.bytes_sent


def nothing_finite_on_one_rank(rank):
    model, batches = words()
    sparsify(model, BUDGET, steps=STEPS)
    parallel = DistributedDataParallel(model)
    scale = torch.inf if rank == 1 else 1.0
    (parallel(**own_part(batches[0], rank)) * scale).backward()
    overflowed = not model.sparse_values.grad.isfinite().all(), get_unmasker(model).unmasked
    model.sparse_values.grad = None
    parallel(**own_part(batches[0], rank)).backward()  # as GradScaler does after a skipped step
    return overflowed, get_unmasker(model).unmasked, unmasked_sets(model)


def no_token_on_one_rank(rank):
    """An embedding that sees only padding, and a layer that gets no row, still take part."""
    model, batches = words()
    sparsify(model, BUDGET, steps=STEPS, target_modules=["table", "wide"])
    batch = own_part(batches[0], rank)
    hidden = model.table(batch["x"] * (1 - rank))
    loss = model.wide(hidden[hidden.abs().sum(-1) > 0]).sum()
    loss.backward()
    return get_unmasker(model).unmasked


def skipped(rank, name, forward):
    """Rank 1 leaves a module out."""
    model, batches = mlp()
    sparsify(model, BUDGET, steps=STEPS)
    if rank == 1:
        model.get_submodule(name).forward = forward
    return error_of(lambda: model(**own_part(batches[0], rank)).backward())


def skipped_modules(rank):
    return (
        skipped(rank, "second", lambda x: x[:, :8]),
        skipped(rank, "first", lambda x: torch.zeros(x.shape[0], 10, dtype=x.dtype)),
    )


def other_beginnings(rank):
    """Weights drawn without a common seed, and other arguments."""
    (model, batches), (other, _) = mlp(seed=rank), mlp()
    sparsify(model, BUDGET, "pafi")
    sparsify(other, BUDGET, steps=STEPS + rank)
    return error_of(train, rank, model, batches), error_of(train, rank, other, batches)


def without_ddp(rank):
    messages = []
    for strategy in ("id3", "pafi"):
        model, batches = mlp()
        sparsify(model, BUDGET, strategy, steps=STEPS)
        optimizer = torch.optim.SGD([model.sparse_values], lr=1e-2)

        def three_steps(model=model, batches=batches, optimizer=optimizer):
            for batch in batches[:3]:
                model(**own_part(batch, rank)).backward()
                optimizer.step()

        messages.append(error_of(three_steps))
    return messages


def moved_behind_our_back(rank):
    model, _ = mlp()
    sparsify(model, BUDGET, "pafi")
    check_ranks(model)
    model.sparse_values.data += rank
    return error_of(check_ranks, model)


def saved_and_resumed(rank):
    model, batches = words()
    train(rank, sparsify(model, BUDGET, steps=STEPS), batches, steps=3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    delta = SparseDelta.from_model(model)
    other, _ = words()
    sparsify(other, BUDGET, steps=STEPS)
    parallel = DistributedDataParallel(other)
    parallel.load_state_dict({f"module.{name}": value for name, value in state.items()})
    resumed = train(rank, other, batches[3:], steps=2)
    desparsify(other)
    return resumed["sets"], delta.num_entries, hasattr(other, "_ddp_params_and_buffers_to_ignore")


def winners_of_random_tensors(rank):
    """How many of many random selections are not those of the mean gradient; ties and rows of zeros among them."""
    wrong = []
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        layer = nn.Sequential(
            nn.Linear(40, 30, bias=False), nn.Linear(20, 16, bias=False), nn.Linear(8, 50, bias=False)
        )
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).round(decimals=seed % 3)
        tensors = get_unmasker(sparsify(layer, 5, steps=5)).tensors
        size = [3, 40, 400, 3000][seed % 4]
        importance = [D3(), SNIP(), D3(exp=0)][seed % 3]
        topk, expected = TopK(size, torch.float32, "cpu"), TopK(size, torch.float32, "cpu")
        selector = DistributedSelector(SelectionContext(topk, importance, Work()), Ranks(), tensors, "exact")
        for tensor in tensors:
            common = torch.randn(tensor.shape, generator=generator)
            noise = torch.randn(num_ranks(), *tensor.shape, generator=generator)
            grads = common + [0.1, 1, 10][seed % 3] * noise
            grads = (grads * 4 ** (seed % 4)).round() / 4 ** (seed % 4)  # their sums are exact, in any order
            if seed % 5 == 0:
                grads[:, ::2] = 0
            mean = grads.clone().sum(0) / num_ranks()
            expected.offer(importance, tensor.matrix, mean, None, tensor.offset)
            gradient = DenseGradient(grads[rank].clone())
            if seed % 7 == 0:
                rows = grads[rank].abs().sum(1).nonzero().squeeze(1)
                gradient = DenseGradient(grads[rank][rows], rows)
            selector.offer(tensor, gradient)
        if selector.winners().ids.tolist() != expected.winners().ids.tolist():
            wrong.append(seed)
    return wrong


OWN = [
    screened,
    bytes_and_calls,
    nothing_finite_on_one_rank,
    no_token_on_one_rank,
    skipped_modules,
    other_beginnings,
    without_ddp,
    moved_behind_our_back,
    saved_and_resumed,
    winners_of_random_tensors,
    counted,
    checked,
]


def all_scenarios(rank):
    own = {scenario.__name__: scenario(rank) for scenario in OWN}
    return {**own, **{name: trained(rank, name) for name in RUNS}}


@pytest.fixture(scope="module")
def two():
    """The results of every scenario on each of two ranks."""
    return on_ranks(2, all_scenarios)


def on_each(results, scenario):
    return [result[scenario.__name__] for result in results]


def assert_like(results, alone):
    for own in results:
        assert own["sets"] == alone["sets"]
        assert own["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        torch.testing.assert_close(own["delta"], alone["delta"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in RUNS if name != "candidates"])
def test_two_ranks_train_like_one_process_with_both_batches(two, name):
    assert_like([result[name] for result in two], trained(0, name))


def test_two_ranks_screen_like_one_process(two):
    assert_like(on_each(two, screened), screened(0))


def four_ranks(rank):
    return trained(rank, "exact"), trained(rank, "candidates"), winners_of_random_tensors(rank)


@pytest.mark.slow
def test_four_ranks_train_like_one_process_with_all_batches():
    exact, candidates, wrong = zip(*on_ranks(4, four_ranks), strict=True)
    assert_like(exact, trained(0, "exact"))
    assert wrong == ([],) * 4
    assert len({str(own["sets"]) for own in candidates}) == 1


def test_the_winners_are_those_of_the_mean_gradient_whatever_the_gradients(two):
    assert on_each(two, winners_of_random_tensors) == [[], []]


def test_candidates_are_the_same_on_all_ranks(two):
    first, second = (result["candidates"] for result in two)
    assert first["sets"] == second["sets"]
    assert sum(map(len, first["sets"].values())) == BUDGET
    assert torch.equal(first["delta"], second["delta"])


def test_only_steps_that_choose_by_gradients_send_anything(two):
    for sent, of_known_set, text, total in on_each(two, bytes_and_calls):
        assert all(number > 0 for number, _ in sent[:4])
        assert sent[4:] == [(0, 0), (0, 0)]
        assert of_known_set == 2  # that all ranks hold the same, in the first step and in the second
        assert f"{total:,} bytes" in text


def test_each_rank_counts_what_it_looked_at(two):
    for plain, with_a_screen in on_each(two, counted):
        assert plain.dense > 0
        assert plain.screened == plain.verified == 0
        assert with_a_screen.screened > 0
        assert 0 < with_a_screen.dense < plain.dense


def test_the_dense_form_is_compared_in_one_process_only(two):
    for message in on_each(two, checked):
        assert "several ranks train together" in message


def test_a_rank_that_overflows_keeps_all_ranks_from_unmasking(two):
    first, second = on_each(two, nothing_finite_on_one_rank)
    assert first == second
    assert first[0] == (True, 0)
    assert first[1] == BUDGET // STEPS


def test_a_rank_without_tokens_takes_part(two):
    assert on_each(two, no_token_on_one_rank) == [BUDGET // STEPS] * 2


def test_a_rank_that_skips_a_module_is_an_error_on_all_ranks_that_names_it(two):
    for message, of_the_last in on_each(two, skipped_modules):
        assert "rank 0 is at `second." in message
        assert "rank 1 is at `norm." in message
        assert "has to run the same modules" in message
        assert "rank 0 is at `first." in of_the_last
        assert "rank 1 is at the end" in of_the_last


def test_ranks_that_start_from_other_weights_or_arguments_are_told_so(two):
    for of_weights, of_arguments in on_each(two, other_beginnings):
        assert "differ in their unmasked entries" in of_weights
        assert "torch.manual_seed on every rank" in of_weights
        assert "differ in their settings" in of_arguments
        assert "same arguments" in of_arguments


def test_training_without_ddp_is_an_error_in_the_first_steps(two):
    for of_id3, of_pafi in on_each(two, without_ddp):
        assert "differ in their flat delta" in of_id3
        assert "DistributedDataParallel" in of_id3
        assert "differ in their flat delta" in of_pafi


def test_check_ranks_finds_what_differs(two):
    for message in on_each(two, moved_behind_our_back):
        assert "differ in their flat delta" in message


def test_ranks_save_and_resume(two):
    first, second = on_each(two, saved_and_resumed)
    assert first == second
    assert first[1] == BUDGET // 2
    assert sum(map(len, first[0].values())) == BUDGET // STEPS * 5
    assert first[2] is False  # nothing is left on the model of what DDP was told


def dying(rank, die):
    model, batches = mlp()
    sparsify(model, BUDGET, steps=STEPS)
    get_unmasker(model).ranks.timeout = 2
    if rank == 1:
        model.norm.register_full_backward_hook(die)
    started = time.monotonic()
    message = error_of(lambda: model(**own_part(batches[0], rank)).backward())
    return message, time.monotonic() - started


def vanish(*_):
    os._exit(0)


def stall(*_):
    time.sleep(4)
    os._exit(0)


@pytest.mark.parametrize("die", [vanish, stall])
def test_a_rank_that_dies_or_stalls_is_an_error_within_the_time_limit(die):
    message, seconds = on_ranks(2, dying, die)[0]
    assert "got no answer from another rank within 2 s, or lost it" in message
    assert "ranks.timeout" in message
    assert seconds < 60


def test_an_unknown_way_to_agree_is_refused_before_anything_changes():
    with pytest.raises(SparsifyError, match="sync='fast'; expected 'exact' or 'candidates'"):
        sparsify(nn.Linear(3, 3), 2, steps=1, sync="fast")
