"""What an engine exports, at every step what ``SparseDelta.from_model`` takes; and parameters that are in no delta."""

import copy
import warnings

import pytest
import torch
from models import build, run_steps, sparsified, train
from peft import LoraConfig, get_peft_model
from torch import nn

from sparsify import D3, Increment, SparseDelta, SparsifyError, Strategy, extend, get_engine, sparsify, summary

STEPS = 6


def assert_complete(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SparseDelta.from_model(model)
    assert summary(model, verify=True).verification.ok


def assert_incomplete(model, message):
    with pytest.warns(UserWarning, match=message) as caught:
        SparseDelta.from_model(model)
    assert caught[0].filename == __file__
    verification = summary(model, verify=True).verification
    assert not verification.ok
    return verification


def test_a_part_that_is_made_trainable_afterwards_is_named():
    model, batches = sparsified("mlp", 20, steps=STEPS, target_modules=["first", "second"])
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
    model, batches = sparsified("mlp", 20, "random")
    model.head = nn.Linear(8, outputs).requires_grad_(False)
    assert_incomplete(model, "^`head.weight`, `head.bias` were replaced")
    model.head.requires_grad_(True)
    train(model, [{**batch, "labels": batch["labels"] % outputs} for batch in batches[:STEPS]])
    both = "`head.weight`, `head.bias`"
    assert_incomplete(model, rf"{both} can train, .*; {both} were replaced after sparsify\(\): what was trained there")


def test_a_head_outside_of_the_sparsified_module_is_named():
    encoder, _ = build("mlp")
    model = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(8, 3)})
    sparsify(model["encoder"], 20, "pafi")
    assert assert_incomplete(model, "`head.weight`, `head.bias` can train").changed == ()
    assert_complete(model["encoder"])
    model["head"].requires_grad_(False)
    assert_complete(model)


def test_dense_modules_and_masked_ones_that_require_grad_again_are_held():
    model, batches = sparsified("mlp", 20, steps=STEPS, modules_to_save=["head"])
    train(model, batches[:STEPS])
    model.requires_grad_(True)
    assert_complete(model)
    model.head = nn.Linear(8, 3)  # under its name
    assert SparseDelta.from_model(model).whole["head.weight"].equal(model.head.weight)
    assert_complete(model)


@pytest.mark.parametrize("target_modules", [None, ["query.lora_A.default"]])
def test_what_peft_makes_trainable_again_is_held_or_was_not_trained(target_modules):
    model, batches = build("bert")
    config = LoraConfig(target_modules=["query", "value"], modules_to_save=["classifier"], init_lora_weights=False)
    model = sparsify(get_peft_model(model, config), 20, "id3", steps=STEPS, target_modules=target_modules)
    train(model, batches[:STEPS])
    with model.disable_adapter():
        pass
    model.set_adapter("default")
    assert any(p.requires_grad for name, p in model.named_parameters() if "value.lora_A" in name)
    assert_complete(model)


def test_what_cannot_go_into_a_delta_is_refused_by_name():
    model = nn.Linear(2, 2)
    model.module = nn.Linear(2, 2)  # as DDP's prefix
    sparsify(model, 12, "pafi")
    with pytest.raises(SparsifyError, match="two trained tensors are called `weight`: rename one of the modules"):
        SparseDelta.from_model(model)
    model.sparse_values.data[:2] = torch.nan
    with pytest.raises(SparsifyError, match=r"tensor `\w+` cannot go into a delta: \d of \d values are not finite"):
        SparseDelta.from_model(model)


def assert_exported(export, model):
    version = export()
    assert SparseDelta(version.snapshot().tensors, version.whole, version.config) == SparseDelta.from_model(model)
    assert list(version.tensors) == sorted(version.tensors)
    return version


def test_plain_weights_that_are_loaded():
    model, batches = build("mlp", dtype=torch.bfloat16)
    sparsify(model, 60, "id3", steps=STEPS)
    plain = copy.deepcopy(model.state_dict())
    export = get_engine(model).exporter(model, "DeltaPublisher.update()")
    run_steps(model, batches[:4])
    assert_exported(export, model)
    torch.manual_seed(3)  # weights without entries: their deltas are rounded, the weights are as they came
    weights = {name: torch.randn_like(value) * 9 for name, value in plain.items() if not name.startswith("sparse_")}
    model.load_state_dict(weights, strict=False)
    for _ in range(2):
        assert_exported(export, model)
    run_steps(model, batches[4:5])
    assert_exported(export, model)


def test_a_run_that_is_extended():
    model, batches = sparsified("mlp", 60, steps=2)
    export = get_engine(model).exporter(model, "DeltaPublisher.update()")
    run_steps(model, batches[:2])
    assert assert_exported(export, model).config["steps"] == 2
    extend(model, steps=20)
    assert export().config == SparseDelta.from_model(model).config


def test_a_module_that_was_cast():
    model, _ = sparsified("mlp", 60, "random")
    export = get_engine(model).exporter(model, "DeltaPublisher.update()")
    assert_exported(export, model)
    model.second.bfloat16()  # its weight is the base's float32 value plus the delta, rounded once
    for _ in range(2):
        model.sparse_values.data.normal_(std=1e-3)
        version = assert_exported(export, model)
    assert {entries.dtype for entries in version.tensors.values()} == {torch.float32, torch.bfloat16}


def test_a_delta_of_a_model_that_was_cast_says_that_it_is_rounded():
    model, _ = sparsified("mlp", 60, "random")
    with pytest.warns(UserWarning, match="cast from torch.float32 to torch.bfloat16 after .* bf16_full_eval") as caught:
        SparseDelta.from_model(model.bfloat16())
    assert [each.filename for each in caught] == [__file__]


def test_negative_zeros_between_backward_and_step():
    model, batches = build("mlp")
    with torch.no_grad():
        model.first.weight.fill_(-0.0)
    sparsify(model, 60, Strategy(D3(), Increment()), steps=2, target_modules=["first"])
    export = get_engine(model).exporter(model, "DeltaPublisher.update()")
    model(**batches[0]).backward()
    version = assert_exported(export, model)
    assert version.tensors["first.weight"].values.signbit().all()
