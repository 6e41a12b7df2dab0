"""PEFT's own tests of its layers, rewritten for a sparsified model: what PEFT does to an adapter keeps working.

Two twins go through the same: one is trained densely by the oracle, the other is sparsified. Whatever PEFT does to them
in between, their outputs, losses and weights stay the same.
"""

import copy
import pickle

import pytest
import torch
from models import train
from oracle import unmasked_sets
from peft import get_peft_model
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft_twins import (
    ADAPTERS,
    ATTENTION,
    OWN_MODELS,
    RATE,
    AdapterTwins,
    adapted,
    assert_close,
    base_of,
    lora,
    outputs,
)
from requirements import IS_TRANSFORMERS_4
from twins import sgd, trainable

from sparsify import SparseDelta, desparsify, get_unmasker, sparsify, summary
from sparsify.masked.module import masked_tensors

adapters = pytest.mark.parametrize("name", ADAPTERS)
pytestmark = pytest.mark.filterwarnings("ignore:.*got no gradient in the first step")


def is_plain(model):
    """Whether a model has no trace of PEFT or of sparsify."""
    modules = list(model.modules())
    return not (
        any(isinstance(module, BaseTunerLayer) or masked_tensors(module) for module in modules)
        or any(key.rpartition(".")[2].startswith("sparse_") for key in model.state_dict())
        or any(type(module).__module__.startswith("sparsify") for module in modules)
    )


# ------------------------------------------------------------------------------------------- merging


@adapters
def test_merging_and_unmerging_leave_the_outputs_and_training_goes_on(name):
    twins = AdapterTwins(name)
    for safe in (False, True):
        twins.train()
        before = twins.check()
        twins.do(lambda model, safe=safe: model.merge_adapter(safe_merge=safe))
        assert_close(twins.check(), before, 1e-6)
        with pytest.warns(UserWarning, match="already merged"):
            twins.sparse.merge_adapter()
        twins.do(lambda model: model.unmerge_adapter())
        assert_close(twins.check(), before, 1e-6)
    twins.train()


@adapters
@pytest.mark.parametrize("safe", [False, True], ids=["", "safe"])
def test_merge_and_unload_gives_a_plain_model_with_the_same_outputs(name, safe, tmp_path):
    twins = AdapterTwins(name)
    twins.train(3)
    trained = twins.check()
    merged = twins.sparse.merge_and_unload(safe_merge=safe)
    assert is_plain(merged)
    assert not hasattr(merged, "peft_config")
    assert_close(outputs(merged, twins.batches[0]), trained, 1e-6)
    assert merged.state_dict().keys() == base_of(name)[0].state_dict().keys()
    if hasattr(merged, "save_pretrained"):
        merged.save_pretrained(tmp_path)
        experts = {"experts_implementation": "eager"} if "experts" in name and not IS_TRANSFORMERS_4 else {}
        again = type(merged).from_pretrained(tmp_path, dtype="auto", **experts)
    else:
        again = pickle.loads(pickle.dumps(merged))
    assert_close(outputs(again, twins.batches[0]), trained, 1e-6)


@adapters
def test_unload_gives_the_base_model_back(name):
    twins = AdapterTwins(name)
    twins.train(1)
    base, (batch, *_) = base_of(name)
    unloaded = twins.sparse.unload()
    assert is_plain(unloaded)
    if "save" not in name:  # PEFT leaves what was saved in its place
        assert_close(outputs(unloaded, batch), outputs(base, batch))
    assert unloaded.state_dict().keys() == base.state_dict().keys()


def test_several_adapters_are_merged_as_peft_merges_them():
    twins = AdapterTwins("LoRA", "other")
    twins.train()
    twins.do(lambda model: model.set_adapter("other"))
    twins.train()
    for names in (["other"], ["default", "other"]):
        dense, sparse = [
            copy.deepcopy(model).merge_and_unload(adapter_names=names) for model in (twins.dense, twins.sparse)
        ]
        assert_close(outputs(sparse, twins.batches[0]), outputs(dense, twins.batches[0]))


# ------------------------------------------------------------------------------------------ disabling


@adapters
def test_a_disabled_adapter_gives_the_base_models_outputs_and_training_goes_on(name):
    twins = AdapterTwins(name)
    twins.train()
    trained = twins.check()
    base, (batch, *_) = base_of(name)
    with twins.sparse.disable_adapter():
        assert_close(outputs(twins.sparse, batch), outputs(base, batch))
        with twins.sparse.disable_adapter():
            pass
        assert_close(outputs(twins.sparse, batch), outputs(base, batch))
    assert torch.equal(outputs(twins.sparse, batch), trained)
    twins.train()


@pytest.mark.parametrize("make_optimizer", [sgd, torch.optim.Adam])
@pytest.mark.parametrize("strategy", ["id3", "pafi"])
@pytest.mark.parametrize("name", ["LoRA", "DoRA", "LoRA on an embedding", "LoRA on experts", "LoHa"])
def test_an_optimizer_made_after_an_adapter_was_disabled_moves_no_frozen_entry(name, strategy, make_optimizer):
    twins = AdapterTwins(name, strategy=strategy, make_optimizer=make_optimizer)
    with twins.sparse.disable_adapter():
        pass
    twins.new_optimizer()
    twins.train(4)
    assert summary(twins.sparse, verify=True).verification.ok
    assert all(p.grad is None for n, p in twins.sparse.named_parameters() if n != "sparse_values")


def test_weight_decay_of_an_optimizer_made_after_an_adapter_was_disabled_moves_no_frozen_entry():
    model, batches = adapted("LoRA")
    sparsify(model, 20, steps=3)
    model.set_adapter("default")
    train(model, batches, optimizer=torch.optim.AdamW(trainable(model), lr=1e-2, weight_decay=0.5))
    assert summary(model, verify=True).verification.ok


def test_what_peft_sets_back_is_frozen_again_by_the_next_forward_pass():
    model, batches = adapted("LoRA on an embedding")
    sparsify(model, 20, steps=3)
    with model.disable_adapter():
        pass
    model(**batches[0])
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["sparse_values"]


# ------------------------------------------------------------------------------------ several adapters


SEVERAL = ["LoRA", "DoRA", "LoRA on an embedding", "LoRA and modules to save", "IA3", "LoHa"]


@pytest.mark.parametrize("name", SEVERAL)
def test_adapters_are_trained_one_after_the_other(name):
    twins = AdapterTwins(name, "other")
    weights = dict(twins.sparse.named_parameters())
    twins.do(lambda model: model.set_adapter("default"))
    for active, inactive in (("default", "other"), ("other", "default"), ("default", "other")):
        twins.do(lambda model, active=active: model.set_adapter(active))
        assert twins.sparse.active_adapters == [active]
        asleep = {n: p.detach().clone() for n, p in weights.items() if f".{inactive}" in n}
        awake = {n: p.detach().clone() for n, p in weights.items() if f".{active}" in n}
        twins.train()
        assert all(torch.equal(weights[n], before) for n, before in asleep.items())
        assert not all(torch.equal(weights[n], before) for n, before in awake.items())


def test_two_active_adapters_are_trained_together():
    twins = AdapterTwins("LoRA", "other")
    twins.do(lambda model: model.base_model.set_adapter(["default", "other"]))
    twins.train(4)
    trained = {n.split(".")[-2] for n, indices in unmasked_sets(twins.sparse).items() if indices}
    assert trained == {"default", "other"}


def test_an_adapter_that_is_added_later_is_plain():
    twins = AdapterTwins("LoRA")
    twins.train()
    frozen = {t.name: t.parameter.detach().clone() for t in get_unmasker(twins.sparse).tensors}
    twins.sparse.add_adapter("late", lora(target_modules=ATTENTION, init_lora_weights=False))
    twins.sparse.double().set_adapter("late")
    late = {n: p for n, p in twins.sparse.named_parameters() if ".late." in n}
    assert late
    assert all(parameter.requires_grad for parameter in late.values())
    optimizer = torch.optim.SGD(late.values(), RATE)
    twins.sparse(**twins.batches[0])["loss"].backward()
    assert all(parameter.grad is not None for parameter in late.values())
    optimizer.step()
    assert all(torch.equal(twins.sparse.get_parameter(n), before) for n, before in frozen.items())
    twins.sparse.delete_adapter("late")
    twins.do(lambda model: model.set_adapter("default"))
    twins.sparse.zero_grad()
    twins.train()


@pytest.mark.parametrize("name", SEVERAL)
def test_an_adapter_is_deleted_and_the_other_goes_on(name, tmp_path):
    twins = AdapterTwins(name, "other")
    twins.do(lambda model: model.set_adapter("other"))
    twins.train()
    twins.do(lambda model: model.delete_adapter("other"))
    assert twins.sparse.active_adapters == ["default"]
    twins.train()
    again = ADAPTERS[name][1]()
    twins.sparse.add_adapter("other", again)  # a new one of the same name is another
    fresh = {n: p.detach().clone() for n, p in twins.sparse.named_parameters() if ".other" in n}
    twins.sparse.double().set_adapter("default")
    get_unmasker(twins.sparse).weights.write()
    assert fresh
    assert all(torch.equal(twins.sparse.get_parameter(n), p.double()) for n, p in fresh.items())
    twins.sparse.delete_adapter("other")
    twins.train()
    assert summary(twins.sparse, verify=True).verification.ok
    SparseDelta.from_model(twins.sparse).save(tmp_path)
    delta = SparseDelta.load(tmp_path)
    assert delta.whole
    assert not any(".other" in tensor_name for tensor_name in [*delta.support, *delta.whole])
    trained = twins.check()
    assert torch.equal(outputs(copy.deepcopy(twins.sparse), twins.batches[0]), trained)
    assert torch.equal(outputs(desparsify(twins.sparse), twins.batches[0]), trained)


@pytest.mark.parametrize("combination", ["linear", "svd", "cat", "ties", "magnitude_prune"])
def test_weighted_adapters_are_what_peft_makes_of_them(combination):
    twins = AdapterTwins("LoRA", "other")
    twins.train()
    options = {"density": 0.5} if combination in ("ties", "magnitude_prune") else {}
    twins.do(lambda model: model.add_weighted_adapter(["default", "other"], [0.7, 0.4], "both", combination, **options))
    twins.do(lambda model: model.set_adapter("both"))
    dense, sparse = twins.do(lambda model: outputs(model, twins.batches[0]))
    assert_close(sparse, dense)
    twins.do(lambda model: model.set_adapter("default"))
    twins.train()


def test_a_batch_of_several_adapters_gives_what_the_plain_model_gives():
    twins = AdapterTwins("LoRA on an embedding", "other")
    twins.train()
    names = ["default", "other", "__base__", "default"]
    dense, sparse = twins.do(lambda model: outputs(model, {**twins.batches[0], "adapter_names": names}))
    assert_close(sparse, dense)
    twins.train()


# ------------------------------------------------------------------------------------- the model itself


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("name", [name for name in ADAPTERS if ADAPTERS[name][0] != "mixtral"])  # does not pickle
def test_a_copy_trains_like_the_original(name, duplicate):
    twins = AdapterTwins(name)
    twins.train()
    twins.sparse = COPIES[duplicate](twins.sparse)
    twins.new_optimizer()
    twins.train()


@pytest.mark.parametrize("name", [n for n in ADAPTERS if ADAPTERS[n][0] not in OWN_MODELS])
def test_activation_checkpointing_changes_nothing(name):
    twins = AdapterTwins(name)
    for model in (twins.dense, twins.sparse):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    twins.train(4)


@adapters
def test_desparsify_gives_pefts_model_back(name):
    twins = AdapterTwins(name)
    twins.train()
    trained = twins.check()
    plain = desparsify(twins.sparse)
    reference = adapted(name)[0]
    assert {n: type(m) for n, m in plain.named_modules()} == {n: type(m) for n, m in reference.named_modules()}
    assert {n: p.requires_grad for n, p in plain.named_parameters()} == {
        n: p.requires_grad for n, p in reference.named_parameters()
    }
    assert torch.equal(outputs(plain, twins.batches[0]), trained)


def test_outside_of_a_forward_pass_pefts_layers_read_their_plain_parameters():
    model, _ = adapted("LoRA on an embedding")
    sparsify(model, 20, steps=3)
    layer = model.get_submodule("base_model.model.bert.embeddings.word_embeddings")
    for held in (layer.lora_embedding_A, layer.lora_embedding_B):
        assert type(held["default"]) is torch.nn.Parameter
    assert not layer.get_delta_weight("default").requires_grad


@pytest.mark.parametrize("name", [n for n in ADAPTERS if n not in ("LoRA on convolutions", "DoRA on convolutions")])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "adapter in float32"])
def test_a_bfloat16_model_trains_and_merges(name, autocast):
    model, batches = base_of(name, torch.bfloat16)
    model = get_peft_model(model, ADAPTERS[name][1](), autocast_adapter_dtype=autocast).train()
    batches = [{k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()} for batch in batches]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    sparsify(model, 20, steps=len(batches))
    train(model, batches)
    changed = sum(int((t.parameter != before[t.name]).sum()) for t in get_unmasker(model).tensors)
    assert 0 < changed <= 20
    trained = outputs(model, batches[0])
    merged = outputs(model.merge_and_unload(), batches[0])
    assert_close(merged, trained, 0.05)


def test_pefts_reports_of_a_sparsified_model_work(capsys):
    model, batches = adapted("LoRA", "other")
    sparsify(model, 20, steps=3)
    model(**batches[0])
    assert model.get_model_status().available_adapters == ["default", "other"]
    assert len(model.get_layer_status()) == 4
    model.print_trainable_parameters()
    assert "trainable params: 20 " in capsys.readouterr().out


def test_pefts_lora_plus_optimizer_trains_the_flat_delta():
    model, batches = adapted("LoRA")
    sparsify(model, 20, steps=3)
    train(model, batches, optimizer=create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=4))
    assert get_unmasker(model).step == 3
    assert summary(model, verify=True).verification.ok
