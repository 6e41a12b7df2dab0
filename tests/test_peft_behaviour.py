"""PEFT's own tests of its layers, rewritten for a sparsified model: what PEFT does to an adapter keeps working.

Two twins go through the same: one is trained densely by the oracle, the other is sparsified. Whatever PEFT does to them
in between, their outputs, losses and weights stay the same.
"""

import copy
import pickle

import peft
import pytest
import torch
from architectures import build
from oracle import DenseOracle, unmasked_sets
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from test_peft_models import ATTENTION, lora, on, saved_names
from test_peft_models import BATCHES as OWN_MODELS

from sparsify import SparseDelta, desparsify, get_unmasker, sparsify, summary
from sparsify.masked.module import masked_tensors

STEPS, RATE = 8, 0.02
ADAPTERS = {
    "LoRA": ("bert", lambda: lora(target_modules=ATTENTION)),
    "DoRA": ("bert", lambda: lora(target_modules=ATTENTION, use_dora=True)),
    "LoRA with a bias": ("bert", lambda: lora(target_modules=ATTENTION, lora_bias=True)),
    "LoRA on an embedding": ("bert", lambda: lora(target_modules=["word_embeddings", "query"])),
    "DoRA on an embedding": ("bert", lambda: lora(target_modules=["word_embeddings", "query"], use_dora=True)),
    "LoRA on Conv1D": ("gpt2", lambda: lora(target_modules=["c_attn"], fan_in_fan_out=True)),
    "LoRA on convolutions": ("shapes", lambda: lora(target_modules=["conv1d", "conv3d"])),
    "DoRA on convolutions": ("shapes", lambda: lora(target_modules=["conv1d", "conv3d"], use_dora=True)),
    "LoRA on attention": ("attention", lambda: lora(target_modules=["attention"])),
    "LoRA on experts": ("mixtral", lambda: lora(target_modules=["q_proj"], target_parameters=["experts.down_proj"])),
    "LoRA and modules to save": ("bert", lambda: lora(target_modules=ATTENTION, modules_to_save=["classifier"])),
    "LoHa": on("bert", "LoHaConfig", r=2),
    "IA3": on("llama", "IA3Config", target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": on("bert", "VeraConfig", r=4),
}
adapters = pytest.mark.parametrize("name", ADAPTERS)


def base_of(name, dtype=torch.float64):
    """The base model of an adapter, the same at each call, and its batches."""
    torch.manual_seed(0)
    base = ADAPTERS[name][0]
    if base in OWN_MODELS:
        make, batch = OWN_MODELS[base]
        return make().to(dtype).train(), [batch() for _ in range(3)]
    return build(base, dtype)


def adapted(name, *others, dtype=torch.float64):
    """A model with an adapter, and as many others as are named, all of them drawn at random and trainable."""
    model, batches = base_of(name, dtype)
    model = get_peft_model(model, ADAPTERS[name][1](), autocast_adapter_dtype=False)
    for other in others:
        model.add_adapter(other, ADAPTERS[name][1](), autocast_adapter_dtype=False)
    if others:
        model.set_requires_grad(["default", *others])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).train(), batches


@torch.no_grad()
def outputs(model, batch):
    training = model.training
    logits = model.eval()(**batch)["logits"]
    model.train(training)
    return logits


def assert_close(found, expected, tolerance=1e-9):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class Twins:
    """The dense model and the sparse one, from the same adapter."""

    def __init__(self, name, *others, strategy="id3", optimizer=None):
        (self.dense, self.batches), (self.sparse, _) = adapted(name, *others), adapted(name, *others)
        trainable = {n: p for n, p in self.dense.named_parameters() if p.requires_grad}
        candidates = {n: p for n, p in trainable.items() if n not in saved_names(self.dense)}
        self.budget = sum(parameter.numel() for parameter in candidates.values()) // 4
        self.make_optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, RATE))
        sparsify(self.sparse, self.budget, strategy, steps=STEPS)
        masks = {n: torch.zeros_like(p, dtype=torch.bool) for n, p in candidates.items()}
        for tensor_name, indices in unmasked_sets(self.sparse).items():
            masks[tensor_name].view(-1)[indices] = True
        static = strategy != "id3"
        self.oracle = DenseOracle(
            self.dense, self.make_optimizer(trainable.values()), self.budget, STEPS, masks=masks if static else None
        )
        self.oracle.parameters, self.oracle.masks = candidates, {n: masks[n] for n in candidates}
        self.new_optimizer()
        self.step = 0

    def new_optimizer(self):
        """An optimizer of all that says that it can be trained."""
        self.optimizer = self.make_optimizer([p for p in self.sparse.parameters() if p.requires_grad])

    def do(self, action):
        """Does the same to both, and returns what came of it."""
        return [action(model) for model in (self.dense, self.sparse)]

    def train(self, steps=2):
        for _ in range(steps):
            batch = self.batches[self.step % len(self.batches)]
            dense_loss, sparse_loss = self.do(lambda model, batch=batch: model(**batch)["loss"])
            assert_close(sparse_loss, dense_loss)
            self.oracle.step(dense_loss)
            self.optimizer.zero_grad()
            sparse_loss.backward()
            self.optimizer.step()
            self.step += 1
            assert unmasked_sets(self.sparse) == self.oracle.unmasked_sets()
        self.check()

    def check(self):
        """Both give the same outputs, and have the same weights."""
        dense, sparse = self.do(lambda model: outputs(model, self.batches[0]))
        assert_close(sparse, dense)
        weights = dict(self.sparse.named_parameters())
        for name, parameter in self.dense.named_parameters():
            assert_close(weights[name].detach(), parameter.detach())
        return sparse


def is_plain(model):
    """Whether a model has no trace of PEFT or of sparsify."""
    modules = list(model.modules())
    return not (
        any(isinstance(module, BaseTunerLayer) or masked_tensors(module) for module in modules)
        or any("sparse" in key for key in model.state_dict())
        or any(type(module).__module__.startswith("sparsify") for module in modules)
    )


# ------------------------------------------------------------------------------------------- merging


@adapters
@pytest.mark.parametrize("safe", [False, True], ids=["", "safe"])
def test_merging_and_unmerging_leave_the_outputs_and_training_goes_on(name, safe):
    twins = Twins(name)
    twins.train()
    before = twins.check()
    twins.do(lambda model: model.merge_adapter(safe_merge=safe))
    assert_close(twins.check(), before, 1e-6)
    with pytest.warns(UserWarning, match="already merged"):
        twins.sparse.merge_adapter()
    twins.do(lambda model: model.unmerge_adapter())
    assert_close(twins.check(), before, 1e-6)
    twins.train()


@adapters
@pytest.mark.parametrize("safe", [False, True], ids=["", "safe"])
def test_merge_and_unload_gives_a_plain_model_with_the_same_outputs(name, safe, tmp_path):
    twins = Twins(name)
    twins.train(3)
    trained = twins.check()
    merged = twins.sparse.merge_and_unload(safe_merge=safe)
    assert is_plain(merged)
    assert not hasattr(merged, "peft_config")
    assert_close(outputs(merged, twins.batches[0]), trained, 1e-6)
    assert merged.state_dict().keys() == base_of(name)[0].state_dict().keys()
    if hasattr(merged, "save_pretrained"):
        merged.save_pretrained(tmp_path)
        again = type(merged).from_pretrained(
            tmp_path, **({"experts_implementation": "eager"} if "experts" in name else {})
        )
    else:
        again = pickle.loads(pickle.dumps(merged))
    assert_close(outputs(again, twins.batches[0]), trained, 1e-6)


@adapters
def test_unload_gives_the_base_model_back(name):
    twins = Twins(name)
    twins.train(1)
    base, (batch, *_) = base_of(name)
    unloaded = twins.sparse.unload()
    assert is_plain(unloaded)
    if "save" not in name:  # PEFT leaves what was saved in its place
        assert_close(outputs(unloaded, batch), outputs(base, batch))
    assert unloaded.state_dict().keys() == base.state_dict().keys()


def test_several_adapters_are_merged_as_peft_merges_them():
    twins = Twins("LoRA", "other")
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
    twins = Twins(name)
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


OPTIMIZERS = {
    "sgd": None,
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["id3", "pafi"])
@pytest.mark.parametrize("name", ["LoRA", "DoRA", "LoRA on an embedding", "LoRA on experts", "LoHa"])
def test_an_optimizer_made_after_an_adapter_was_disabled_moves_no_frozen_entry(name, strategy, optimizer):
    twins = Twins(name, strategy=strategy, optimizer=OPTIMIZERS[optimizer])
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
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.5)
    for batch in batches:
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    assert summary(model, verify=True).verification.ok


def test_what_peft_sets_back_is_frozen_again_by_the_next_forward_pass():
    model, batches = adapted("LoRA on an embedding")
    sparsify(model, 20, steps=3)
    with model.disable_adapter():
        pass
    model(**batches[0])
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["sparse_values"]


# ------------------------------------------------------------------------------------ several adapters


@pytest.mark.parametrize("name", ["LoRA", "DoRA", "LoRA on an embedding", "LoRA and modules to save", "IA3", "LoHa"])
@pytest.mark.filterwarnings("ignore:.*got no gradient in the first step")
def test_adapters_are_trained_one_after_the_other(name):
    twins = Twins(name, "other")
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
    twins = Twins("LoRA", "other")
    twins.do(lambda model: model.base_model.set_adapter(["default", "other"]))
    twins.train(4)
    trained = {n.split(".")[-2] for n, indices in unmasked_sets(twins.sparse).items() if indices}
    assert trained == {"default", "other"}


def test_an_adapter_that_is_added_later_is_plain():
    twins = Twins("LoRA")
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


@pytest.mark.parametrize("name", ["LoRA", "DoRA", "LoRA on an embedding", "LoRA and modules to save", "IA3", "LoHa"])
@pytest.mark.filterwarnings("ignore:.*got no gradient in the first step")
def test_an_adapter_is_deleted_and_the_other_goes_on(name, tmp_path):
    twins = Twins(name, "other")
    twins.do(lambda model: model.set_adapter("other"))
    twins.train()
    twins.do(lambda model: model.delete_adapter("other"))
    assert twins.sparse.active_adapters == ["default"]
    twins.train()
    again = ADAPTERS[name][1]()
    twins.sparse.add_adapter("other", again)  # a new one of the same name is another
    fresh = {n: p.detach().clone() for n, p in twins.sparse.named_parameters() if ".other" in n}
    twins.sparse.double().set_adapter("default")
    get_unmasker(twins.sparse).sync()
    assert fresh
    assert all(torch.equal(twins.sparse.get_parameter(n), p.double()) for n, p in fresh.items())
    twins.sparse.delete_adapter("other")
    twins.train()
    assert summary(twins.sparse, verify=True).verification.ok
    SparseDelta.from_model(twins.sparse).save(tmp_path)
    delta = SparseDelta.load(tmp_path)
    assert 0 < delta.num_entries < get_unmasker(twins.sparse).unmasked
    assert not any(".other" in tensor_name for tensor_name in delta.support)
    trained = twins.check()
    assert torch.equal(outputs(copy.deepcopy(twins.sparse), twins.batches[0]), trained)
    assert torch.equal(outputs(desparsify(twins.sparse), twins.batches[0]), trained)


@pytest.mark.parametrize("combination", ["linear", "svd", "cat", "ties", "magnitude_prune"])
def test_weighted_adapters_are_what_peft_makes_of_them(combination):
    twins = Twins("LoRA", "other")
    twins.train()
    options = {"density": 0.5} if combination in ("ties", "magnitude_prune") else {}
    twins.do(lambda model: model.add_weighted_adapter(["default", "other"], [0.7, 0.4], "both", combination, **options))
    twins.do(lambda model: model.set_adapter("both"))
    dense, sparse = twins.do(lambda model: outputs(model, twins.batches[0]))
    assert_close(sparse, dense)
    twins.do(lambda model: model.set_adapter("default"))
    twins.train()


def test_a_batch_of_several_adapters_gives_what_the_plain_model_gives():
    twins = Twins("LoRA on an embedding", "other")
    twins.train()
    names = ["default", "other", "__base__", "default"]
    dense, sparse = twins.do(lambda model: outputs(model, {**twins.batches[0], "adapter_names": names}))
    assert_close(sparse, dense)
    twins.train()


# ------------------------------------------------------------------------------------ saving, loading


def plain_twin(name, *others):
    """An adapter as PEFT makes it, that was never sparsified."""
    return adapted(name, *others)[0]


@adapters
@pytest.mark.filterwarnings("error:.*missing adapter keys")
def test_a_saved_adapter_is_a_plain_one_and_gives_the_same_outputs(name, tmp_path):
    twins = Twins(name)
    twins.train(3)
    twins.sparse.save_pretrained(tmp_path / "sparse")
    plain_twin(name).save_pretrained(tmp_path / "plain")
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
    twins = Twins("LoRA", "other")
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
    plain_twin("LoRA").save_pretrained(tmp_path)
    twins = Twins("LoRA")
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
def test_pefts_state_dict_of_a_sparsified_model_is_the_plain_ones(name):
    twins = Twins(name)
    twins.train()
    dense, sparse = twins.do(get_peft_model_state_dict)
    assert sparse.keys() == dense.keys()
    for key, value in dense.items():
        assert_close(sparse[key], value)


@adapters
def test_a_state_dict_of_pefts_is_loaded_into_a_sparsified_model(name):
    twins = Twins(name)
    twins.train(3)
    fresh = sparsify(plain_twin(name), twins.budget, steps=STEPS)
    with pytest.warns(UserWarning, match="loaded without index buffers"):
        set_peft_model_state_dict(fresh, get_peft_model_state_dict(twins.sparse))
    assert_close(outputs(fresh, twins.batches[0]), twins.check())


def test_modules_to_save_are_trained_dense_and_stored_whole(tmp_path):
    twins = Twins("LoRA and modules to save")
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
    sparsify(sparse, 30, steps=3)
    oracle = DenseOracle(dense, torch.optim.SGD([p for p in dense.parameters() if p.requires_grad], RATE), 30, 3)
    optimizer = torch.optim.SGD([sparse.sparse_values], RATE)
    for batch in batches:
        oracle.step(dense(**batch)["loss"])
        optimizer.zero_grad()
        sparse(**batch)["loss"].backward()
        optimizer.step()
    assert_close(outputs(sparse, batches[0]), outputs(dense, batches[0]))
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


# ------------------------------------------------------------------------------------- the model itself


@pytest.mark.parametrize("duplicate", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("name", [name for name in ADAPTERS if ADAPTERS[name][0] != "mixtral"])  # does not pickle
def test_a_copy_trains_like_the_original(name, duplicate, tmp_path):
    twins = Twins(name)
    twins.train()
    if duplicate == "torch.save":
        torch.save(twins.sparse, tmp_path / "model.pt")
        twins.sparse = torch.load(tmp_path / "model.pt", weights_only=False)
    else:
        make = copy.deepcopy if duplicate == "deepcopy" else (lambda model: pickle.loads(pickle.dumps(model)))
        twins.sparse = make(twins.sparse)
    twins.new_optimizer()
    twins.train()


@pytest.mark.parametrize("name", [n for n in ADAPTERS if ADAPTERS[n][0] not in OWN_MODELS])
def test_activation_checkpointing_changes_nothing(name):
    twins = Twins(name)
    for model in (twins.dense, twins.sparse):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    twins.train(4)


@adapters
def test_desparsify_gives_pefts_model_back(name):
    twins = Twins(name)
    twins.train()
    trained = twins.check()
    plain = desparsify(twins.sparse)
    reference = plain_twin(name)
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
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
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
    from peft.optimizers import create_loraplus_optimizer

    model, batches = adapted("LoRA")
    sparsify(model, 20, steps=3)
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=4)
    for batch in batches:
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    assert get_unmasker(model).step == 3
    assert summary(model, verify=True).verification.ok
