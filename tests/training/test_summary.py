"""What a sparsified model's summary says, number by number and in print, and what ``verify=True`` finds."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from models import descend, sparsified
from models import train as train_model
from torch import nn

from sparsify import SparseDelta, SparsifyError, desparsify, get_engine, print_trainable_parameters, sparsify, summary
from sparsify.core.importance import D3
from sparsify.core.schedule import Schedule
from sparsify.strategies.strategy import PRESETS, Repeat, Strategy
from sparsify.training.summary import Summary

STEPS, BUDGET = 4, 20
SIZES = {"0.weight": 7 * 4, "1.weight": 4 * 5, "1.bias": 5, "2.weight": 5, "2.bias": 5}


@pytest.fixture
def model():
    """An embedding with a padding row, a layer, a norm, and a head that is trained dense."""
    layers = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    return sparsify(layers, BUDGET, "id3", steps=STEPS, modules_to_save=["3"])


def train(model, steps):
    descend(model, [torch.tensor([[1, 2, 3, 6]])] * steps)


def a_summary(**changes):
    settings = {
        "strategy": PRESETS["id3"], "budget": 10, "unmasked": 6, "num_candidates": 40, "num_dense": 0,
        "step": 3, "steps": 5, "updates": 12, "state_bytes": 1234,
        "counts": {"a": 2, "b": 4, "c": 0, "d": 0}, "sizes": {"a": 10, "b": 10, "c": 10, "d": 10},
    }  # fmt: skip
    return Summary(**{**settings, **changes})


def test_a_fresh_model_has_nothing_unmasked(model):
    found = summary(model)
    assert (found.budget, found.unmasked, found.step, found.steps, found.updates) == (BUDGET, 0, 0, STEPS, 0)
    assert found.counts == dict.fromkeys(SIZES, 0)
    assert found.sizes == SIZES
    assert found.num_candidates == sum(SIZES.values()) - 4  # the padding row is none
    assert found.num_dense == 5 * 3 + 3
    assert found.tensor_sparsity == 1
    assert found.selection_entropy == 0
    assert found.verification is None
    assert math.copysign(1, found.selection_entropy) == 1
    # the flat delta, each entry's id and base value, and the position
    assert found.state_bytes == BUDGET * (4 + 8 + 4) + 8 * 4


def test_training_is_counted_step_by_step(model):
    train(model, steps=3)
    found = summary(model)
    assert (found.step, found.unmasked) == (3, 15)
    assert found.updates == 5 + 10 + 15
    assert found.static_updates == BUDGET * 3
    assert sum(found.counts.values()) == 15
    assert found.counts == {tensor.name: len(tensor.indices) for tensor in get_engine(model).tensors}
    train(model, steps=STEPS - 1)
    assert summary(model).updates == 5 + 10 + 15 + 20 + 20 + 20
    assert (found.step, found.updates) == (3, 30)  # a summary is a snapshot


def test_sparsity_and_entropy_are_those_of_the_densities():
    assert a_summary().tensor_sparsity == 0.5
    found = a_summary(counts={"a": 2, "b": 3, "c": 0}, sizes={"a": 4, "b": 60, "c": 9})
    shares = [10 / 11, 1 / 11]  # 2 of 4 and 3 of 60
    assert found.selection_entropy == pytest.approx(-sum(p * math.log(p) for p in shares))
    even = a_summary(counts={"a": 1, "b": 2, "c": 3}, sizes={"a": 10, "b": 20, "c": 30})
    assert even.selection_entropy == pytest.approx(math.log(3))


def test_the_text_says_it_all_and_less_before_the_first_step():
    work = Counter(screened=84_312, dense=600_123, skipped=84_934_656)
    found = a_summary(num_dense=1500, budget=2000, unmasked=500, num_candidates=40_000, last_work=work)
    assert str(found).splitlines() == [
        "strategy           id3 (D3(exp=2, eps=1), Increment())",
        "step               3 of 5",
        "budget             2,000 of 40,000 candidates (5.0000%)",
        "unmasked           500 (25.0% of the budget)",
        "trained dense      1,500 beside the budget",
        "learning rate      try 10 times that of full fine-tuning: 0.0002 where that is 2e-05; "
        "for a new head 5 to 10 times as much",
        "tensor sparsity    0.5000 (4 tensors)",
        f"selection entropy  {found.selection_entropy:.4f}",
        "entry updates      12 (a static mask's: 6,000)",
        "state              1,234 bytes",
        "last selection     84,312 entries screened, 0.6 M entries dense, 84.9 M entries skipped",
        "unmasked most:",
        "  b           4  40.0000%",
        "  a           2  20.0000%",
    ]
    fresh = str(a_summary(steps=None, step=0, unmasked=0, counts={"a": 0}, sizes={"a": 10}))
    assert "step               0\n" in fresh
    assert "trained dense      nothing" in fresh
    assert "unmasked most" not in fresh


@pytest.mark.parametrize(
    ("strategy", "rate"),
    [(name, "10 times") for name in ("id3", "fish")]
    + [(name, "20 times") for name in ("random", "gsnr")]
    + [("pafi", None), ("bitfit", None)],
)
def test_a_rate_is_suggested_as_a_multiple_of_full_fine_tunings(strategy, rate):
    found = a_summary(strategy=PRESETS[strategy], budget=2000, num_candidates=40_000)
    assert ("learning rate" in str(found)) == bool(rate)
    assert rate is None or f"try {rate} that of full fine-tuning" in str(found)
    assert "learning rate" not in str(a_summary(num_new=40))  # an adapter's numbers
    with_head = replace(found, num_dense=9)
    assert ("for a new head 5 to 10 times as much" in str(with_head)) == (rate == "10 times")
    assert "a new head" not in str(found)
    many = replace(with_head, budget=4800)
    assert ("for a new head 5 to 10 times as much" in str(many)) == bool(rate), "at 12 % no rate is above ten times"


def test_a_notebook_shows_the_text_which_lists_the_tensors_unmasked_most():
    name = "<script>alert('1')</script>&\""
    counts = {"c": 25, "b": 25} | {f"layer.{i}": i + 1 for i in range(22)} | {name: 25}
    found = a_summary(counts=counts, sizes=dict.fromkeys(counts, 100))
    assert repr(found) == str(found)
    _, *tensors = str(found).split("unmasked most:")[1].splitlines()
    assert [line.split()[0] for line in tensors[:3]] == [name, "b", "c"]
    assert len(tensors) == 11
    assert tensors[-1] == "  ... and 15 more tensors"


def test_trainable_parameters_are_printed_in_pefts_words(model, capsys):
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    for each in (model, sparsify(nn.Linear(1000, 1000), 2500, "id3", steps=1), plain):
        print_trainable_parameters(each)
    total = sum(SIZES.values()) + 18
    assert capsys.readouterr().out.splitlines() == [
        f"trainable params: {BUDGET + 18} || all params: {total} || trainable%: {100 * (BUDGET + 18) / total:.4f}",
        "trainable params: 2,500 || all params: 1,001,000 || trainable%: 0.2498",
        "trainable params: 6 || all params: 12 || trainable%: 50.0000",
    ]


def test_full_fine_tuning_leaves_a_plain_model_that_may_be_sparsified():
    layers = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    full = sparsify(layers, None, "full", target_modules=["0"], modules_to_save=["2"])
    assert not full[1].weight.requires_grad
    assert not hasattr(full, "sparse_values")
    for verb in (summary, desparsify, get_engine):
        with pytest.raises(SparsifyError, match=r'is not sparsified; .*strategy "full" leaves the model plain'):
            verb(full)
    with pytest.raises(SparsifyError, match=r"What full fine-tuning changed is `SparseDelta.diff\(base, model\)`"):
        SparseDelta.from_model(full)
    sparsify(sparsify(full, None, "full"), 7, "pafi")
    assert summary(full).budget == 7


STRATEGIES = ["id3", "pafi", "random", "bitfit", Strategy(D3(), Repeat())]
SCHEDULES = [Schedule(every=4), Schedule("cubic", until=0.5), "cosine"]
RUNS = [*((each, "uniform") for each in STRATEGIES), *(("id3", each) for each in SCHEDULES)]


def trained(strategy="id3", steps=3, planned=6, **options):
    model, batches = sparsified("mlp", None if strategy == "bitfit" else 30, strategy, steps=planned, **options)
    return train_model(model, batches[:steps])


@pytest.mark.parametrize(("strategy", "schedule"), RUNS, ids=str)
@pytest.mark.parametrize("steps", [0, 3, 8])
def test_an_honest_run_is_verified_at_any_step(strategy, schedule, steps):
    found = summary(trained(strategy, steps, schedule=schedule), verify=True)
    assert found.verification.ok
    assert found.verification.unmasked == found.verification.expected
    assert "frozen entries are bit-equal to the base" in str(found)
    assert "NOT verified" not in str(found)


def test_a_frozen_entry_that_moved_and_a_base_value_that_was_tampered_with_are_found_and_named():
    model = trained()
    tensor = next(tensor for tensor in get_engine(model).tensors if tensor.count)
    get_engine(model).entries.base[tensor.slots[0]] += 1
    assert summary(model, verify=True).verification.changed == (tensor.name,)
    model = trained()
    frozen = sorted(set(range(60)) - set(model.first.indices.tolist()))[0]
    model.first.weight.data.view(-1)[frozen] += 1e-6
    found = summary(model, verify=True)
    assert found.verification.changed == ("first.weight",)
    assert "NOT verified" in str(found)
    assert "1 tensors differ from the base at frozen entries: first.weight" in str(found)


def test_a_cast_model_cannot_be_verified_and_says_so():
    found = summary(trained().to(torch.bfloat16), verify=True).verification
    assert not found.ok
    assert "were cast since sparsify()" in str(found)


def test_entries_that_wait_for_a_gradient_are_reported():
    model, batches = sparsified("mlp", 30, "id3", steps=1, target_modules=["first"])
    with torch.no_grad():
        model.second.weight.zero_()  # nothing behind it has a gradient any more
    get_engine(model).weights.base_digests.pop("second.weight")
    found = summary(train_model(model, batches[:1]), verify=True).verification
    assert (found.unmasked, found.expected, found.ok) == (0, 30, False)
    assert "0 entries are unmasked, the schedule says 30" in str(found)
