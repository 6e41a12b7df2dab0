"""PEFT's own tests of its layers, rewritten for twins: what PEFT does to an adapter keeps working once sparsified."""

import copy
import pickle

import peft
import pytest
import torch
from models import train
from oracle import unmasked_sets
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft_twins import ADAPTERS, ATTENTION, OWN_MODELS, AdapterTwins, adapted, base_of, lora, outputs
from safetensors.torch import load_file
from twins import Twins, assert_close, sgd

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
@pytest.mark.parametrize("safe", [False, True], ids=["", "safe"])
def test_merging_and_unmerging_leave_the_outputs_and_training_goes_on(twins, safe):
    before = twins.check()
    twins.do(lambda model: model.merge_adapter(safe_merge=safe))
    assert_close(twins.check(), before, 1e-6)
    with pytest.warns(UserWarning, match="already merged"):
        twins.sparse.merge_adapter()
    twins.do(lambda model: model.unmerge_adapter())
    assert_close(twins.check(), before, 1e-6)
    twins.train()


@adapters
@pytest.mark.parametrize("way", ["merge", "merge safely", "unload"])
def test_an_unloaded_model_is_plain_with_the_outputs_of_the_trained_or_the_base_model(name, twins, way):
    base, (batch, *_) = base_of(name)
    trained = twins.check()
    plain = twins.sparse.unload() if way == "unload" else twins.sparse.merge_and_unload(safe_merge="safely" in way)
    assert is_plain(plain)
    assert not hasattr(plain, "peft_config")
    if way != "unload":
        assert_close(outputs(plain, batch), trained, 1e-6)
    elif "save" not in name:  # PEFT leaves what was saved in its place
        assert_close(outputs(plain, batch), outputs(base, batch))
    assert plain.state_dict().keys() == base.state_dict().keys()


@adapters
def test_a_disabled_adapter_gives_the_base_models_outputs_and_training_goes_on(name, twins):
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


def test_pefts_optimizer_made_after_an_adapter_was_set_trains_the_flat_delta_alone():
    model, batches = adapted("LoRA")
    sparsify(model, 20, steps=3)
    model.set_adapter("default")
    train(model, batches, optimizer=create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=4))
    assert get_engine(model).step == 3
    assert summary(model, verify=True).verification.ok


SEVERAL = ["LoRA", "DoRA", "LoRA on an embedding", "LoRA and modules to save", "IA3", "LoHa"]
several = pytest.mark.parametrize("name", SEVERAL)


@several
def test_adapters_are_trained_one_after_the_other(name):
    twins = AdapterTwins(name, "other")
    weights = dict(twins.sparse.named_parameters())
    twins.do(lambda model: model.set_adapter("default"))
    for active, inactive in (("default", "other"), ("other", "default"), ("default", "other")):
        twins.do(lambda model, active=active: model.set_adapter(active))
        assert twins.sparse.active_adapters == [active]
        before = {n: p.detach().clone() for n, p in weights.items()}
        twins.train()
        moved = {n for n, p in weights.items() if not torch.equal(p, before[n])}
        assert not any(f".{inactive}" in n for n in moved)
        assert any(f".{active}" in n for n in moved)


def test_two_active_adapters_are_trained_together_and_pefts_reports_work(capsys):
    twins = AdapterTwins("LoRA", "other")
    twins.do(lambda model: model.base_model.set_adapter(["default", "other"]))
    twins.train(4)
    trained = {n.split(".")[-2] for n, indices in unmasked_sets(twins.sparse).items() if indices}
    assert trained == {"default", "other"}
    assert twins.sparse.get_model_status().available_adapters == ["default", "other"]
    twins.sparse.print_trainable_parameters()
    assert f"trainable params: {twins.budget} " in capsys.readouterr().out


def test_an_adapter_that_is_added_later_is_plain(twins):
    frozen = {t.name: t.parameter.detach().clone() for t in get_engine(twins.sparse).tensors}
    twins.sparse.add_adapter("late", lora(target_modules=ATTENTION, init_lora_weights=False))
    twins.sparse.double().set_adapter("late")
    late = [p for n, p in twins.sparse.named_parameters() if ".late." in n]
    assert late
    optimizer = torch.optim.SGD(late, 0.02)
    twins.sparse(**twins.batches[0])["loss"].backward()
    assert all(parameter.grad is not None for parameter in late)
    optimizer.step()
    assert all(torch.equal(twins.sparse.get_parameter(n), before) for n, before in frozen.items())
    twins.sparse.delete_adapter("late")
    twins.do(lambda model: model.set_adapter("default"))
    twins.train()


@several
def test_an_adapter_is_deleted_and_the_other_goes_on(name, tmp_path):
    pair = AdapterTwins(name, "other")
    pair.do(lambda model: model.set_adapter("other"))
    pair.train()
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


def test_a_batch_of_several_adapters_gives_what_the_plain_model_gives():
    twins = AdapterTwins("LoRA on an embedding", "other")
    batch = {**twins.batches[0], "adapter_names": ["default", "other", "__base__", "default"]}
    assert_close(*twins.do(lambda model: outputs(model, batch)))
    twins.train()


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("duplicate", COPIES)
@pytest.mark.parametrize("name", [name for name in ADAPTERS if ADAPTERS[name][0] != "mixtral"])  # does not pickle
def test_a_copy_trains_like_the_original(twins, duplicate):
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
def test_desparsify_gives_pefts_model_back(name, twins):
    trained = twins.check()
    plain, new = desparsify(twins.sparse), adapted(name)[0]
    assert [(n, type(m)) for n, m in plain.named_modules()] == [(n, type(m)) for n, m in new.named_modules()]
    required = ({n: p.requires_grad for n, p in model.named_parameters()} for model in (plain, new))
    assert next(required) == next(required)
    assert torch.equal(outputs(plain, twins.batches[0]), trained)


@pytest.mark.parametrize("name", [n for n in ADAPTERS if n not in ("LoRA on convolutions", "DoRA on convolutions")])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "adapter in float32"])
def test_a_bfloat16_model_trains_and_merges(name, autocast):
    model, batches = base_of(name, torch.bfloat16)
    model = get_peft_model(model, ADAPTERS[name][1](), autocast_adapter_dtype=autocast).train()
    batches = [{k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()} for batch in batches]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(sparsify(model, 20, steps=len(batches)), batches)
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
def test_a_saved_adapter_is_a_plain_one_and_gives_the_same_outputs(name, twins, tmp_path):
    assert_saved_alike(twins.sparse, twins.dense, tmp_path)
    loaded = PeftModel.from_pretrained(base_of(name)[0], tmp_path / "sparse").double()
    assert_close(outputs(loaded, twins.batches[0]), twins.check())


def test_an_adapter_is_loaded_beside_the_one_that_is_trained(twins, tmp_path):
    adapted("LoRA")[0].save_pretrained(tmp_path)
    trained = twins.check()
    twins.do(lambda model: model.load_adapter(tmp_path, "loaded"))
    twins.do(lambda model: model.double().set_adapter("loaded"))
    assert not torch.equal(twins.check(), trained)
    twins.do(lambda model: model.set_adapter("default"))
    assert torch.equal(twins.check(), trained)
    twins.train()


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


@adapters
def test_pefts_state_dict_is_the_plain_ones_and_is_loaded_into_a_sparsified_model(name, twins):
    dense, sparse = twins.do(get_peft_model_state_dict)
    assert_close(sparse, dense)
    fresh = sparsify(adapted(name)[0], twins.budget, steps=2)
    with pytest.warns(UserWarning, match="loaded without entries"):
        peft.set_peft_model_state_dict(fresh, sparse)
    assert_close(outputs(fresh, twins.batches[0]), twins.check())


def test_transformers_own_adapters_are_sparsified_too(tmp_path):
    models = []
    for _ in range(2):
        model, batches = base_of("LoRA")
        model.add_adapter(lora(target_modules=ATTENTION, init_lora_weights=False))
        models.append(model.double().train())
    dense, sparse = models
    dense.load_state_dict(sparse.state_dict())
    names = {name for name, parameter in dense.named_parameters() if parameter.requires_grad}
    Twins(dense, sparsify(sparse, 30, steps=3), 30, 3, names=names).train(batches)
    assert_saved_alike(sparse, dense, tmp_path)
