"""The trajectory of a selection, against a record of it."""

import warnings

import pytest
import torch
from models import build, descend, loss_of, train
from torch import nn

from examples.analysis import trajectory
from sparsify import Schedule, SparseDelta, SparsifyError, get_engine, sparsify, summary
from sparsify.analysis import shares

STEPS, BUDGET = 8, 60


def trained(name="mlp", strategy="id3", budget=BUDGET):
    model, batches = build(name)
    return train(sparsify(model, budget, strategy, steps=STEPS), batches[:STEPS])


def recorded(model, batches, steps):
    """The summary before training and after each step, recorded during training."""
    record = [summary(model), *(summary(train(model, [batch])) for batch in batches[:steps])]
    return [(it.step, it.unmasked, it.tensor_sparsity, pytest.approx(it.selection_entropy)) for it in record]


def numbers(model, points=100):
    return [(p.step, p.unmasked, p.tensor_sparsity, p.selection_entropy) for p in trajectory(model, points)]


@pytest.mark.parametrize(("name", "strategy"), [("bert", "id3"), ("t5", "id3"), ("mlp", "pafi")])
def test_the_trajectory_is_what_the_summary_said_step_by_step(name, strategy):
    model, batches = build(name)
    record = recorded(sparsify(model, BUDGET, strategy, steps=STEPS), batches, STEPS)
    assert numbers(model) == record
    assert len({unmasked for _, unmasked, *_ in record}) == (STEPS + 1 if strategy == "id3" else 1)
    assert len({(row.layer, row.kind) for row in shares(model)}) == len(shares(model)), "no two have one place"


@pytest.mark.parametrize(
    "schedule", ["linear", "cosine", Schedule(every=3), Schedule("cubic", until=0.5), Schedule(every=5, until=0.9)]
)
@pytest.mark.parametrize("steps", [5, STEPS + 3])
def test_it_holds_for_every_schedule_in_mid_run_and_beyond_the_plan(schedule, steps):
    model, batches = build("mlp")
    record = recorded(sparsify(model, BUDGET, "id3", steps=STEPS, schedule=schedule), batches, steps)
    loss_of(model, batches[steps]).backward()  # not stepped
    assert numbers(model) == record
    again = sparsify(build("mlp", seed=0)[0], BUDGET, "id3", steps=STEPS, schedule=schedule)
    again.load_state_dict(model.state_dict())
    assert numbers(again) == record


def test_what_has_no_trajectory_says_why():
    model = trained()
    with pytest.raises(SparsifyError, match=r"expected a torch\.nn\.Module, got SparseDelta"):
        trajectory(SparseDelta({}))
    for points in (1, 2.5, True, None):
        with pytest.raises(SparsifyError, match=r"points=.*; expected an int of at least 2"):
            trajectory(model, points)
    get_engine(model).steps = None
    with pytest.raises(SparsifyError, match=r"set get_engine\(model\).steps to what it was in training"):
        trajectory(model)
    with pytest.raises(SparsifyError, match=r"Repeat\(.*\) selects its entries afresh at each step"):
        trajectory(trained(strategy="d3-repeat", budget=5))


def test_points_are_spread_over_the_steps():
    model = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a run that kept to its schedule
        every = numbers(model)
    assert [step for step, *_ in numbers(model, points=5)] == [0, 2, 4, 6, 8]
    assert [step for step, *_ in numbers(model, points=2)] == [0, 8]
    assert all(point in every for point in numbers(model, points=5))


def test_steps_that_could_not_fill_their_quota_are_told():
    embedding = sparsify(nn.Embedding(6, 2), 8, "id3", steps=4)
    # a single row has two entries with a gradient, enough for the first step only
    descend(embedding, torch.tensor([[0], [0], [0], [1]]))
    with pytest.warns(UserWarning, match=r"been updated 14 times in 4 steps, and the model counts 10: some"):
        found = trajectory(embedding)
    assert (found[-1].step, found[-1].unmasked) == (4, summary(embedding).unmasked)
