"""A sparsified model saved as an ordinary checkpoint, or not as a delta."""

import copy
import json

import pytest
import torch
from deltas import bits
from models import build, loss_of, sparsified, train
from safetensors.torch import load_file

from sparsify import SparseDelta, SparsifyError, desparsify, merge_deltas, overlap, sparsify, trained_state
from sparsify.common.raw_bits import digest
from sparsify.strategies.importance import Magnitude
from sparsify.strategies.strategy import Static, Strategy

BUDGET, STEPS = 60, 6


def test_a_delta_of_entries_that_are_not_there_or_not_finite_is_refused():
    model, batches = sparsified("mlp", BUDGET, steps=STEPS)
    train(model, batches[:2])
    for budget in (0, 21, 2.5, True):
        with pytest.raises(SparsifyError, match="expected an int, 1 to 20, the entries so far"):
            SparseDelta.from_model(model, budget=budget)
    (loss_of(model, batches[0]) * torch.nan).backward()
    torch.optim.SGD([model.sparse_values], lr=0.1).step()
    with pytest.raises(SparsifyError, match=r"`sparse_values` is not finite: the loss or its gradient overflowed"):
        SparseDelta.from_model(model)


def test_the_default_device_does_not_matter(tmp_path):
    """As after ``torch.set_default_device("cuda")``; on the meta device, what lands there by mistake has no values."""
    (base, batches), folder = build("bert"), tmp_path / "base"
    base.save_pretrained(folder)
    one, two = (train(sparsify(copy.deepcopy(base), BUDGET, kind, steps=STEPS), batches) for kind in ("id3", "random"))
    deltas = [SparseDelta.from_model(one), SparseDelta.from_model(two)]

    def everything():
        for strategy in ("pafi", Strategy(Magnitude(), Static("spread")), deltas[0].support):
            budget = None if isinstance(strategy, dict) else BUDGET
            yield SparseDelta.from_model(sparsify(copy.deepcopy(base), budget, strategy))
        yield SparseDelta.from_checkpoint(trained_state(one))
        yield overlap(*deltas, base)
        for method in ("ties", "dare_ties", "dare_linear"):
            yield bits(merge_deltas(deltas, method=method, density=0.5).apply(copy.deepcopy(base)))
        yield bits((deltas[0] + deltas[1]).apply(copy.deepcopy(base)))
        yield deltas[0].check(folder)
        merged = deltas[0].merge(folder, tmp_path / f"merged-{torch.get_default_device()}")
        yield digest(torch.cat([tensor.flatten() for tensor in load_file(merged / "model.safetensors").values()]))

    expected = list(everything())
    with torch.device("meta"):
        found = list(everything())
    assert found == expected


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_save_pretrained_writes_an_ordinary_merged_checkpoint(name, tmp_path):
    model, batches = build(name)
    model.save_pretrained(tmp_path / "plain")
    train(sparsify(model, BUDGET, "id3", steps=STEPS), batches[:STEPS])
    model.save_pretrained(tmp_path / "merged")
    folders = tmp_path / "plain", tmp_path / "merged"
    plain, merged = (load_file(folder / "model.safetensors").keys() for folder in folders)
    assert plain == merged
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
    assert configs[0]["architectures"] == configs[1]["architectures"]
    reloaded = type(model).from_pretrained(tmp_path / "merged")
    assert torch.equal(loss_of(reloaded.train(), batches[0]), loss_of(model, batches[0]))
    assert model._keys_to_ignore_on_save
    desparsify(model)
    assert not any("sparse" in key for key in model._keys_to_ignore_on_save or ())
