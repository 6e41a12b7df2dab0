"""Exports: parameters that train and are in no delta are named, and no others; what cannot be a delta is refused."""

import copy
import warnings

import pytest
import torch
from models import build, train
from torch import nn

from sparsify import SparseDelta, SparsifyError, sparsify, summary

STEPS = 4


def export_silently(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SparseDelta.from_model(model)


def assert_complete(model):
    export_silently(model)
    assert summary(model, verify=True).verification.ok


def assert_incomplete(model, message):
    with pytest.warns(UserWarning, match=message) as caught:
        SparseDelta.from_model(model)
    assert caught[0].filename == __file__
    verification = summary(model, verify=True).verification
    assert not verification.ok
    return verification


def test_a_part_that_is_made_trainable_afterwards_is_named():
    model, batches = build("mlp")
    sparsify(model, 20, steps=STEPS, target_modules=["first", "second"])
    model.head.requires_grad_(True)
    assert_complete(model)  # frozen by sparsify(), and not changed so far: PEFT sets the flag of such ones too
    train(model, batches[:STEPS])
    found = assert_incomplete(model, "`head.weight`, `head.bias` can train, but no delta holds them.* modules_to_save")
    assert found.changed == ("head.weight", "head.bias")
    assert "`head.weight`, `head.bias` can train" in str(found)


def test_a_part_that_was_frozen_before_and_is_made_trainable_is_named_at_once():
    model, _ = build("mlp")
    for part in (model.first, model.second, model.head):
        part.requires_grad_(False)
    sparsify(model, 20, "pafi")
    model.requires_grad_(True)
    found = assert_incomplete(model, "`first.weight`, `first.bias`, `second.weight`, .* and 1 more can train")
    assert found.changed == ()


@pytest.mark.parametrize("outputs", [3, 2])
def test_a_module_that_is_replaced_afterwards_is_named_with_what_is_lost(outputs):
    model, batches = build("mlp")
    sparsify(model, 20, "random")
    model.head = nn.Linear(8, outputs).requires_grad_(False)
    assert_incomplete(model, "^`head.weight`, `head.bias` were replaced")
    model.head.requires_grad_(True)
    train(model, [{**batch, "labels": batch["labels"] % outputs} for batch in batches[:STEPS]])
    assert_incomplete(
        model,
        "`head.weight`, `head.bias` can train, but no delta .*; `head.weight`, `head.bias` were replaced after "
        r"sparsify\(\): what was trained there is lost",
    )


def test_a_head_outside_of_the_sparsified_module_is_named():
    encoder, _ = build("mlp")
    model = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(8, 3)})
    sparsify(model["encoder"], 20, "pafi")
    assert assert_incomplete(model, "`head.weight`, `head.bias` can train").changed == ()
    assert_complete(model["encoder"])
    model["head"].requires_grad_(False)
    assert_complete(model)


def test_dense_modules_and_masked_ones_that_require_grad_again_are_held():
    model, batches = build("mlp")
    sparsify(model, 20, steps=STEPS, modules_to_save=["head"])
    train(model, batches[:STEPS])
    model.requires_grad_(True)
    assert_complete(model)
    model.head = nn.Linear(8, 3)  # under its name
    SparseDelta.from_model(model).whole["head.weight"].equal(model.head.weight)
    assert_complete(model)


def lora(**options):
    from peft import LoraConfig, get_peft_model

    model, batches = build("bert")
    config = LoraConfig(target_modules=["query", "value"], modules_to_save=["classifier"], init_lora_weights=False)
    return sparsify(get_peft_model(model, config), 20, steps=STEPS, **options), batches, config


@pytest.mark.parametrize("target_modules", [None, ["query.lora_A.default"]])
def test_what_peft_makes_trainable_again_is_held_or_was_not_trained(target_modules):
    model, batches, _ = lora(target_modules=target_modules)
    train(model, batches[:STEPS])
    with model.disable_adapter():
        pass
    model.set_adapter("default")
    assert any(p.requires_grad for name, p in model.named_parameters() if "value.lora_A" in name)
    assert_complete(model)


def test_an_adapter_that_comes_afterwards_is_named_under_its_plain_names():
    model, _, config = lora()
    model.add_adapter("other", config)
    model.set_adapter("other")
    assert_incomplete(model, r"`bert\.encoder\.layer\.0\.attention\.self\.query\.lora_A\.other\.weight`, .* can train")


def test_an_adapter_that_is_deleted_is_passed_over():
    model, _, config = lora()
    model.add_adapter("other", config)
    model.delete_adapter("default")
    model.requires_grad_(False)  # of the other, which PEFT has activated
    export_silently(model)


def test_training_on_does_not_change_a_delta():
    model, batches = build("mlp")
    train(sparsify(model, 20, steps=STEPS, modules_to_save=["head"]), batches[:2])
    before = copy.deepcopy(delta := SparseDelta.from_model(model))
    train(model, batches[2:STEPS])
    assert delta == before != SparseDelta.from_model(model)
    assert not delta.whole["head.weight"].requires_grad
    assert delta.config["versions"]["torch"] == torch.__version__


def test_what_cannot_go_into_a_delta_is_refused_by_name():
    model = nn.Linear(2, 2)
    model.module = nn.Linear(2, 2)  # as DDP's prefix
    sparsify(model, 12, "pafi")
    with pytest.raises(SparsifyError, match="two trained tensors are called `weight`: rename one of the modules"):
        SparseDelta.from_model(model)
    model.sparse_values.data[:2] = torch.nan
    with pytest.raises(SparsifyError, match=r"tensor `\w+` cannot go into a delta: \d of \d values are not finite"):
        SparseDelta.from_model(model)
