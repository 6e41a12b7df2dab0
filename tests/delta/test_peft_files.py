"""PEFT's adapters, read as deltas that compute what PEFT computes."""

import copy
import shutil

import pytest
import torch
from models import bert, train
from peft import LoraConfig, PeftModel, PrefixTuningConfig, ShiraConfig, SupertuningConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sparsify import DeltaFormatError, SparseDelta, SparsifyError, load_model, sparsify

WEIGHTS = "adapter_model.safetensors"
TOKENS = torch.arange(24).reshape(4, 6)
TARGETS = {"target_modules": ["query", "layer.1.output.dense"], "modules_to_save": ["classifier"]}
CONFIGS = {
    "shira": ShiraConfig(r=2, random_seed=0, **TARGETS),
    "supertuning": SupertuningConfig(sparsity=0.8, **TARGETS),
    "lora": LoraConfig(r=2, **TARGETS),
}


def make_base(dtype=torch.float32):
    torch.manual_seed(0)
    model = bert()[0].eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)  # far enough from zero that every entry shows in the outputs
    return model.to(dtype)


@torch.no_grad()
def outputs(model):
    return model(input_ids=TOKENS).logits


@pytest.fixture
def base():
    return make_base()


def train_with_peft(base, folder, config):
    model = get_peft_model(copy.deepcopy(base), copy.deepcopy(config))
    train(model, [{"input_ids": TOKENS, "labels": torch.tensor([0, 1, 2, 0])}] * 4, lr=0.1)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_peft_trained_is_read(method, dtype, tmp_path):
    base = make_base(dtype)
    trained = train_with_peft(base, tmp_path, CONFIGS[method])
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    delta = SparseDelta.from_peft(tmp_path, base)
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    assert set(delta.whole) == {"classifier.bias", "classifier.weight"}
    assert all(part.kind == "replace" for part in delta.tensors.values())
    assert delta.config["converted_from"]["peft_type"] == method.upper()
    own_head = copy.deepcopy(base)
    nn.init.normal_(own_head.classifier.weight)  # a new one is random on every load
    expected = trained.merge_and_unload() if method == "lora" else trained  # the others round nothing when merged
    assert torch.equal(outputs(delta.apply(own_head)), outputs(expected))


@pytest.fixture(scope="module")
def shira(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peft") / "shira"
    train_with_peft(make_base(), folder, CONFIGS["shira"])
    return folder


@pytest.fixture
def folder(shira, tmp_path):
    """The files of an adapter, which a test may change."""
    return shutil.copytree(shira, tmp_path / "shira")


def refused(folder, base, match, error=DeltaFormatError):
    with pytest.raises(error, match=match):
        SparseDelta.from_peft(folder, base)


def test_a_folder_without_an_adapter_or_with_a_broken_one_is_refused(folder, base, tmp_path):
    refused(tmp_path, base, "adapter_config.json` is no JSON .*there is no such file", SparsifyError)
    (folder / WEIGHTS).write_bytes(b"nothing")
    refused(folder, base, "PEFT cannot merge the adapter in .*shira` into this base: .*Nothing was loaded")
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    refused(folder, base, "has an adapter in `adapter_model.bin`, a pickle, which can run code")
    with pytest.raises(DeltaFormatError, match=r"has an adapter in `adapter_model.bin`, a pickle"):
        SparseDelta.load(folder)


def test_another_base_is_refused(folder, base):
    refused(folder, nn.Sequential(nn.Linear(2, 2)), "PEFT cannot merge the adapter")
    refused(folder, sparsify(base, 50, "id3", steps=2), "this model is sparsified", SparsifyError)
    torch.manual_seed(0)
    refused(folder, bert(hidden_size=32)[0], "PEFT cannot merge the adapter")


def test_an_adapter_without_a_part_that_the_base_wants_is_refused(folder, base):
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"query"', '"query", "key"'))
    refused(folder, base, "missing adapter keys")


def test_an_adapter_that_cannot_be_merged_or_changes_nothing_is_refused(base, tmp_path):
    prefix = PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    get_peft_model(copy.deepcopy(base), prefix).save_pretrained(tmp_path / "prefix")
    refused(tmp_path / "prefix", base, "PEFT cannot merge the adapter")
    get_peft_model(copy.deepcopy(base), ShiraConfig(r=1, target_modules=["query"])).save_pretrained(tmp_path / "new")
    refused(tmp_path / "new", base, "the two models do not differ", SparsifyError)


def test_an_adapter_on_a_tied_output_layer_changes_what_peft_changes_by_merging_it(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    base = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=40, tie_word_embeddings=True)).eval()
    model = get_peft_model(copy.deepcopy(base), ShiraConfig(target_modules=["lm_head"], r=2))
    for name, parameter in model.named_parameters():
        if "shira" in name:
            parameter.data += 1
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.warns(UserWarning, match="complications, for example when merging"):
        delta = SparseDelta.from_peft(tmp_path, base)
    ids = torch.arange(6)[None]
    assert torch.equal(delta.apply(copy.deepcopy(base))(ids).logits, model.merge_and_unload()(ids).logits)


@pytest.mark.parametrize("is_tied", [True, False])
def test_tables_of_more_tokens_go_with_an_adapter_whole_and_once(is_tied, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = LlamaConfig(**sizes, vocab_size=40, pad_token_id=None, tie_word_embeddings=is_tied)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")

    def with_tokens():
        model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
        model.resize_token_embeddings(45)
        return model

    ids = torch.arange(39, 45)[None]
    for settings in (LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"]), sparse_config()):
        model = get_peft_model(with_tokens(), settings)
        with pytest.warns(UserWarning, match="Setting `save_embedding_layers` to `True`"):
            model.save_pretrained(tmp_path / settings.peft_type.value)
    expected = model(ids).logits
    assert torch.equal(load_model(tmp_path / "base", tmp_path / settings.peft_type.value)(ids).logits, expected)
    delta = SparseDelta.from_peft(tmp_path / "LORA", with_tokens())
    assert list(delta.tensors) == ["model.layers.0.self_attn.q_proj.weight"]
    tuned = PeftModel.from_pretrained(with_tokens(), tmp_path / "LORA").merge_and_unload()
    loaded = load_model(tmp_path / "base", delta, model_class=LlamaForCausalLM)
    assert torch.equal(loaded(ids).logits, tuned(ids).logits)
    with pytest.raises(SparsifyError, match=r"resize_token_embeddings\(45\)` first \(`load_model` and `merge` do so\)"):
        delta.check(LlamaForCausalLM.from_pretrained(tmp_path / "base"))


def sparse_config():
    from sparsify.peft import SparseConfig

    return SparseConfig(budget=50, strategy="random", target_modules=["q_proj"], task_type="CAUSAL_LM")


def test_a_table_that_peft_stores_as_it_is_in_the_base_is_not_in_the_delta(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    base = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=40, pad_token_id=None))
    lora = LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"])
    get_peft_model(copy.deepcopy(base), lora).save_pretrained(tmp_path, save_embedding_layers=True)
    delta = SparseDelta.from_peft(tmp_path, base)
    assert list(delta.tensors) == ["model.layers.0.self_attn.q_proj.weight"]
    assert not delta.whole
