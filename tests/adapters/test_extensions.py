"""A delta of LoRA or of adapters finds its modules by itself: they are recorded, and built again."""

import copy
import json
import warnings

import peft
import pytest
import torch
from limits import needs_limits, within_limits
from models import build, train
from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, PeftModel, get_peft_model
from transformers import BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from sparsify import SparseDelta, load_model, sparsify
from sparsify.adapters import add_adapters
from sparsify.delta.hub import public_config
from sparsify.errors import BaseMismatchError, SparsifyError

IDS = torch.arange(24).view(4, 6)
TARGETS = ["query", "value"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    build("bert")[0].bert.save_pretrained(folder)
    return folder


def base(folder, **kwargs):
    torch.manual_seed(1)
    return BertForSequenceClassification.from_pretrained(folder, **kwargs)


def trained(model, modules_to_save=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparsify(model, 0.5, "id3", steps=4, modules_to_save=modules_to_save)
    return train(model, [{"input_ids": IDS, "labels": torch.tensor([0, 1, 1, 0])}] * 4).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def lora_config(**settings):
    return LoraConfig(**{"r": 4, "target_modules": TARGETS, "task_type": "SEQ_CLS", **settings})


PEFT = {
    "lora": lora_config(),
    "rslora": lora_config(use_rslora=True, rank_pattern={"query": 2}),
    "dora": lora_config(use_dora=True),
    "lora on everything": lora_config(target_modules="all-linear", bias="lora_only"),
    "lora on embeddings": lora_config(target_modules=["word_embeddings"]),
    "lora that eva initialises": lora_config(init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.0)),
    "targets by an expression": lora_config(target_modules=r".*\.(query|value)"),
    "exclusions by an expression": lora_config(exclude_modules=r".*\.0\..*value"),
    "layers by an expression": lora_config(layers_to_transform=[1], layers_pattern=["laye[r]+"]),
    "ia3": IA3Config(target_modules=["value", "dense"], feedforward_modules=["dense"], task_type="SEQ_CLS"),
    "loha": LoHaConfig(r=4, target_modules=TARGETS, modules_to_save=["classifier"]),
    "lokr": LoKrConfig(r=4, target_modules=TARGETS, modules_to_save=["classifier"]),
}


@pytest.mark.parametrize(("name", "labels"), [*((name, 2) for name in PEFT), ("lora", 5), ("loha", 5)])
def test_a_peft_model_is_loaded_in_one_call_by_a_record_without_regular_expressions(folder, tmp_path, name, labels):
    model = get_peft_model(base(folder, num_labels=labels), copy.deepcopy(PEFT[name]))
    if "eva" in name:
        peft.initialize_lora_eva_weights(model, [{"input_ids": torch.arange(8).view(2, 4)}], show_progress_bar=False)
    SparseDelta.from_model(trained(model)).save(tmp_path / "delta")
    delta = SparseDelta.load(tmp_path / "delta")
    assert not any(char in json.dumps(delta.config["peft"]["default"]) for char in "*+(")
    assert str(folder) not in json.dumps(public_config(delta.config)), "a path of this machine is private"
    loaded = load_model(folder, tmp_path / "delta")
    assert isinstance(loaded, PeftModel)
    assert not loaded.training
    assert loaded.config.num_labels == labels
    assert torch.equal(logits(loaded), logits(model))


def test_tokens_of_tied_tables_that_peft_trains_are_built_once(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = LlamaConfig(**sizes, vocab_size=40, pad_token_id=None, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    lora = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 2])
    model = sparsify(get_peft_model(LlamaForCausalLM.from_pretrained(tmp_path), lora), 0.5, "id3", steps=1)
    model = train(model, [{"input_ids": IDS, "labels": IDS}]).eval()
    assert torch.equal(logits(load_model(tmp_path, SparseDelta.from_model(model))), logits(model))


def test_several_adapters_are_recorded_and_built(folder):
    model = get_peft_model(base(folder), copy.deepcopy(PEFT["lora"]))
    model.add_adapter("other", copy.deepcopy(PEFT["dora"]))
    delta = SparseDelta.from_model(trained(model))
    loaded = load_model(folder, delta)
    assert list(loaded.peft_config) == ["default", "other"]
    assert torch.equal(logits(loaded), logits(model))
    loaded.set_adapter("other")
    model.set_adapter("other")
    assert torch.equal(logits(loaded), logits(model))


def test_of_several_adapters_the_one_in_training_is_active(folder):
    model = get_peft_model(base(folder), copy.deepcopy(PEFT["lora"]))
    model.add_adapter("other", copy.deepcopy(PEFT["dora"]))
    model.set_adapter("other")
    loaded = load_model(folder, SparseDelta.from_model(trained(model)))
    assert loaded.active_adapter == "other"
    assert torch.equal(logits(loaded), logits(model))


def test_the_base_is_loaded_in_its_own_dtype(folder):
    model = get_peft_model(base(folder, dtype=torch.bfloat16), copy.deepcopy(PEFT["lora"]))
    delta = SparseDelta.from_model(trained(model))
    assert delta.config["base_dtypes"] == ["bfloat16"]
    loaded = load_model(folder, delta)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16, torch.float32}
    assert torch.equal(logits(loaded), logits(model))


@pytest.fixture(scope="module")
def lora(folder):
    """The folder of a base, and a delta of a LoRA on it."""
    return folder, SparseDelta.from_model(trained(get_peft_model(base(folder), copy.deepcopy(PEFT["lora"]))))


def changed(made, changes, what="peft"):
    """The same with other settings in the record."""
    folder, delta = made
    delta = copy.deepcopy(delta)
    (delta.config["peft"]["default"] if what == "peft" else delta.config["adapters"]).update(changes)
    return folder, delta


@pytest.mark.parametrize("kind", ["pfeiffer", "houlsby"])
def test_adapters_are_loaded_in_one_call(folder, kind):
    model = trained(add_adapters(base(folder), kind, 2), ["classifier"])
    assert torch.equal(logits(load_model(folder, SparseDelta.from_model(model))), logits(model))


@pytest.fixture(scope="module")
def pfeiffer(folder):
    """The same base, and a delta of adapters on it."""
    model = trained(add_adapters(base(folder), "pfeiffer", 2), modules_to_save=["classifier"])
    return folder, SparseDelta.from_model(model)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"peft_type": ["LORA"]}, SparsifyError, r"of type \['LORA'\], and only LORA, .* are built: build"),
        ({"init_lora_weights": "pissa"}, SparsifyError, "'pissa', which may have changed the base's own weights"),
        ({"r": 10**9}, BaseMismatchError, r"has shape \(1000000000, 16\) in the model that .* and \(4, 16\)"),
        ({"target_modules": ["nowhere"]}, SparsifyError, "PEFT cannot build the adapter that the delta records"),
        ({"target_modules": [*TARGETS, "key"]}, BaseMismatchError, "and no values in the delta"),
        ({"layers_to_transform": [0], "target_modules": 3}, SparsifyError, "PEFT"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(lora, changes, error, message):
    with pytest.raises(error, match=message):
        load_model(*changed(lora, changes))


CATASTROPHIC = "(((.*)*)*)*!"
MANY = [f"n{i}" for i in range(200_000)]


@needs_limits
@pytest.mark.parametrize(("key", "value", "message"), [
    ("target_modules", CATASTROPHIC, "with a regular expression in `{}` .*which may take for ever"),
    ("modules_to_save", ["classifier", CATASTROPHIC], "with a regular expression in `{}`"),
    ("rank_pattern", {CATASTROPHIC: 4}, "with a regular expression in `{}`"),
    ("layers_pattern", CATASTROPHIC, "with a regular expression in `{}`"),
    ("rank_pattern", dict.fromkeys(MANY, 4), "with 200,000 items in `{}`, expected at most"),
    ("modules_to_save", MANY, "with 200,000 items in `{}`, expected at most"),
], ids=range(6))  # fmt: skip
def test_a_record_runs_no_regular_expression_and_has_no_more_items_than_are_of_use(lora, key, value, message):
    made = changed(lora, {key: value} | ({"layers_to_transform": [0]} if key == "layers_pattern" else {}))
    with pytest.raises(SparsifyError, match=message.format(key)):
        within_limits(lambda: load_model(*made), seconds=10)


@needs_limits
@pytest.mark.parametrize(("changes", "message"), [
    ({"reduction_factor": 5e-324}, "reduction_factor=5e-324; expected a number of at least 1/1024"),
    ({"reduction_factor": 1e-3}, "tensor .* has shape"),
    ({"kind": ["pfeiffer"]}, r"kind=\['pfeiffer'\] is no kind of adapter"),
    ({"name": "training"}, "adapter_name='training' cannot be part of a parameter's name"),
    ({"target_modules": ["nowhere"]}, "has no module 'nowhere'"),
    ({"target_modules": [5]}, r"target_modules=\[5\]; expected a list of module names"),
    ({"target_modules": ["bert.pooler", "bert.pooler"]}, "and no values in the delta"),
], ids=str)  # fmt: skip
def test_a_record_of_adapters_that_does_not_fit_is_refused(pfeiffer, changes, message):
    with pytest.raises(SparsifyError, match=message):
        within_limits(lambda: load_model(*changed(pfeiffer, changes, "adapters")))


@pytest.mark.parametrize("name", ["\x1b[2J", "\u202e", "a\x00", "x" * 5000], ids=["escape", "override", "null", "long"])
@pytest.mark.parametrize("what", ["peft", "adapters"])
def test_the_name_of_a_recorded_adapter_is_quoted_briefly_and_cannot_steer_a_terminal(lora, pfeiffer, what, name):
    folder, delta = changed(lora if what == "peft" else pfeiffer, {} if what == "peft" else {"name": name}, what)
    if what == "peft":
        delta.config["peft"] = {name: delta.config["peft"]["default"]}
    with pytest.raises(BaseMismatchError, match=r"has shape .* in the model that the delta records") as caught:
        load_model(folder, delta)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_a_record_cannot_import_or_name_another_base(lora):
    hostile = {"megatron_config": {"a": 1}, "megatron_core": "antigravity", "base_model_name_or_path": "other/base"}
    config = load_model(*changed(lora, hostile)).peft_config["default"]
    assert (config.megatron_config, config.base_model_name_or_path) == (None, str(lora[0]))


def test_a_delta_cannot_claim_more_than_the_base_has(lora, monkeypatch):
    monkeypatch.setattr("sparsify.adapters.extensions._ALWAYS_ALLOWED", 100)
    loaded = load_model(*lora)
    monkeypatch.setattr(type(loaded), "parameters", lambda self: iter([]))
    with pytest.raises(SparsifyError, match="numbers to the base, more than the base has itself"):
        load_model(*lora)


@pytest.mark.parametrize("verb", ["check", "merge", "patches"])
def test_verbs_on_the_bases_own_tensors_refuse_an_extended_base(lora, tmp_path, verb):
    folder, delta = lora
    args = {"check": [folder], "merge": [folder, tmp_path / "out"], "patches": [folder]}
    with pytest.raises(SparsifyError, match=f"{verb} goes by the base's own tensors, .* of modules that PEFT"):
        getattr(delta, verb)(*args[verb])
    assert not (tmp_path / "out").exists()
    plain = load_model(folder, delta).merge_and_unload()
    assert torch.allclose(logits(plain), logits(load_model(folder, delta)), atol=1e-6)


@pytest.mark.parametrize("config", [
    peft.PromptTuningConfig(num_virtual_tokens=2, task_type="SEQ_CLS"),
    peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="SEQ_CLS"),
    peft.VeraConfig(r=4, target_modules=TARGETS, task_type="SEQ_CLS"),
], ids=lambda config: config.peft_type.value)  # fmt: skip
def test_an_adapter_of_another_type_is_refused_by_its_name_and_built_by_the_user(folder, config):
    model = get_peft_model(base(folder), copy.deepcopy(config))
    delta = SparseDelta.from_model(trained(model))
    kind = config.peft_type.value
    with pytest.raises(SparsifyError, match=rf"'{kind}', and only LORA, .*: build the model .*delta\.apply\(model\)"):
        load_model(folder, delta)
    other = get_peft_model(base(folder), config).eval()
    assert torch.equal(logits(delta.apply(other)), logits(model))
