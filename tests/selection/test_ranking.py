"""Entries chosen ahead of training: given sets, and warm starts from an earlier delta."""

import copy

import torch
from models import build, train
from oracle import unmasked_sets
from torch import nn

from sparsify import (
    Increment,
    Magnitude,
    Random,
    SparseDelta,
    Static,
    Strategy,
    get_unmasker,
    sparsify,
    summary,
)  # fmt: skip


def test_a_mask_dict_is_trained_exactly():
    model, batches = build("mlp")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    mask = torch.rand(10, 6, generator=torch.Generator().manual_seed(1)) < 0.3
    bias = torch.zeros(8, dtype=torch.bool)
    bias[3] = True
    sparsify(model, None, {"first.weight": mask, "second.bias": bias})
    assert get_unmasker(model).budget == model.sparse_values.numel() == int(mask.sum()) + 1
    train(model, batches[:4])
    changed = {name: parameter != before[name] for name, parameter in model.named_parameters() if name in before}
    assert torch.equal(changed.pop("first.weight"), mask)
    assert torch.equal(changed.pop("second.bias"), bias)
    assert not any(change.any() for change in changed.values())


def test_flat_indices_in_any_order_and_twice_are_a_set():
    model, _ = build("mlp")
    sparsify(model, 3, {"first.weight": torch.tensor([7, 2, 7, 0])})
    assert unmasked_sets(model)["first.weight"] == [0, 2, 7]


def test_a_warm_start_trains_the_entries_of_an_earlier_delta_from_where_it_ended(tmp_path):
    base, batches = build("mlp")
    first = train(sparsify(copy.deepcopy(base), 40, "id3", steps=4), batches[:4])
    SparseDelta.from_model(first).save(tmp_path / "first")
    delta = SparseDelta.load(tmp_path / "first")
    again = delta.apply(copy.deepcopy(base))
    sparsify(again, None, delta.support)
    assert unmasked_sets(again) == unmasked_sets(first)
    for name, parameter in again.named_parameters():
        assert name == "sparse_values" or torch.equal(parameter, dict(first.named_parameters())[name])
    train(again, batches[:4])
    assert SparseDelta.from_model(again).config["strategy"] == {"importance": None, "selection": {"name": "given"}}
    assert "a given set" in str(summary(again))


def test_names_of_a_wrapped_model_are_found_under_their_plain_ones():
    wrapped = nn.ModuleDict({"module": nn.Linear(3, 3)})
    sparsify(wrapped, None, {"weight": torch.tensor([4])})
    assert unmasked_sets(wrapped)["module.weight"] == [4]


def test_a_random_order_is_unmasked_a_few_at_a_time_and_does_not_depend_on_the_training():
    model, batches = build("mlp")
    increment = train(sparsify(copy.deepcopy(model), 40, Strategy(Random(), Increment()), steps=4, seed=3), batches[:4])
    static = sparsify(copy.deepcopy(model), 40, Strategy(Random(), Static()), seed=3)
    assert unmasked_sets(increment) == unmasked_sets(static)


def test_an_interrupted_run_goes_on_in_the_same_order():
    strategy = Strategy(Magnitude(), Increment())
    model, batches = build("mlp")
    whole = train(sparsify(copy.deepcopy(model), 40, strategy, steps=4), batches[:4])
    half = train(sparsify(copy.deepcopy(model), 40, strategy, steps=4), batches[:2])
    resumed = sparsify(copy.deepcopy(model), 40, strategy, steps=4)
    resumed.load_state_dict(half.state_dict())
    train(resumed, batches[2:4])
    assert unmasked_sets(resumed) == unmasked_sets(whole)
