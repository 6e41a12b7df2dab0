"""From a pretrained model to a file and back onto a fresh base: the library's main job."""

import copy
import json

import pytest
import torch
from models import build, loss_of, sparsified, train
from oracle import unmasked_sets
from safetensors.torch import load_file
from trainers import BEST, make_trainer

from sparsify import SparseDelta, SparsifyError, desparsify, sparsify, summary

BUDGET, STEPS = 60, 6


def test_the_first_entries_make_a_checkpoint_of_a_smaller_budget():
    model, batches = sparsified("mlp", BUDGET, steps=STEPS)
    train(model, batches[:2])
    early = unmasked_sets(model)
    train(model, batches[2:STEPS])
    delta = SparseDelta.from_model(model, budget=BUDGET * 2 // STEPS)
    found = {name: tensor.indices.tolist() for name, tensor in delta.tensors.items()}
    assert found == {name: indices for name, indices in early.items() if indices}
    for budget in (0, BUDGET + 1, 2.5, True):
        with pytest.raises(SparsifyError, match="expected an int, 1 to 60, the entries so far"):
            SparseDelta.from_model(model, budget=budget)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "llama"])
def test_save_pretrained_writes_an_ordinary_merged_checkpoint(name, tmp_path):
    model, batches = build(name)
    model.save_pretrained(tmp_path / "plain")
    train(sparsify(model, BUDGET, steps=STEPS), batches[:STEPS])
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


def test_the_trainer_without_a_callback_trains_the_budget_and_loads_its_best_checkpoint_back(tmp_path):
    model, _ = build("bert")
    before = copy.deepcopy(model.state_dict())
    sparsify(model, BUDGET, steps=STEPS)
    trainer = make_trainer(
        model, tmp_path, callbacks=[], per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS,
        **BEST,
    )  # fmt: skip
    assert "fused" in trainer.args.optim
    trainer.train()
    assert (summary(model).unmasked, summary(model).step) == (BUDGET, STEPS)
    best = type(model).from_pretrained(trainer.state.best_model_checkpoint).state_dict()
    unmasked, after = unmasked_sets(model), desparsify(model).state_dict()
    assert all(torch.equal(value, best[name]) for name, value in after.items())
    moved = {name: (after[name] != values).flatten().nonzero().flatten().tolist() for name, values in before.items()}
    assert all(set(indices) <= set(unmasked.get(name, ())) for name, indices in moved.items())
    assert sum(map(len, moved.values())) == BUDGET * trainer.state.best_global_step // STEPS < BUDGET
