"""A sparsified adapter is saved and loaded as PEFT saves and loads a plain one."""

import peft
import pytest
import torch
from oracle import unmasked_sets
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft_twins import (
    ADAPTERS,
    ATTENTION,
    OWN_MODELS,
    RATE,
    STEPS,
    AdapterTwins,
    adapted,
    assert_close,
    base_of,
    lora,
    outputs,
    saved_names,
)
from safetensors.torch import load_file
from twins import Twins

from sparsify import SparseDelta, get_unmasker, sparsify

adapters = pytest.mark.parametrize("name", ADAPTERS)


@adapters
@pytest.mark.filterwarnings("error:.*missing adapter keys")
def test_a_saved_adapter_is_a_plain_one_and_gives_the_same_outputs(name, tmp_path):
    twins = AdapterTwins(name)
    twins.train(3)
    twins.sparse.save_pretrained(tmp_path / "sparse")
    adapted(name)[0].save_pretrained(tmp_path / "plain")
    saved, plain = [load_file(tmp_path / which / "adapter_model.safetensors") for which in ("sparse", "plain")]
    assert {key: (value.shape, value.dtype) for key, value in saved.items()} == {
        key: (value.shape, value.dtype) for key, value in plain.items()
    }
    assert {p.name for p in (tmp_path / "sparse").iterdir()} == {p.name for p in (tmp_path / "plain").iterdir()}
    configs = [(tmp_path / which / "adapter_config.json").read_text() for which in ("sparse", "plain")]
    assert configs[0] == configs[1]
    loaded = PeftModel.from_pretrained(base_of(name)[0], tmp_path / "sparse").double()
    assert_close(outputs(loaded, twins.batches[0]), twins.check())


def test_selected_adapters_are_saved_each_in_its_folder(tmp_path):
    twins = AdapterTwins("LoRA", "other")
    twins.train()
    twins.do(lambda model: model.set_adapter("other"))
    twins.train()
    twins.sparse.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base_of("LoRA")[0], tmp_path, adapter_name="default")
    loaded.load_adapter(tmp_path / "other", "other")
    for adapter in ("default", "other"):
        twins.do(lambda model, adapter=adapter: model.set_adapter(adapter))
        loaded.set_adapter(adapter)
        assert_close(outputs(loaded.double(), twins.batches[0]), twins.check())
    twins.sparse.save_pretrained(tmp_path / "one", selected_adapters=["default"])
    assert not (tmp_path / "one" / "other").exists()


def test_an_adapter_is_loaded_beside_the_one_that_is_trained(tmp_path):
    torch.manual_seed(5)
    adapted("LoRA")[0].save_pretrained(tmp_path)
    twins = AdapterTwins("LoRA")
    twins.train()
    trained = twins.check()
    twins.do(lambda model: model.load_adapter(tmp_path, "loaded"))
    twins.check()
    twins.do(lambda model: model.double().set_adapter("loaded"))
    assert not torch.equal(twins.check(), trained)
    twins.do(lambda model: model.set_adapter("default"))
    assert torch.equal(twins.check(), trained)
    twins.train()


@adapters
@pytest.mark.parametrize("low_memory", [False, True], ids=["", "low memory"])
def test_an_adapter_is_loaded_over_the_one_that_is_trained(name, low_memory, tmp_path):
    other = AdapterTwins(name)
    other.train(4)
    other.sparse.save_pretrained(tmp_path)
    twins = AdapterTwins(name, strategy="pafi")
    twins.train()
    twins.sparse.load_adapter(tmp_path, "default", low_cpu_mem_usage=low_memory)
    twins.sparse.double()
    loaded = outputs(twins.sparse, twins.batches[0])
    assert_close(loaded, other.check())
    twins.new_optimizer()
    twins.sparse(**twins.batches[0])["loss"].backward()
    twins.optimizer.step()
    assert not torch.equal(outputs(twins.sparse, twins.batches[0]), loaded)
    assert unmasked_sets(twins.sparse) == twins.oracle.unmasked_sets()


@adapters
def test_pefts_state_dict_is_the_plain_ones_and_is_loaded_into_a_sparsified_model(name):
    twins = AdapterTwins(name)
    twins.train(3)
    dense, sparse = twins.do(get_peft_model_state_dict)
    assert sparse.keys() == dense.keys()
    for key, value in dense.items():
        assert_close(sparse[key], value)
    fresh = sparsify(adapted(name)[0], twins.budget, steps=STEPS)
    with pytest.warns(UserWarning, match="loaded without index buffers"):
        set_peft_model_state_dict(fresh, sparse)
    assert_close(outputs(fresh, twins.batches[0]), twins.check())


def test_modules_to_save_are_trained_dense_and_stored_whole(tmp_path):
    twins = AdapterTwins("LoRA and modules to save")
    saved = saved_names(twins.sparse)
    before = {name: twins.sparse.get_parameter(name).detach().clone() for name in saved}
    twins.train()
    assert saved
    assert all((twins.sparse.get_parameter(name) != value).all() for name, value in before.items())
    assert any("classifier" in name for name in SparseDelta.from_model(twins.sparse).whole)
    twins.do(lambda model: model.set_adapter("default"))
    twins.train()


def test_transformers_own_adapters_are_sparsified_too(tmp_path):
    models = []
    for _ in range(2):
        model, batches = base_of("LoRA")
        model.add_adapter(LoraConfig(r=2, target_modules=ATTENTION, init_lora_weights=False))
        models.append(model.double().train())
    dense, sparse = models
    dense.load_state_dict(sparse.state_dict())
    names = {name for name, parameter in dense.named_parameters() if parameter.requires_grad}
    Twins(dense, sparsify(sparse, 30, steps=3), 30, 3, names=names).train(batches)
    for model, folder in ((sparse, "sparse"), (dense, "dense")):
        model.save_pretrained(tmp_path / folder)
    saved, plain = [load_file(tmp_path / which / "adapter_model.safetensors") for which in ("sparse", "dense")]
    assert saved.keys() == plain.keys()
    for key, value in plain.items():
        assert_close(saved[key], value)


def test_an_adapter_injected_into_any_module_is_sparsified_too():
    model, batch = OWN_MODELS["attention"][0]().double(), OWN_MODELS["attention"][1]()
    peft.inject_adapter_in_model(lora(target_modules=["embed", "head"], init_lora_weights=False), model)
    model.double()
    sparsify(model, 12, steps=1)
    optimizer = torch.optim.SGD([model.sparse_values], RATE)
    model(**batch)["loss"].backward()
    optimizer.step()
    assert all("lora_" in name for name, indices in unmasked_sets(model).items() if indices)
    assert get_unmasker(model).unmasked == 12
