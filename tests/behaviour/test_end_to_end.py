"""A sparsified model saved as an ordinary checkpoint, or not as a delta."""

import json

import pytest
import torch
from models import build, loss_of, sparsified, train
from safetensors.torch import load_file

from sparsify import SparseDelta, SparsifyError, desparsify, sparsify

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
