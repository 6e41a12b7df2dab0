"""``summary(model, verify=True)``: a model is what it should be, or it says where not."""

import pytest
import torch
from models import build, train

from sparsify import D3, Repeat, Schedule, Strategy, sparsify, summary

STRATEGIES = ["id3", "pafi", "random", "bitfit", Strategy(D3(), Repeat())]
SCHEDULES = [Schedule(every=4), Schedule("cubic", until=0.5), "cosine"]


def trained(strategy="id3", steps=3, planned=6, **options):
    model, batches = build("mlp")
    sparsify(model, None if strategy == "bitfit" else 30, strategy, steps=planned, **options)
    return train(model, batches[:steps])


@pytest.mark.parametrize(
    ("strategy", "schedule"),
    [*((each, "uniform") for each in STRATEGIES), *(("id3", each) for each in SCHEDULES)],
    ids=str,
)
@pytest.mark.parametrize("steps", [0, 1, 3, 5, 8])
def test_an_honest_run_is_verified_at_any_step(strategy, schedule, steps):
    found = summary(trained(strategy, steps, schedule=schedule), verify=True)
    assert found.verification.ok
    assert found.verification.unmasked == found.verification.expected
    assert "frozen entries are bit-equal to the base" in str(found)
    assert "NOT verified" not in str(found)


def test_a_frozen_entry_that_moved_is_found_and_named():
    model = trained()
    frozen = sorted(set(range(60)) - set(model.first.indices.tolist()))[0]
    model.first.weight.data.view(-1)[frozen] += 1e-6
    found = summary(model, verify=True)
    assert found.verification.changed == ("first.weight",)
    assert "NOT verified" in str(found)
    assert "1 tensors differ from the base at frozen entries: first.weight" in str(found)


def test_a_base_value_that_was_tampered_with_is_found():
    model = trained()
    tensor = next(t for t in model._sparsify_engine.tensors if t.count)
    engine = model._sparsify_engine
    engine.entries.base[int(tensor.slots[0])] += 1
    assert summary(model, verify=True).verification.changed == (tensor.name,)


def test_dense_modules_may_change():
    model = trained(modules_to_save=["head"])
    found = summary(model, verify=True).verification
    assert found.ok
    assert found.num_frozen == 60 + 10 + 10 + 10 + 80 + 8 - found.unmasked


def test_a_cast_model_cannot_be_verified_and_says_so():
    found = summary(trained().to(torch.bfloat16), verify=True).verification
    assert not found.ok
    assert "were cast since sparsify()" in str(found)


def test_entries_that_wait_for_a_gradient_are_reported():
    model, batches = build("mlp")
    sparsify(model, 30, "id3", steps=1, target_modules=["first"])
    with torch.no_grad():
        model.second.weight.zero_()  # nothing behind it has a gradient any more
    model._sparsify_engine.base_digests.pop("second.weight")
    found = summary(train(model, batches[:1]), verify=True).verification
    assert (found.unmasked, found.expected, found.ok) == (0, 30, False)
    assert "0 entries are unmasked, the schedule says 30" in str(found)
