"""PEFT's own tests of its layers, rewritten for twins: what PEFT does to an adapter keeps working once sparsified."""

import copy

import peft
import pytest
import torch
from models import train
from oracle import unmasked_sets
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft_twins import ADAPTERS, ATTENTION, AdapterTwins, adapted, base_of, lora, outputs
from safetensors.torch import load_file
from twins import Twins, assert_close

from sparsify import SparseDelta, desparsify, get_engine, sparsify, summary

adapters = pytest.mark.parametrize("name", ADAPTERS)
pytestmark = pytest.mark.filterwarnings("ignore:.*got no gradient in the first step")


@pytest.fixture
def name():
    return "LoRA"


@pytest.fixture
def twins(name):
    twins = AdapterTwins(name)
    twins.train()
    return twins


def is_plain(model):
    classes = {type(module) for module in model.modules()}
    return not any(issubclass(each, BaseTunerLayer) or each.__module__.startswith("sparsify") for each in classes)


@adapters
def test_an_adapter_is_disabled_merged_and_unmerged_and_training_goes_on(name, twins):
    trained = twins.check()
    base, (batch, *_) = base_of(name)
    with twins.sparse.disable_adapter():
        assert_close(outputs(twins.sparse, batch), outputs(base, batch))
        with twins.sparse.disable_adapter():
            pass
        assert_close(outputs(twins.sparse, batch), outputs(base, batch))
    assert torch.equal(outputs(twins.sparse, batch), trained)
    twins.do(lambda model: model.merge_adapter(safe_merge=True))
    assert_close(twins.check(), trained, 1e-6)
    with pytest.warns(UserWarning, match="already merged"):
        twins.sparse.merge_adapter()
    twins.do(lambda model: model.unmerge_adapter())
    assert_close(twins.check(), trained, 1e-6)
    twins.train()


@adapters
@pytest.mark.parametrize("merges", [True, False])
def test_an_unloaded_model_is_plain_with_the_outputs_of_the_trained_or_the_base_model(name, twins, merges):
    base, (batch, *_) = base_of(name)
    trained = twins.check()
    plain = twins.sparse.merge_and_unload() if merges else twins.sparse.unload()
    assert is_plain(plain)
    assert not hasattr(plain, "peft_config")
    if merges:
        assert_close(outputs(plain, batch), trained, 1e-6)
    elif "save" not in name:  # PEFT leaves what was saved in its place
        assert_close(outputs(plain, batch), outputs(base, batch))
    assert plain.state_dict().keys() == base.state_dict().keys()


@pytest.mark.parametrize("strategy", ["id3", "pafi"])
@pytest.mark.parametrize("name", ["LoRA", "LoRA on an embedding", "LoRA on experts"])
def test_an_optimizer_made_after_an_adapter_was_disabled_moves_no_frozen_entry(name, strategy):
    twins = AdapterTwins(name, strategy=strategy, make_optimizer=torch.optim.Adam)
    with twins.sparse.disable_adapter():
        pass
    twins.new_optimizer()
    twins.train(4)
    assert summary(twins.sparse, verify=True).verification.ok
    assert all(p.grad is None for n, p in twins.sparse.named_parameters() if n != "sparse_values")


def test_pefts_optimizer_made_after_an_adapter_was_set_trains_the_flat_delta_alone():
    model, batches = adapted("LoRA")
    sparsify(model, 20, "id3", steps=3)
    model.set_adapter("default")
    train(model, batches, optimizer=create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=4))
    assert get_engine(model).step == 3
    assert summary(model, verify=True).verification.ok


def test_two_active_adapters_are_trained_together_run_in_one_batch_and_are_reported(capsys):
    twins = AdapterTwins("LoRA on an embedding", "other")
    twins.do(lambda model: model.base_model.set_adapter(["default", "other"]))
    twins.train(4)
    trained = {part for n, indices in unmasked_sets(twins.sparse).items() if indices for part in n.split(".")}
    assert {"default", "other"} <= trained
    assert twins.sparse.get_model_status().available_adapters == ["default", "other"]
    twins.sparse.print_trainable_parameters()
    assert f"trainable params: {twins.budget} " in capsys.readouterr().out
    batch = {**twins.batches[0], "adapter_names": ["default", "other", "__base__", "default"]}
    assert_close(*twins.do(lambda model: outputs(model, batch)))
    twins.train()


@pytest.mark.parametrize("loaded", [False, True])
def test_an_adapter_that_is_added_or_loaded_later_is_plain(twins, loaded, tmp_path):
    adapted("LoRA")[0].save_pretrained(tmp_path)
    frozen = {t.name: t.parameter.detach().clone() for t in get_engine(twins.sparse).tensors}
    trained, config = twins.check(), lora(target_modules=ATTENTION, init_lora_weights=False)
    twins.sparse.load_adapter(tmp_path, "late") if loaded else twins.sparse.add_adapter("late", config)
    twins.sparse.double().set_adapter("late")
    assert not torch.equal(outputs(twins.sparse, twins.batches[0]), trained)
    late = [p for n, p in twins.sparse.named_parameters() if ".late." in n]
    assert late
    optimizer = torch.optim.SGD(late, 0.02)
    twins.sparse(**twins.batches[0])["loss"].backward()
    assert all(parameter.grad is not None for parameter in late)
    optimizer.step()
    assert all(torch.equal(twins.sparse.get_parameter(n), before) for n, before in frozen.items())
    twins.sparse.delete_adapter("late")
    twins.do(lambda model: model.set_adapter("default"))
    assert torch.equal(twins.check(), trained)
    twins.train()


@pytest.mark.parametrize("name", ["DoRA", "LoRA on an embedding", "LoRA and modules to save", "IA3"])
def test_adapters_are_trained_in_turns_and_where_one_is_deleted_the_other_goes_on(name, tmp_path):
    pair = AdapterTwins(name, "other")
    weights = dict(pair.sparse.named_parameters())
    for active, inactive in (("default", "other"), ("other", "default")):
        pair.do(lambda model, active=active: model.set_adapter(active))
        assert pair.sparse.active_adapters == [active]
        before = {n: p.detach().clone() for n, p in weights.items()}
        pair.train()
        moved = {n for n, p in weights.items() if not torch.equal(p, before[n])}
        assert not any(f".{inactive}" in n for n in moved)
        assert any(f".{active}" in n for n in moved)
    pair.do(lambda model: model.delete_adapter("other"))
    assert pair.sparse.active_adapters == ["default"]
    pair.train()
    pair.sparse.add_adapter("other", ADAPTERS[name][1]())  # a new one of the same name is another
    fresh = {n: p.detach().clone() for n, p in pair.sparse.named_parameters() if ".other" in n}
    pair.sparse.double().set_adapter("default")
    get_engine(pair.sparse).weights.write()
    assert fresh
    assert all(torch.equal(pair.sparse.get_parameter(n), p.double()) for n, p in fresh.items())
    pair.sparse.delete_adapter("other")
    pair.train()
    assert summary(pair.sparse, verify=True).verification.ok
    SparseDelta.from_model(pair.sparse).save(tmp_path)
    delta = SparseDelta.load(tmp_path)
    assert delta.whole
    assert not any(".other" in tensor_name for tensor_name in [*delta.support, *delta.whole])
    trained = pair.check()
    for model in (copy.deepcopy(pair.sparse), desparsify(pair.sparse)):
        assert torch.equal(outputs(model, pair.batches[0]), trained)


@pytest.mark.parametrize("name", ["DoRA", "LoRA on experts", "LoRA and modules to save", "IA3"])
def test_activation_checkpointing_changes_nothing(name):
    twins = AdapterTwins(name)
    for model in (twins.dense, twins.sparse):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    twins.train(4)


@adapters
def test_desparsify_gives_pefts_model_back(name, twins):
    trained = twins.check()
    plain, new = desparsify(twins.sparse), adapted(name)[0]
    assert [(n, type(m)) for n, m in plain.named_modules()] == [(n, type(m)) for n, m in new.named_modules()]
    required = ({n: p.requires_grad for n, p in model.named_parameters()} for model in (plain, new))
    assert next(required) == next(required)
    assert torch.equal(outputs(plain, twins.batches[0]), trained)


@pytest.mark.parametrize("name", ["LoRA", "DoRA", "LoRA on experts", "LoRA and modules to save"])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "adapter in float32"])
def test_a_bfloat16_model_trains_and_merges(name, autocast):
    model, batches = base_of(name, torch.bfloat16)
    model = get_peft_model(model, ADAPTERS[name][1](), autocast_adapter_dtype=autocast).train()
    batches = [{k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()} for batch in batches]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(sparsify(model, 20, "id3", steps=len(batches)), batches)
    changed = sum(int((t.parameter != before[t.name]).sum()) for t in get_engine(model).tensors)
    assert 0 < changed <= 20
    trained = outputs(model, batches[0])
    assert_close(outputs(model.merge_and_unload(), batches[0]), trained, 0.05)


def assert_saved_alike(sparse, dense, folder):
    found = []
    for name, model in (("sparse", sparse), ("dense", dense)):
        model.save_pretrained(folder / name)
        files = {path.name: path for path in (folder / name).iterdir()}
        found += [files.keys(), files["adapter_config.json"].read_text(), load_file(files["adapter_model.safetensors"])]
    assert found[:2] == found[3:5]
    assert_close(found[2], found[5])


@adapters
@pytest.mark.filterwarnings("error:.*missing adapter keys")
def test_a_saved_adapter_is_a_plain_one_and_gives_the_same_outputs_in_a_plain_and_a_sparsified_model(
    name, twins, tmp_path
):
    assert_saved_alike(twins.sparse, twins.dense, tmp_path)
    plain = PeftModel.from_pretrained(base_of(name)[0], tmp_path / "sparse").double()
    sparse = sparsify(adapted(name)[0], twins.budget, "id3", steps=2)
    with pytest.warns(UserWarning, match="loaded without entries"):
        peft.set_peft_model_state_dict(sparse, get_peft_model_state_dict(twins.sparse))
    for loaded in (plain, sparse):
        assert_close(outputs(loaded, twins.batches[0]), twins.check())


@adapters
@pytest.mark.parametrize("low_memory", [False, True], ids=["", "low memory"])
def test_an_adapter_is_loaded_over_the_one_that_is_trained(name, low_memory, twins, tmp_path):
    twins.sparse.save_pretrained(tmp_path)
    other = AdapterTwins(name, strategy="pafi")
    other.train()
    other.sparse.load_adapter(tmp_path, "default", low_cpu_mem_usage=low_memory)
    other.sparse.double()
    loaded = outputs(other.sparse, other.batches[0])
    assert_close(loaded, twins.check())
    other.new_optimizer()
    other.sparse(**other.batches[0])["loss"].backward()
    other.optimizer.step()
    assert not torch.equal(outputs(other.sparse, other.batches[0]), loaded)
    assert unmasked_sets(other.sparse) == other.oracle.unmasked_sets()


def test_transformers_own_adapters_are_sparsified_too(tmp_path):
    models = []
    for _ in range(2):
        model, batches = base_of("LoRA")
        model.add_adapter(lora(target_modules=ATTENTION, init_lora_weights=False))
        models.append(model.double().train())
    dense, sparse = models
    dense.load_state_dict(sparse.state_dict())
    names = {name for name, parameter in dense.named_parameters() if parameter.requires_grad}
    Twins(dense, sparsify(sparse, 30, "id3", steps=3), 30, 3, names=names).train(batches)
    assert_saved_alike(sparse, dense, tmp_path)
