"""repeat-S: the whole budget is chosen afresh at each step; what was touched keeps its value and its slot."""

import copy

import pytest
import torch
from models import build, loss_of, train

from sparsify import D3, Repeat, SparseDelta, Strategy, get_unmasker, sparsify, summary

BUDGET = 12


@pytest.fixture
def plain_and_batches():
    return build("mlp")


def test_each_step_trains_the_budget_and_touched_entries_add_up(plain_and_batches):
    model, batches = plain_and_batches
    sparsify(model, BUDGET, "d3-repeat", steps=6)
    assert model.sparse_values.numel() == 6 * BUDGET
    touched = []
    for batch in batches[:6]:
        train(model, [batch])
        assert get_unmasker(model).trained == int((model.sparse_values.grad != 0).sum()) == BUDGET
        touched.append(summary(model).unmasked)
    assert touched == sorted(touched)
    assert BUDGET == touched[0] < touched[-1] <= 6 * BUDGET
    assert summary(model).updates == summary(model).static_updates == 6 * BUDGET
    assert "touched" in str(summary(model))


def test_all_entries_are_room_enough(plain_and_batches):
    model, _ = plain_and_batches
    entries = sum(parameter.numel() for parameter in model.parameters())
    assert sparsify(model, BUDGET, "d3-repeat", steps=1_000).sparse_values.numel() == entries


def test_where_the_room_ends_a_step_goes_without_new_entries(plain_and_batches):
    model, batches = plain_and_batches
    sparsify(model, BUDGET, Strategy(D3(), Repeat(capacity=BUDGET + 2)))
    train(model, batches)
    assert summary(model).unmasked == BUDGET + 2
    assert 0 < get_unmasker(model).trained <= BUDGET


def test_micro_batches_of_one_step_train_the_entries_that_the_first_chose(plain_and_batches):
    plain, batches = plain_and_batches
    model = sparsify(copy.deepcopy(plain), BUDGET, "d3-repeat", steps=2)
    loss_of(model, batches[0]).backward()
    chosen = model.sparse_values.grad != 0
    loss_of(model, batches[1]).backward()
    assert torch.equal(model.sparse_values.grad != 0, chosen)
    total = copy.deepcopy(plain)
    (loss_of(total, batches[0]) + loss_of(total, batches[1])).backward()
    dense = dict(total.named_parameters())
    for tensor in get_unmasker(model).tensors:
        torch.testing.assert_close(
            model.sparse_values.grad[tensor.slots], dense[tensor.name].grad.take(tensor.indices), rtol=1e-4, atol=1e-6
        )


def test_it_resumes_exactly(plain_and_batches):
    plain, batches = plain_and_batches
    whole = train(sparsify(copy.deepcopy(plain), BUDGET, "d3-repeat", steps=6), batches[:6])
    half = sparsify(copy.deepcopy(plain), BUDGET, "d3-repeat", steps=6)
    optimizer = torch.optim.AdamW([half.sparse_values], lr=0.01)
    train(half, batches[:3], optimizer=optimizer)
    resumed = sparsify(copy.deepcopy(plain), BUDGET, "d3-repeat", steps=6)
    resumed.load_state_dict(half.state_dict())
    again = torch.optim.AdamW([resumed.sparse_values], lr=0.01)
    again.load_state_dict(optimizer.state_dict())
    train(resumed, batches[3:6], optimizer=again)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


def test_its_delta_holds_every_entry_that_was_touched(plain_and_batches, tmp_path):
    plain, batches = plain_and_batches
    model = train(sparsify(copy.deepcopy(plain), BUDGET, "d3-repeat", steps=6), batches[:6])
    SparseDelta.from_model(model).save(tmp_path / "delta")
    delta = SparseDelta.load(tmp_path / "delta")
    assert delta.num_entries == summary(model).unmasked
    fresh = delta.apply(copy.deepcopy(plain))
    for name, parameter in fresh.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name])
